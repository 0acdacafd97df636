"""The operator's runtime around a reconciler of a few lines: `python -m faults.program`.

Settings come from PD_* variables. TEST_KUBECONFIG names the cluster. Each reconcile applies one ConfigMap that carries the
process's name and a count, after TEST_SLEEP seconds; lines `begins NAMESPACE/NAME` and `reconciled NAMESPACE/NAME` go to standard
output.
TEST_LEASE=quick shortens the lease to 8 s.
"""

from __future__ import annotations

import asyncio
import os
import sys

from pd_operator import logs
from pd_operator.core.result import Done, Result
from pd_operator.kube.client import KubeClient
from pd_operator.kube.events import EventRecorder
from pd_operator.kube.lease import LeaseTiming
from pd_operator.kube.store import Stores
from pd_operator.manager import Manager, run_process
from pd_operator.settings import Settings, load

QUICK = LeaseTiming(lease_duration=8.0, renew_deadline=5.0, retry_period=0.5)


class Recording:
    """Applies a ConfigMap per key."""

    def __init__(self, client: KubeClient, stores: Stores, settings: Settings, recorder: EventRecorder) -> None:
        self._client = client
        self._settings = settings
        self._counts: dict[tuple[str, str], int] = {}

    async def reconcile(self, key: tuple[str, str]) -> Result:
        """See Reconciler."""
        print(f"begins {key[0]}/{key[1]}", flush=True)
        await asyncio.sleep(float(os.environ.get("TEST_SLEEP", "0")))
        self._counts[key] = self._counts.get(key, 0) + 1
        await self._client.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"namespace": key[0], "name": f"seen-{key[1]}"},
                "data": {"by": self._settings.identity, "count": str(self._counts[key])},
            }
        )
        print(f"reconciled {key[0]}/{key[1]}", flush=True)
        return Done()


async def main() -> int:
    """Run it; the exit code."""
    settings = load(os.environ)
    logs.setup(settings.log_level)
    timing = QUICK if os.environ.get("TEST_LEASE") == "quick" else None
    return await Manager(settings, Recording, kubeconfig=os.environ["TEST_KUBECONFIG"], lease_timing=timing).run()


if __name__ == "__main__":
    sys.exit(run_process(main))
