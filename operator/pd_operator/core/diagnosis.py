"""Why pods are not ready: the cause that stands first, in words that tell the user what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pd_operator.api.conditions import Reason
from pd_operator.core.observed import ContainerFact, PodFact

IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable"}
)
CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
MAX_DETAIL = 400  # characters of a kubelet's or a program's own message

# A program's last lines may name a credential; they go into status and events (invariant I10).
SECRETS = re.compile(
    r"""((?:token|api[_-]?key|password|passwd|secret|authorization|bearer)["']?\s*[=:]?\s*["']?(?:bearer\s+)?|\b(?:hf_|sk-))[A-Za-z0-9+/_.~-]{6,}=*""",
    re.IGNORECASE,
)

Cause = tuple[Reason, str]


def diagnose(pods: Sequence[PodFact]) -> Cause | None:
    """The gravest cause over the pods that are not ready; None when all are."""
    waiting = [p for p in pods if not p.ready and not p.deleting]
    for check in (_image, _config, _crash, _unschedulable, _gated):
        found = [cause for pod in waiting if (cause := check(pod))]
        if found:
            reason, message = found[0]
            more = f" (and {len(found) - 1} more pods)" if len(found) > 1 else ""
            return reason, message + more
    return _starting(waiting)


def is_blocked(pod: PodFact) -> bool:
    """Whether a pod that is not ready has a cause that waiting does not mend: image, configuration, crash, no node."""
    return any(check(pod) for check in (_image, _config, _crash, _unschedulable))


def unschedulable(pods: Sequence[PodFact]) -> str:
    """The scheduler's message for the first pod that it finds no node for; "" when there is none."""
    found = [p for p in pods if not p.scheduled and not p.deleting and p.scheduling_reason == "Unschedulable"]
    return found[0].scheduling_message if found else ""


def gated(pods: Sequence[PodFact]) -> bool:
    """Whether a scheduling gate holds a pod."""
    return any(p.scheduling_reason == "SchedulingGated" and not p.deleting for p in pods)


def _container(pod: PodFact, test: Callable[[ContainerFact], bool]) -> ContainerFact | None:
    return next((c for c in pod.containers if test(c)), None)


def _image(pod: PodFact) -> Cause | None:
    bad = _container(pod, lambda c: c.waiting_reason in IMAGE_REASONS)
    if not bad:
        return None
    detail = _short(bad.waiting_message)
    return (
        Reason.IMAGE_ERROR,
        f"pod {pod.name}: the image of container {bad.name} cannot be pulled ({bad.waiting_reason}: {detail}); "
        "correct the image, or give the namespace a pull secret",
    )


def _config(pod: PodFact) -> Cause | None:
    bad = _container(pod, lambda c: c.waiting_reason in CONFIG_REASONS)
    if not bad:
        return None
    return (
        Reason.CONFIG_ERROR,
        f"pod {pod.name}: container {bad.name} cannot be made ({bad.waiting_reason}: {_short(bad.waiting_message)})",
    )


def _crash(pod: PodFact) -> Cause | None:
    bad = _container(pod, lambda c: c.waiting_reason == "CrashLoopBackOff" or (c.restarts >= 2 and not c.ready))
    if not bad:
        return None
    code = "" if bad.exit_code is None else f", last exit code {bad.exit_code}"
    why = f" ({bad.exit_reason})" if bad.exit_reason and bad.exit_reason != "Error" else ""
    last_words = _short(SECRETS.sub(r"\1[redacted]", bad.exit_message), tail=True)
    said = f": {last_words}" if last_words else ""
    remedy = "raise its memory limit; " if bad.exit_reason == "OOMKilled" else ""
    return (
        Reason.CRASH_LOOP,
        f"pod {pod.name}: container {bad.name} ended {bad.restarts} times{code}{why}{said}; {remedy}"
        f"see: kubectl -n {pod.namespace} logs {pod.name} -c {bad.name} --previous",
    )


def _unschedulable(pod: PodFact) -> Cause | None:
    if pod.scheduled or pod.scheduling_reason != "Unschedulable":
        return None
    return Reason.UNSCHEDULABLE, f"pod {pod.name}: no node for it: {_short(pod.scheduling_message)}"


def _gated(pod: PodFact) -> Cause | None:
    if pod.scheduling_reason != "SchedulingGated":
        return None
    return Reason.STARTING, f"pod {pod.name} is held by a scheduling gate"


def _starting(waiting: Sequence[PodFact]) -> Cause | None:
    if not waiting:
        return None
    pod = waiting[0]
    current = _container(pod, lambda c: not c.ready)
    step = f"container {current.name} is starting" if current else "its containers are being made"
    step = step if pod.scheduled else "no node yet"
    restarted = f", restarted {current.restarts} times" if current and current.restarts else ""
    return Reason.STARTING, f"pod {pod.name}: {step}{restarted}"


def _short(message: str, tail: bool = False) -> str:
    text = " ".join(message.split())
    if len(text) <= MAX_DETAIL:
        return text
    return "..." + text[-MAX_DETAIL:] if tail else text[:MAX_DETAIL] + "..."
