"""Autoscalers of other people on our pools: who writes the number of a pool when more than one wants to (DESIGN §3, PDPool)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pd_operator.core.names import ROLE, Role, pool
from pd_operator.core.observed import AutoscalerFact
from pd_operator.core.pools import mode_of
from pd_operator.core.snapshot import Snapshot

REASON: Final = "AutoscalerConflict"  # of ScalingActive, and of the Event


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two that write one number. `yields`: the operator does not write it as long as that lasts."""

    message: str
    yields: bool = False


def conflict_of(snapshot: Snapshot, role: Role) -> Conflict | None:
    """What is wrong with the autoscalers of a role; None while at most one writes its number.

    Under Auto the operator yields: of two writers that take turns every 15 s the pool would get neither's number.
    """
    name, mode = pool(snapshot.name, role), mode_of(snapshot.spec)
    mine = [a for a in snapshot.autoscalers if (a.group, a.kind, a.target) == ("pdserve.dev", "PDPool", name)]
    told, yields = [], bool(mine) and mode == "Auto"
    number = snapshot.spec.roles[role].replicas
    if yields:
        told.append(f"{_names(mine)} of this PDPool, and scaling.mode is Auto: the operator writes no number; remove one of them")
    elif mine and mode == "Static" and number is not None:
        told.append(f"{_names(mine)} of this PDPool, and spec.{role}.replicas is {number}: set scaling.mode External without it")
    if len(mine) > 1:
        told.append(f"{_names(mine)} write the number in turn: keep one")
    told += _on_workloads(snapshot, role, name)
    return Conflict("; ".join(told), yields) if told else None


def _on_workloads(snapshot: Snapshot, role: Role, name: str) -> list[str]:
    ours = {(c.kind, c.name) for c in snapshot.children if c.workload and c.labels.get(ROLE) == role}
    wrong = [a for a in snapshot.autoscalers if (a.kind, a.target) in ours]
    what = "whose replicas the operator writes"
    return [
        f"{_names([a])} scales {a.kind} {a.target}, {what}: let it scale PDPool {name}, with scaling.mode External" for a in wrong
    ]


def _names(found: Sequence[AutoscalerFact]) -> str:
    each = [f"{a.name} (ScaledObject {a.scaled_object})" if a.scaled_object else a.name for a in found]
    return f"HPA {each[0]}" if len(each) == 1 else f"HPAs {', '.join(each)}"


def news(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> str:
    """The message of a conflict that the conditions of a pool did not tell before; "" without one."""
    old, new = (next((c for c in conditions if c.get("reason") == REASON), {}) for conditions in (before, after))
    return str(new.get("message", "")) if new and new.get("message") != old.get("message") else ""
