"""Slices that wait for what the operator does not decide: a cluster autoscaler's nodes, a queue's admission. They come up whole."""

from __future__ import annotations

import time

import pytest

from opsrunner import waits
from opsrunner.api import Api, Object
from opsrunner.autoscaler import Autoscaler, Group
from opsrunner.domains import Pool
from opsrunner.gate import GATE, Queue
from opsrunner.recording import Recording

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("deaths")]  # the latter takes minutes by itself: it begins here

TIMEOUT = "10s"  # schedulingTimeout, the least that is allowed; both waits last longer
LONGER = 13.0  # seconds
BOUND = 180.0  # seconds that stop a hang; on a quiet machine all of it takes 40


def reasons(recording: Recording, name: str, type_: str = "Placed") -> list[str]:
    """Reasons that a condition ever had, in order."""
    found: list[str] = []
    for event in recording.events("PDDeployment", name):
        condition = waits.conditions(event.object).get(type_)
        if condition and [condition["reason"]] != found[-1:]:
            found.append(condition["reason"])
    return found


def slices(recording: Recording, name: str) -> set[str]:
    """Slices that engine pods ever belonged to."""
    labels = [event.labels for event in recording.events("Pod", name)]
    return {one["pdserve.dev/slice"] for one in labels if "pdserve.dev/role" in one}


def never_given_up(recording: Recording, name: str) -> None:
    """The wedge clock stood still: nothing was ever left alone, and one slice did it."""
    for event in recording.events("PDDeployment", name):
        assert "excludedDomains" not in (event.object.get("status") or {}), waits.describe(event.object)
    assert len(slices(recording, name)) == 1
    assert "Wedged" not in reasons(recording, name)


def test_an_autoscaler_makes_the_nodes_one_by_one(nodes: Pool, api: Api, space: str) -> None:
    """Half of the slice has a node, and the node of the other half is being made for longer than schedulingTimeout."""
    groups = [Group(nodes.node(name), gpus=1, most=4, per_step=1) for name in ("a", "b")]
    with Recording(api, space, "PDDeployment", "Pod") as recording, Autoscaler(api, nodes, groups, not_ready=LONGER) as autoscaler:
        nodes.pdd("grown", schedulingTimeout=TIMEOUT)
        nodes.placed("grown", "False", "WaitingForNodes", timeout=BOUND)
        waits.until("the first half", lambda: nodes.places("grown"), timeout=BOUND)
        assert [role for where in nodes.places("grown").values() for role, _ in where] == ["decode"]
        nodes.ready("grown", timeout=BOUND)
    ((_, where),) = nodes.places("grown").items()
    assert [role for role, _ in where] == ["decode", "prefill"] and len({domain for _, domain in where}) == 1
    assert len(autoscaler.made) == 2
    never_given_up(recording, "grown")
    assert reasons(recording, "grown").count("WaitingForNodes") >= 1 and reasons(recording, "grown")[-1] == "Bound"


def test_an_autoscaler_takes_the_group_that_holds_the_slice(nodes: Pool, api: Api, space: str) -> None:
    """Nodes of today have room for one role each; a group that cannot hold the larger pods helps nobody."""
    nodes.add("old", 2, per_domain=1, gpus=1)
    groups = [Group(nodes.node("small"), gpus=1, most=4), Group(nodes.node("large"), gpus=2, most=4)]
    with Recording(api, space, "PDDeployment", "Pod") as recording, Autoscaler(api, nodes, groups, not_ready=1.0) as autoscaler:
        nodes.pdd("large", 2, 1, gpus=(1, 2), schedulingTimeout=TIMEOUT)
        nodes.ready("large", timeout=BOUND)
    ((_, where),) = nodes.places("large").items()
    assert where == [(role, nodes.node("large-d0")) for role in ("decode", "prefill", "prefill")]
    assert autoscaler.made == [nodes.node("large-0"), nodes.node("large-1")]
    never_given_up(recording, "large")


def test_a_queue_admits_the_whole_slice(nodes: Pool, api: Api, space: str) -> None:
    """Held for longer than schedulingTimeout while somebody else has the nodes; then all of it starts in the domain with room."""
    nodes.add("n", 4, per_domain=2, gpus=1)
    for number in range(4):
        nodes.foreign(f"holder-{number}", f"n-{number}", 1)
    gpus = {nodes.node(f"n-{number}"): 1 for number in range(4)}
    with Recording(api, space, "PDDeployment", "Pod") as recording, Queue(api, nodes, gpus, 2) as queue:
        nodes.pdd("queued", pod={"schedulingGates": [{"name": GATE}]}, schedulingTimeout=TIMEOUT)
        nodes.placed("queued", "False", "Gated", timeout=BOUND)
        time.sleep(LONGER)
        assert nodes.places("queued") == {} and queue.admitted == []
        for number in (2, 3):
            api.delete("Pod", space, f"holder-{number}")
        nodes.ready("queued", timeout=BOUND)
    ((_, where),) = nodes.places("queued").items()
    assert where == [(role, nodes.node("n-d1")) for role in ("decode", "prefill")]
    assert len(queue.admitted) == 1
    never_given_up(recording, "queued")
    status: Object = api.must_get("PDDeployment", space, "queued")["status"]
    assert [s["domain"] for s in status["slices"]] == [nodes.node("n-d1")]
