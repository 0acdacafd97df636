"""40 PDDeployments on 300 nodes in 25 transfer domains while somebody else's pods come and go, with the real scheduler.

A minute of it, or PDD_SOAK_SECONDS. At no time is a slice in two domains (every binding is looked at). When the others stop coming,
everything comes to its end, no pod waits that could run, nobody could have more beside what runs (exact packing), all together
could have less than a hundredth more (a mixed-integer program that moves nothing that runs), and what is placed is not far below
what the program places of the same wishes on the same nodes from nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from churn.bindings import Bindings
from churn.fleet import Fleet, wishes
from churn.guests import Guests
from churn.packing import Best, most_beside, most_gpus
from cluster import session
from cluster.handle import Cluster
from cluster.kwok import FakeNodes
from faults.objects import install_crds
from opsrunner.api import Api
from opsrunner.process import Operator
from opsrunner.spaces import namespaces
from opsrunner.waits import until

pytestmark = pytest.mark.cluster

SECONDS = float(os.environ.get("PDD_SOAK_SECONDS", "60"))
SEED = int(os.environ.get("PDD_SOAK_SEED", "1"))
DOMAINS, PER_DOMAIN, GPUS = 25, 12, 8
OBJECTS = 40
SHARE = float(os.environ.get("PDD_SOAK_SHARE", "0.8"))  # of all accelerators that they want together; the others hold 6 to 8 %
# Of what the program places when every replica that runs stays on its node: nobody moves one without need (ADR 0010).
BESIDE = 0.99
# Of what the program places from nothing, which knows all wishes and all foreign pods beforehand and may pack everything anew.
ANEW = 0.85
SETTLE_S = 600.0  # a bound that stops a hang; on a quiet machine it takes a few seconds


@pytest.fixture(scope="module")
def plane() -> Iterator[Cluster]:
    """A cluster of its own with all nodes."""
    with session.control_plane(
        FakeNodes(DOMAINS * PER_DOMAIN, prefix="c", gpus=GPUS, per_domain=PER_DOMAIN), node_grace=600
    ) as cluster:
        install_crds(cluster)
        yield cluster


@pytest.mark.timeout(1500 + 2 * SECONDS)
def test_nothing_crosses_and_everything_that_fits_runs(plane: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    api = Api(plane.kubeconfig)
    wanted = wishes(OBJECTS, round(DOMAINS * PER_DOMAIN * GPUS * SHARE), SEED, PER_DOMAIN * GPUS)
    total = sum(w.total for w in wanted)
    with namespaces(plane, "churn", 2) as (home, others):
        fleet = Fleet(api, home, wanted)
        with Operator(plane.kubeconfig, [], home=home, folder=tmp_path) as operator, Bindings(api, fleet.domains) as bindings:
            guests = Guests(api, others, rate=6, stay=15, sizes=(1, 1, 2, 4), seed=SEED)
            with guests:
                begin = time.monotonic()
                for number, one in enumerate(wanted):
                    fleet.create(one)
                    time.sleep(max(0.0, begin + (number + 1) * min(SECONDS, 60) / 2 / OBJECTS - time.monotonic()))
                while time.monotonic() - begin < SECONDS:
                    time.sleep(1)
                    assert not bindings.failed and not bindings.crossings, bindings.failed or bindings.crossings
                busy = fleet.placed(fleet.pods())
            stopped = time.monotonic()
            pods = until(
                "everything to come to its end",
                fleet.rest,
                timeout=SETTLE_S,
                show=lambda: "\n".join(fleet.unrest(fleet.pods())),
            )
            settled = time.monotonic() - stopped
            until("the watch of bindings to catch up", lambda: bindings.failed or not bindings.behind(pods), timeout=30)
            assert not bindings.failed and not bindings.crossings, bindings.failed or bindings.crossings
            ours = fleet.placed(pods)
            rooms = fleet.free([p for p in pods if p["metadata"]["namespace"] == others])
            all_ = Best(ours, ours)  # nobody places more than is wanted
            beside = all_ if ours == total else most_beside(wanted, fleet.running(pods), fleet.free(pods))
            best = all_ if ours == total else most_gpus(wanted, rooms)
            with capsys.disabled():
                print(
                    f"\n{OBJECTS} PDDeployments, {SECONDS:.0f} s: {bindings.count} engine pods bound, {guests.came} guests came,"
                    f" {guests.went} went; wanted {total} GPUs of {sum(map(sum, rooms.values()))} free of guests; placed {busy} at"
                    f" the end of it, {ours} after {settled:.0f} s; HiGHS beside what runs {beside.found} (at most"
                    f" {beside.bound}), from nothing {best.found} (at most {best.bound});"
                    f" {operator.metric('pd_operator_reconcile_total'):.0f} reconciles"
                )
            assert ours >= BESIDE * beside.found
            assert ours >= ANEW * best.found
            assert bindings.count >= sum(sum(w.replicas) for w in wanted)
            assert guests.went >= SECONDS / 3
