"""Who else writes the number of a pool, and what the operator says and does about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import deep, serving
from test_scaling_loop import BUSY, SCALING, World, snapshot_of

from pd_operator.core.autoscalers import Conflict, conflict_of, news
from pd_operator.core.observed import AutoscalerFact
from pd_operator.core.plan import make_plan
from pd_operator.core.snapshot import Snapshot
from pd_operator.core.status import build_pool_status

POOL = AutoscalerFact("demo", "a", "pdserve.dev", "PDPool", "chat-decode")
KEDA = replace(POOL, name="keda-hpa-b", scaled_object="b")
AUTO = "HPA a of this PDPool, and scaling.mode is Auto: the operator writes no number; remove one of them"


def world(*autoscalers: AutoscalerFact, **changes: Any) -> Snapshot:
    return replace(serving(deep(SCALING, changes)), autoscalers=autoscalers)


@pytest.mark.parametrize(
    ("autoscalers", "changes", "conflict"),
    [
        ([], {}, None),
        ([POOL], {}, Conflict(AUTO, True)),
        ([POOL], {"scaling": {"mode": "External"}}, None),
        ([POOL], {"scaling": {"mode": "Advisory"}}, None),
        ([POOL], {"scaling": None}, None),  # nobody else writes it: ADR 0011
        ([POOL, KEDA], {"scaling": {"mode": "External"}},
         Conflict("HPAs a, keda-hpa-b (ScaledObject b) write the number in turn: keep one")),
        ([POOL], {"scaling": None, "decode": {"replicas": 2}},
         Conflict("HPA a of this PDPool, and spec.decode.replicas is 2: set scaling.mode External without it")),
        ([replace(POOL, target="chat-prefill")], {}, None),
        ([replace(POOL, target="other-decode")], {}, None),
        ([replace(POOL, group="example.org")], {}, None),
    ],
)  # fmt: skip
def test_conflicts_of_decode(autoscalers: list[AutoscalerFact], changes: dict[str, Any], conflict: Conflict | None) -> None:
    assert conflict_of(world(*autoscalers, **changes), "decode") == conflict


@pytest.mark.parametrize("mode", ["Auto", "External"])
def test_an_hpa_on_a_workload_of_a_slice(mode: str) -> None:
    snapshot = world(scaling={"mode": mode})
    (name,) = [c.name for c in snapshot.children if c.kind == "Deployment" and c.name.endswith("-decode")]
    found = conflict_of(replace(snapshot, autoscalers=(replace(POOL, group="apps", kind="Deployment", target=name),)), "decode")
    text = f"HPA a scales Deployment {name}, whose replicas the operator writes: "
    text += "let it scale PDPool chat-decode, with scaling.mode External"
    assert found == Conflict(text, yields=False)


def test_under_an_hpa_auto_decides_reports_and_does_not_write() -> None:
    both = World(replace(snapshot_of(), autoscalers=(POOL,)))
    both.tick(3, BUSY)
    assert both.server.scaled == []
    scaled = both.roster.scaled(("demo", "chat"), "uid-chat")
    assert scaled is not None and scaled.decision.decode.desired == 3
    snapshot = replace(snapshot_of(), autoscalers=(POOL,), scaled=scaled)
    status = build_pool_status(snapshot, make_plan(snapshot), "decode", {}, 1)
    active = next(c for c in status["conditions"] if c["type"] == "ScalingActive")
    assert (active["status"], active["reason"], active["message"]) == ("False", "AutoscalerConflict", AUTO)
    assert status["desiredReplicas"] == 3
    other = build_pool_status(snapshot, make_plan(snapshot), "prefill", {}, 1)
    assert next(c for c in other["conditions"] if c["type"] == "ScalingActive")["reason"] == "Deciding"
    assert news([], status["conditions"]) == AUTO and news(status["conditions"], status["conditions"]) == ""
    both.put(snapshot_of())  # the HPA is gone
    both.tick(1, BUSY)
    assert both.server.scaled == [("demo", "chat-decode", 3)]
