"""A rollout that is stuck, one that is paused, and edits meanwhile, with the real Deployment controller."""

from __future__ import annotations

import time
from typing import Any

import pytest

from opsrunner import state, waits
from opsrunner.api import Api, Object
from opsrunner.process import Operator

pytest_plugins = ("opsrunner.fixtures",)

NOWHERE = {"template": {"spec": {"nodeSelector": {"example.org/no": "such-node"}}}}


def slice_of(obj: Object) -> str:
    return str(obj["status"]["slices"][0]["name"])


@pytest.fixture(scope="module")
def stuck(api: Api, operator: Operator, space: str) -> str:
    """The slice of an object that serves; its next revision finds no node. Made first: its deadline runs while others run."""
    spec = {"router": {"replicas": 1}, "rollout": {"progressDeadlineSeconds": 60}}
    api.create(state.pdd(space, "stuck", **spec))
    old = slice_of(waits.ready(api, space, "stuck"))
    api.merge("PDDeployment", space, "stuck", {"spec": {"engine": {"args": ["--max-num-seqs=8"]}, "prefill": NOWHERE}})
    waits.until("the new slice", lambda: len(state.children(api, space, "stuck", ("Deployment",))) == 6)
    return old


def replicas(api: Api, space: str, name: str) -> int:
    return int(api.must_get("Deployment", space, name)["spec"]["replicas"])


def test_edits_reach_the_slice_that_still_serves(stuck: str, api: Api, space: str) -> None:
    before = state.uids(state.pods(api, space, "stuck", slice=stuck, component="engine"))
    api.merge("PDDeployment", space, "stuck", {"spec": {"decode": {"replicas": 3}, "router": {"replicas": 2}}})
    for part, number in (("decode", 3), ("router", 2)):
        waits.until(f"{number} {part}", lambda part=part, number=number: replicas(api, space, f"{stuck}-{part}") == number)
    waits.until("its pods", lambda: len(state.pods(api, space, "stuck", slice=stuck, role="decode")) == 3)
    assert before < state.uids(state.pods(api, space, "stuck", slice=stuck, component="engine"))  # none was made anew
    api.merge("Deployment", space, f"{stuck}-decode", {"spec": {"replicas": 1}})  # somebody's hand
    waits.until("the number to come back", lambda: replicas(api, space, f"{stuck}-decode") == 3)
    api.merge("PDDeployment", space, "stuck", {"spec": {"decode": {"replicas": 2}}})
    waits.until("2 decode", lambda: replicas(api, space, f"{stuck}-decode") == 2)


def test_a_paused_rollout_holds_and_scales_and_costs_nothing(stuck: str, api: Api, space: str) -> None:
    api.create(state.pdd(space, "held", router={"replicas": 1}))
    old = slice_of(waits.ready(api, space, "held"))
    pods = state.uids(state.pods(api, space, "held"))
    edit: dict[str, Any] = {"rollout": {"paused": True, "restartID": "two"}}
    api.merge("PDDeployment", space, "held", {"spec": edit})
    found = waits.conditions(waits.condition(api, space, "held", "Progressing", "False", "Paused"))
    assert f"{old} serves" in str(found["Progressing"]["message"]) and found["Ready"]["status"] == "True"
    api.merge("PDDeployment", space, "held", {"spec": {"decode": {"replicas": 2}}})
    waits.until("two decode pods", lambda: len(state.pods(api, space, "held", role="decode")) == 2)
    waits.until("them to be ready", lambda: _ready(api, space, f"{old}-decode") == 2)

    def look() -> object:
        return api.must_get("PDDeployment", space, "held")["metadata"]["resourceVersion"], state.versions(api, space, "held")

    waits.looked(api, space, "held")
    waits.until("quiet", lambda: _same(look), timeout=30)
    before = look()
    time.sleep(2)
    assert look() == before and pods < state.uids(state.pods(api, space, "held"))
    api.merge("PDDeployment", space, "held", {"spec": {"rollout": {"paused": False}}})
    assert slice_of(waits.ready(api, space, "held")) != old


def test_a_change_of_one_roles_pods_waits_too(stuck: str, api: Api, space: str) -> None:
    waits.until("one slice", lambda: len(state.children(api, space, "held", ("Deployment",))) == 3)
    pods = state.uids(state.pods(api, space, "held"))
    template = {"metadata": {"annotations": {"example.org/number": "1"}}}
    api.merge("PDDeployment", space, "held", {"spec": {"rollout": {"paused": True}, "decode": {"template": template}}})
    found = waits.conditions(waits.condition(api, space, "held", "Progressing", "False", "Paused"))
    assert "-decode waits" in str(found["Progressing"]["message"])
    api.merge("PDDeployment", space, "held", {"spec": {"decode": {"replicas": 3}}})
    waits.until("a third pod", lambda: len(state.pods(api, space, "held", role="decode")) == 3)
    assert pods < state.uids(state.pods(api, space, "held"))
    api.merge("PDDeployment", space, "held", {"spec": {"rollout": {"paused": False}}})
    waits.ready(api, space, "held")
    waits.until("the change", lambda: _changed(api, space) == 3)
    assert pods & state.uids(state.pods(api, space, "held", role="prefill"))


def _changed(api: Api, space: str) -> int:
    found = state.pods(api, space, "held", role="decode")
    return sum(p["metadata"].get("annotations", {}).get("example.org/number") == "1" for p in found)


def _ready(api: Api, space: str, name: str) -> int:
    return int(api.must_get("Deployment", space, name).get("status", {}).get("readyReplicas", 0))


def _same(look: Any) -> bool:
    first = look()
    time.sleep(2)
    return bool(look() == first)


def test_a_rollout_without_progress_is_named_and_going_back_is_an_ordinary_one(stuck: str, api: Api, space: str) -> None:
    found = waits.condition(api, space, "stuck", "Progressing", "False", "DeadlineExceeded", timeout=150)
    told = waits.conditions(found)
    message = str(told["Progressing"]["message"])
    assert "-prefill made no progress for 60 s" in message and f"{stuck} serves" in message and "no node for it" in message
    assert told["Stalled"]["status"] == "True" and told["Ready"]["status"] == "True" and waits.kstatus(found) == "Failed"
    api.merge("PDDeployment", space, "stuck", {"spec": {"engine": {"args": []}, "prefill": {"template": None}}})
    assert slice_of(waits.ready(api, space, "stuck")) == stuck
    waits.until("one slice", lambda: len(state.children(api, space, "stuck", ("Deployment",))) == 3)


def test_nothing_broke(operator: Operator) -> None:
    assert not operator.tracebacks()
