"""docs/reference/conditions.md, from the enums and REASONS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from pd_operator.api.conditions import REASONS, PoolType, Type

_INTRO: Final = """\
<!-- Generated from pd_operator/api/conditions.py by `make generate`; do not edit. -->
# Conditions and reasons

`kubectl get pdd NAME -o yaml` shows them under `status.conditions`. Programs match the reason; the message is for people and names
the field, the pod or the object.

`Ready` takes over the reason of what stands in its way: first what needs somebody, then, in the order of the table, what needs
time. `Reconciling` and `Stalled` repeat that reason for tools that read kstatus (Flux, Argo CD), and so does `Progressing` while a
spec is refused.
"""
_TRUE: Final[Mapping[Type | PoolType, str]] = {
    Type.ACCEPTED: "The spec can be done. While it is False nothing is changed, and what serves goes on serving.",
    Type.PLACED: "Every engine pod has a node.",
    Type.PREFILL_READY: "Enough prefill replicas are ready.",
    Type.DECODE_READY: "Enough decode replicas are ready.",
    Type.ROUTER_READY: "A router is ready, which means that it sees a healthy prefill and a healthy decode.",
    Type.HANDOFF_VERIFIED: "Evidence shows that state went from prefill to decode.",
    Type.OFFLOAD_VERIFIED: "Evidence shows that the cache servers store; there only with `spec.lmcache`.",
    Type.PROGRESSING: "The spec is on its way or has arrived. False: something has to change first.",
    Type.DEGRADED: "It serves, and something is wrong. False is good.",
    Type.UPDATE_AVAILABLE: "A new version of the operator would render engine pods differently. For information.",
    Type.READY: "Requests are served.",
    Type.RECONCILING: "The operator or the cluster still works on this generation.",
    Type.STALLED: "It does not get further without somebody.",
    PoolType.SCALING_ACTIVE: "The operator decides this pool's number; [Scaling](../scaling.md) has all reasons.",
    PoolType.SCALING_LIMITED: "A bound keeps the pool from the number that is asked for.",
}


def markdown() -> str:
    """The whole page."""
    return "\n".join([_INTRO, *_conditions(), *_pools(), *_reasons(), ""])


def _conditions() -> Iterator[str]:
    yield "## Of a PDDeployment\n"
    yield "| condition | True means | reasons |\n|---|---|---|"
    for kind in Type:
        reasons = ", ".join(reason for reason, doc in REASONS.items() if kind in doc.conditions)
        yield f"| {kind} | {_TRUE[kind]} | {reasons} |"
    yield ""


def _pools() -> Iterator[str]:
    yield "## Of a PDPool\n"
    yield "| condition | True means |\n|---|---|"
    yield from (f"| {kind} | {_TRUE[kind]} |" for kind in PoolType)
    yield ""


def _reasons() -> Iterator[str]:
    yield "## Reasons\n"
    yield "| reason | meaning | what to do |\n|---|---|---|"
    for reason, doc in REASONS.items():
        yield f"| {reason} | {doc.meaning} | {doc.remedy} |"
