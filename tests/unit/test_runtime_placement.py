"""The shell of placement: what the reconciler reads for a plan, and what it reserves for it until the watch shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import builders
import pytest
from placing_world import GPU, KEY, OWNER, RACK, node

from pd_operator.api.conditions import Reason
from pd_operator.controller.reconcile import Reconciler
from pd_operator.core.capabilities import Refusal
from pd_operator.core.ledger import Ledger
from pd_operator.core.plan import make_plan
from pd_operator.core.snapshot import Snapshot
from pd_operator.kube.store import Stores
from pd_operator.settings import Settings

OTHER = ("demo", "other")


def reconciler(*racks: str) -> tuple[Reconciler, Ledger]:
    """One that knows a node of two GPUs in each rack, and talks to nobody."""
    ledger = Ledger()
    for rack in racks:
        ledger.node(f"{rack}0", node(f"{rack}0", rack, 2))
    stores = Stores(ledger=ledger)
    return Reconciler(None, stores, Settings(), None), ledger  # type: ignore[arg-type]


def snapshot(changes: dict[str, Any] | None = None) -> Snapshot:
    return builders.make_snapshot(builders.deep(RACK, changes or {}))


def free(ledger: Ledger, rack: str) -> int:
    """What another PDDeployment sees."""
    return ledger.room(OTHER, KEY).view.room(KEY, rack).get(GPU, 0)


def test_without_a_topology_key_nodes_are_not_looked_at() -> None:
    made, _ = reconciler("a")
    plain = builders.make_snapshot()
    assert made._with_room(plain) is plain


def test_a_plan_reserves_what_it_asks_for_and_a_refused_one_gives_it_back() -> None:
    made, ledger = reconciler("a")
    seen = made._with_room(snapshot())
    plan = make_plan(seen)
    assert [t.site.domain for t in plan.placing.targets] == ["a"]
    made._assume(seen, plan)
    assert free(ledger, "a") == 0 and ledger.waiting() == {OWNER}
    made._assume(seen, replace(plan, refusal=Refusal(Reason.WRITE_REFUSED, "spec", "", "no")))
    assert free(ledger, "a") == 2 and ledger.waiting() == set()


def test_what_is_gone_reserves_nothing() -> None:
    made, ledger = reconciler("a")
    seen = made._with_room(snapshot())
    made._assume(seen, make_plan(seen))
    made._forget(*OWNER)
    assert free(ledger, "a") == 2


def test_shapes_are_those_of_the_template_with_the_users_part_in_it() -> None:
    made, _ = reconciler("a")
    template = {"spec": {"nodeSelector": {"x": "y"}, "tolerations": [{"key": "k", "operator": "Exists"}]}}
    seen = made._with_room(
        snapshot({"decode": {"template": template, "resources": {"limits": {GPU: 4}}}, "lmcache": {"l1Size": "1Gi"}})
    )
    shape = seen.shapes["decode"]
    assert (shape.gpus, shape.pods[0].node_selector, shape.pods[0].tolerations[0].key) == (4, {"x": "y"}, "k")
    assert shape.pods[0].requests["memory"] > 2**30  # the cache server beside the engine counts


@pytest.mark.parametrize("cpu", ["many", {"a": 1}])
def test_a_template_that_cannot_be_counted_floats_and_the_server_says_why(cpu: Any) -> None:
    made, _ = reconciler("a")
    template = {"spec": {"containers": [{"name": "engine", "resources": {"requests": {"cpu": cpu}}}]}}
    seen = made._with_room(snapshot({"decode": {"template": template}}))
    assert seen.unseen == "its template cannot be read" and seen.shapes == {}
    plan = make_plan(seen)
    assert [t.site.kind.value for t in plan.placing.targets] == ["Floating"]
    made._assume(seen, plan)  # nothing to reserve, and no error


def test_a_namespaced_install_has_no_room_to_look_at() -> None:
    made = Reconciler(None, Stores(), Settings(), None)  # type: ignore[arg-type]
    seen = made._with_room(snapshot())
    assert seen.room is None and set(seen.shapes) == {"prefill", "decode"}
    assert make_plan(seen).placing.unseen == "nodes cannot be read"
