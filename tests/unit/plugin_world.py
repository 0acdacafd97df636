"""A PDDeployment as `kubectl pdd` reads it: status, pools, pods and events, each with a default that is well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from builders import MINIMAL, NAME, NAMESPACE, NOW, deep, pod, unschedulable

from pd_operator.core.names import Role
from pd_operator.core.observed import ContainerFact, PodFact
from pd_operator.kube.seen import Seen

REV = "1a2b3c4d"
WELL: dict[str, tuple[str, str, str]] = {
    "Accepted": ("True", "Accepted", "the spec was accepted"),
    "Placed": ("True", "Bound", "2 engine pods on 2 nodes in transfer domain rack-1"),
    "PrefillReady": ("True", "Ready", "1 of 1 ready"),
    "DecodeReady": ("True", "Ready", "1 of 1 ready"),
    "RouterReady": ("True", "Ready", "2 of 2 ready; they see prefill and decode"),
    "HandoffVerified": ("Unknown", "NotYetRun", "no evidence has been taken; Ready does not wait for it"),
    "Progressing": ("True", "Updated", "the current revision serves"),
    "Degraded": ("False", "AsExpected", ""),
    "UpdateAvailable": ("False", "AsExpected", ""),
    "Ready": ("True", "Ready", "serving at http://chat.demo.svc"),
}
SLICE = {"name": f"chat-{REV}-0", "revision": REV, "domain": "rack-1", "prefill": 1, "decode": 1, "state": "Serving"}


def ago(seconds: float) -> str:
    """A time of the API."""
    return (NOW - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def conditions(changes: Mapping[str, tuple[str, str, str]], generation: int = 1, since: float = 7200) -> list[dict[str, Any]]:
    """WELL with changes; those changed are 720 s old."""
    told = {**WELL, **changes}
    return [
        {
            "type": type_,
            "status": status,
            "reason": reason,
            "message": message,
            "observedGeneration": generation,
            "lastTransitionTime": ago(720 if type_ in changes else since),
        }
        for type_, (status, reason, message) in told.items()
    ]


def pods(*, without: Sequence[str] = ()) -> tuple[PodFact, ...]:
    """One prefill, one decode, two routers, all ready; `without` leaves parts out."""
    made = [
        pod(REV, part, n, front=part == "router") for part in ("prefill", "decode", "router") for n in range(1 + (part == "router"))
    ]
    return tuple(
        replace(p, created=NOW - timedelta(seconds=7260)) for p in made if p.labels.get("pdserve.dev/role", "router") not in without
    )


def homeless(role: Role = "decode") -> PodFact:
    """A pod without a node."""
    return replace(unschedulable(REV, role), created=NOW - timedelta(seconds=725))


def crashed(role: Role = "decode") -> PodFact:
    """A pod whose engine ends again and again."""
    main = ContainerFact("engine", restarts=5, waiting_reason="CrashLoopBackOff", exit_code=1, exit_message="no GPU was found")
    return replace(pod(REV, role, ready=False), containers=(main,), created=NOW - timedelta(seconds=725))


def event(reason: str, about: str, note: str, seconds: float, **more: Any) -> dict[str, Any]:
    """One event; `about` is kind/name."""
    kind, _, name = about.partition("/")
    made = {"regarding": {"kind": kind, "name": name}, "reason": reason, "note": note, "type": "Warning", "eventTime": ago(seconds)}
    return made | more


def seen(
    changes: Mapping[str, tuple[str, str, str]] | None = None,
    *,
    generation: int = 1,
    spec: Mapping[str, Any] | None = None,
    status: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Seen:
    """What was read of a PDDeployment that is well, with changes to its conditions, spec and status."""
    told = {
        "observedGeneration": 1,
        "currentRevision": REV,
        "updatedRevision": REV,
        "url": f"http://{NAME}.{NAMESPACE}.svc",
        "servingSlices": 1,
        "roles": [{"name": r, "ready": "1/1"} for r in ("prefill", "decode")],
        "slices": [SLICE],
        "conditions": conditions(changes or {}),
    }
    meta = {"name": NAME, "namespace": NAMESPACE, "generation": generation, "creationTimestamp": ago(7265)}
    obj = {"metadata": meta, "spec": deep(MINIMAL, spec or {}), "status": deep(told, status or {})}
    return Seen(NOW, NAMESPACE, NAME, obj, **{"pods": pods(), **fields})
