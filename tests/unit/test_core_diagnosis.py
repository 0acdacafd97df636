"""Why pods are not ready: which cause is shown, and what its message tells the user to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import pod, unschedulable

from pd_operator.api.conditions import Reason
from pd_operator.core import diagnosis
from pd_operator.core.observed import ContainerFact, PodFact

REV = "1a2b3c4d"
LOGS = "kubectl -n demo logs chat-1a2b3c4d-0-prefill-0 -c engine --previous"


def broken(**container: Any) -> PodFact:
    """A pod whose engine container has a problem."""
    return pod(REV, "prefill", ready=False, containers=(ContainerFact("engine", **container),))


CASES: dict[str, tuple[PodFact, Reason, list[str]]] = {
    **{
        f"image: {reason}": (
            broken(waiting_reason=reason, waiting_message='Back-off pulling image "x:1"'),
            Reason.IMAGE_ERROR,
            ["container engine", reason, 'pulling image "x:1"', "correct the image", "pull secret"],
        )
        for reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
    },
    **{
        f"config: {reason}": (
            broken(waiting_reason=reason, waiting_message="couldn't find key token in Secret demo/hf"),
            Reason.CONFIG_ERROR,
            ["container engine", reason, "couldn't find key token in Secret demo/hf"],
        )
        for reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
    },
    "crash": (
        broken(
            waiting_reason="CrashLoopBackOff",
            restarts=3,
            exit_code=1,
            exit_reason="Error",
            exit_message="ValueError: no such model\n",
        ),
        Reason.CRASH_LOOP,
        ["ended 3 times", "last exit code 1: ValueError: no such model", LOGS],
    ),
    "crash between two restarts": (
        broken(restarts=2, exit_code=1, exit_reason="Error"),
        Reason.CRASH_LOOP,
        ["ended 2 times, last exit code 1; see", LOGS],
    ),
    "out of memory": (
        broken(waiting_reason="CrashLoopBackOff", restarts=4, exit_code=137, exit_reason="OOMKilled"),
        Reason.CRASH_LOOP,
        ["exit code 137 (OOMKilled)", "raise its memory limit", LOGS],
    ),
    "unschedulable": (
        unschedulable(REV, "prefill"),
        Reason.UNSCHEDULABLE,
        ["no node for it", "2 Insufficient nvidia.com/gpu"],
    ),
    "gated": (
        replace(unschedulable(REV, "prefill"), scheduling_reason="SchedulingGated", scheduling_message=""),
        Reason.STARTING,
        ["scheduling gate"],
    ),
    "no node yet": (
        replace(unschedulable(REV, "prefill"), scheduling_reason="", scheduling_message=""),
        Reason.STARTING,
        ["no node yet"],
    ),
    "bound, no container yet": (
        pod(REV, "prefill", ready=False, containers=()),
        Reason.STARTING,
        ["its containers are being made"],
    ),
    "starting": (broken(), Reason.STARTING, ["container engine is starting"]),
    "sidecar first": (
        pod(REV, "prefill", ready=False, containers=(ContainerFact("lmcache"), ContainerFact("engine"))),
        Reason.STARTING,
        ["container lmcache is starting"],
    ),
    "one restart is no loop": (broken(restarts=1, exit_code=1), Reason.STARTING, ["is starting, restarted 1 times"]),
}


@pytest.mark.parametrize(("fact", "reason", "words"), CASES.values(), ids=CASES)
def test_cause(fact: PodFact, reason: Reason, words: list[str]) -> None:
    cause = diagnosis.diagnose([fact])
    assert cause is not None
    assert cause[0] is reason
    assert cause[1].startswith(f"pod {fact.name}")
    for word in words:
        assert word in cause[1]


def test_nothing_to_say_when_all_are_ready_or_going() -> None:
    assert diagnosis.diagnose([]) is None
    assert diagnosis.diagnose([pod(REV, "prefill"), replace(CASES["crash"][0], deleting=True)]) is None


ORDER = ["image: ErrImagePull", "config: CreateContainerError", "crash", "unschedulable", "gated", "starting"]


@pytest.mark.parametrize("first", range(len(ORDER) - 1))
def test_the_gravest_cause_stands_first_whatever_the_order_of_the_pods(first: int) -> None:
    pods = [replace(CASES[name][0], name=f"p{n}") for n, name in enumerate(ORDER[first:])]
    cause = diagnosis.diagnose(list(reversed(pods)))
    assert cause is not None and cause[0] is CASES[ORDER[first]][1] and cause[1].startswith("pod p0")


def test_pods_with_the_same_cause_are_counted() -> None:
    cause = diagnosis.diagnose([CASES["crash"][0]] * 3)
    assert cause is not None and cause[1].endswith("(and 2 more pods)")


def test_long_texts_are_cut_where_it_hurts_least() -> None:
    """A puller's message is told by its beginning, a log by its end; newlines never reach a condition."""
    log = "start\n" + "x" * 5000 + "\nthe end"
    cause = diagnosis.diagnose([broken(waiting_reason="CrashLoopBackOff", restarts=3, exit_message=log)])
    assert cause is not None and "the end" in cause[1] and "start" not in cause[1]
    assert len(cause[1]) < 700 and "\n" not in cause[1]
    cause = diagnosis.diagnose([broken(waiting_reason="ErrImagePull", waiting_message=log)])
    assert cause is not None and "start" in cause[1] and "the end" not in cause[1]


def test_unschedulable_and_gated_look_at_pods_that_stay() -> None:
    waiting, gated = CASES["unschedulable"][0], CASES["gated"][0]
    assert "Insufficient" in diagnosis.unschedulable([pod(REV, "decode"), waiting])
    assert diagnosis.unschedulable([replace(waiting, deleting=True), gated]) == ""
    assert diagnosis.gated([gated]) and not diagnosis.gated([waiting, replace(gated, deleting=True)])
