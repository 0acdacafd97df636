"""`pd-operator run` with a lease that a slow machine does not take away: `python -m opsrunner.program`.

A leader that cannot renew for 10 s ends, as it must, and a kubelet starts it anew. Tests have no kubelet, and an API server that
shares two cores with everything else was seen to take longer. What a lost lease does is shown by test_kube_lease.py and
test_runtime_exit.py.
"""

from __future__ import annotations

import sys

from pd_operator import cli, manager
from pd_operator.kube.lease import RETRY_PERIOD, LeaseTiming
from pd_operator.settings import Settings

PATIENT = LeaseTiming(lease_duration=60.0, renew_deadline=45.0, retry_period=RETRY_PERIOD)


async def patient(settings: Settings, reconcile_factory: manager.ReconcileFactory) -> int:
    """As `pd_operator.manager.run`."""
    return await manager.Manager(settings, reconcile_factory, lease_timing=PATIENT).run()


if __name__ == "__main__":
    manager.run = patient
    sys.exit(cli.main(["run"]))
