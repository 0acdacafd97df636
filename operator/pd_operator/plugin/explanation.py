"""The explanation of one PDDeployment's scaling, from its object and its two PDPools alone: a pure function to a document.

The record in the status of the pools holds a tick with everything that it was made from, so what is told here is what `decide`
says, asked again; where this program's law would answer otherwise than the operator's did, that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pd_operator.core.names import ROLES, Role
from pd_operator.core.scaling import record as records
from pd_operator.core.scaling.decision import RoleDecision
from pd_operator.core.scaling.explain import ALERT, BOTTLENECK
from pd_operator.core.scaling.outlook import WhatIf, outlook
from pd_operator.core.scaling.readings import Readings, Signal
from pd_operator.core.scaling.record import Record
from pd_operator.kube.seen import Seen
from pd_operator.plugin.terminal import instant

SYMBOLS: Mapping[str, str] = {
    "prompt_rate": "A",
    "request_rate": "lam",
    "queued_tokens": "Q",
    "running": "R",
    "handoff_waiting": "H",
    "decode_starts": "x",
    "kv_capacity": "C",
    "output_tokens": "OSL",
    "itl": "ITL",
    "ttft": "TTFT",
}
MEANING: Mapping[str, str] = {
    "prompt_rate": "uncached prompt tokens/s offered",
    "request_rate": "requests/s offered",
    "queued_tokens": "prompt tokens that wait for prefill",
    "prefill_rate": "prompt tokens/s computed",
    "prefill_seconds": "seconds of prefill a second, over all replicas",
    "running": "requests in decode",
    "handoff_waiting": "requests prefilled that wait for decode",
    "decode_starts": "requests/s that decode starts",
    "kv_tokens": "KV tokens in use on decode",
    "kv_capacity": "KV tokens that one decode replica holds",
    "output_tokens": "output tokens of a request",
    "itl": "seconds between tokens",
    "prefill_latency": "seconds of prefill of a request",
    "ttft": "seconds to the first token",
}
NO_RECORD = {
    "Static": "nothing is decided: the numbers are prefill.replicas and decode.replicas of the spec; an absent one is kept",
    "suspended": "spec.suspend is true: both pools are at 0, their numbers are kept and nothing is decided",
    "refused": "the spec is not accepted, so nothing is decided: see kubectl pdd status",
    "left-out": "the last decision is told without its record: the operator is of an older version, or it is too long (many "
    "slices) and only in its decision log",
    "none": "no tick has been told yet: one comes 15 s after the object is accepted, if an operator watches it",
}
MODES = {
    "Auto": "Auto: the operator writes the number of both pools",
    "Advisory": "Advisory: decided and reported, and not written; the number is somebody else's",
    "External": "External: an HPA, KEDA or a person writes the number; what the operator would use is told here",
    "Static": "Static: the number is that of the spec, nothing follows the load",
}


@dataclass(frozen=True, slots=True)
class Input:
    """One reading: `value` None is unknown; `age` seconds since its sample, as of now."""

    name: str
    symbol: str
    value: float | None
    age: float
    quality: str
    source: str


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool as its PDPool tells it."""

    role: Role
    number: int | None  # spec.replicas
    desired: int | None
    replicas: int | None
    ready: int | None
    minimum: int | None
    maximum: int | None
    lead_time: str
    last: Mapping[str, Any] = field(default_factory=dict)  # status.lastDecision
    last_age: float | None = None
    conditions: tuple[tuple[str, str, str, str], ...] = ()  # type, status, reason, message


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything that `kubectl pdd explain` says; without a record `why_not` says why."""

    namespace: str
    name: str
    mode: str
    pools: tuple[Pool, ...]
    line: str = ""  # the record, for pdd-simulate replay
    record: Record | None = None
    age: float | None = None  # seconds since the tick
    why_not: str = ""
    inputs: tuple[Input, ...] = ()
    changes: Mapping[Role, tuple[WhatIf, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def bottleneck(self) -> str:
        """In words."""
        return BOTTLENECK[self.record.decision.bottleneck] if self.record else ""

    @property
    def alerts(self) -> tuple[str, ...]:
        """What looks like load and is not, in words."""
        return tuple(ALERT[a] for a in self.record.decision.alerts) if self.record else ()

    def answer(self, role: Role) -> RoleDecision | None:
        """The recorded answer for a role."""
        return self.record.decision.of(role) if self.record else None


def explain(seen: Seen) -> Explanation:
    """What was read, explained."""
    spec = seen.deployment.get("spec") or {}
    mode = str(spec["scaling"].get("mode", "Auto")) if spec.get("scaling") is not None else "Static"
    pools = tuple(_pool(seen, role) for role in ROLES)
    why_not = _why_not(seen, spec, mode)
    found = () if why_not else _records(seen)
    if not found:
        return Explanation(
            seen.namespace,
            seen.name,
            mode,
            pools,
            why_not=why_not or NO_RECORD["left-out" if any(p.last for p in pools) else "none"],
            warnings=_unread(seen),
        )
    record, line, problem = found
    if record is None:
        return Explanation(seen.namespace, seen.name, mode, pools, line=line, why_not=problem, warnings=_unread(seen))
    age = max(0.0, seen.now.timestamp() - record.now)
    return Explanation(
        seen.namespace,
        seen.name,
        mode,
        pools,
        line,
        record,
        age,
        inputs=_inputs(record.readings, age),
        changes=outlook(record),
        warnings=(*_unread(seen), *_differs(line), *_contradicted(record, pools)),
    )


def _why_not(seen: Seen, spec: Mapping[str, Any], mode: str) -> str:
    if mode == "Static":
        return NO_RECORD["Static"]
    if spec.get("suspend"):
        return NO_RECORD["suspended"]
    conditions = {c.get("type"): c for c in seen.status.get("conditions") or ()}
    if (conditions.get("Accepted") or {}).get("status") == "False":
        return f"{NO_RECORD['refused']} ({conditions['Accepted'].get('message', '')})"
    return ""


def _records(seen: Seen) -> tuple[Record | None, str, str] | tuple[()]:
    """The newest record of the two pools: a tick decides for both, and each pool is written when something of its own changes."""
    newest: tuple[Record | None, str, str] | tuple[()] = ()
    for obj in seen.pools.values():
        line = str((obj.get("status") or {}).get("record", ""))
        if not line:
            continue
        try:
            found = records.parse(line)
        except ValueError as exc:
            newest = newest or (None, line, f"the record is of another version than this program: {exc}")
            continue
        if not newest or newest[0] is None or found.now > newest[0].now:
            newest = (found, line, "")
    return newest


def _pool(seen: Seen, role: Role) -> Pool:
    obj = seen.pools.get(role) or {}
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    last = status.get("lastDecision") or {}
    made = instant(last.get("time"))
    return Pool(
        role,
        spec.get("replicas"),
        status.get("desiredReplicas"),
        status.get("replicas"),
        status.get("readyReplicas"),
        spec.get("minReplicas"),
        spec.get("maxReplicas"),
        str((status.get("learned") or {}).get("leadTime", "")),
        last,
        None if made is None else (seen.now - made).total_seconds(),
        tuple(
            (str(c.get("type")), str(c.get("status")), str(c.get("reason")), str(c.get("message", "")))
            for c in status.get("conditions") or ()
        ),
    )


def _inputs(readings: Readings, age: float) -> tuple[Input, ...]:
    """Signals in the order of the law; `age` is that of the tick."""
    found = []
    for f in fields(readings):
        value = getattr(readings, f.name)
        if isinstance(value, Signal):
            known = value.value if value.known else None
            found.append(Input(f.name, SYMBOLS.get(f.name, ""), known, value.age + age, value.quality.value, value.source))
    return tuple(found)


def _unread(seen: Seen) -> tuple[str, ...]:
    told = [f"{what} not read: {why}" for what, why in seen.unread.items()]
    return tuple(told + [f"PDPool {seen.name}-{role} does not exist" for role in ROLES if role not in seen.pools and not told])


def _differs(line: str) -> tuple[str, ...]:
    """Whether this program would have decided otherwise: the operator is of another version, and what-ifs are this one's."""
    differences = records.replay(line)
    return (
        (f"this program decides otherwise than the operator did ({differences[0]}): use that of the operator's version",)
        if differences
        else ()
    )


def _contradicted(record: Record, pools: tuple[Pool, ...]) -> tuple[str, ...]:
    told = []
    for pool in pools:
        answer = record.decision.of(pool.role)
        if pool.desired is not None and pool.desired != answer.desired:
            told.append(
                f"status.desiredReplicas of {pool.role} is {pool.desired}, the record says {answer.desired}: the record is older"
            )
    return tuple(told)
