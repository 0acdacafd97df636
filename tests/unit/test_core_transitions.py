"""Events are recorded for conditions that turned, and for nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from pd_operator.core.transitions import Transition, transitions


def condition(type_: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    return {"type": type_, "status": status, "reason": reason, "message": message}


def test_a_new_object_that_starts_is_no_event() -> None:
    after = [
        condition("Accepted", "True", "Accepted", "the spec was accepted"),
        condition("Placed", "Unknown", "Starting"),
        condition("Progressing", "True", "RollingOut"),
        condition("Degraded", "False", "AsExpected"),
        condition("Ready", "False", "Starting"),
    ]
    assert [t.reason for t in transitions([], after)] == ["Accepted"]


def test_a_new_object_that_is_refused_is_a_warning() -> None:
    assert transitions([], [condition("Accepted", "False", "ImageRequired", "spec.engine.image: no image")]) == [
        Transition("Warning", "ImageRequired", "Accepted=False: spec.engine.image: no image")
    ]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "ready": (condition("Ready", "False", "Starting"), condition("Ready", "True", "Ready"), "Normal"),
    "broke": (condition("Ready", "True", "Ready"), condition("Ready", "False", "CrashLoop"), "Warning"),
    "another cause": (condition("Ready", "False", "Starting"), condition("Ready", "False", "ImageError"), "Warning"),
    "starts again": (condition("Ready", "True", "Ready"), condition("Ready", "False", "Starting"), "Normal"),
    "no room": (condition("Progressing", "True", "RollingOut"), condition("Progressing", "False", "NoCapacityForPair"), "Warning"),
    "degraded": (condition("Degraded", "False", "AsExpected"), condition("Degraded", "True", "CacheDown"), "Warning"),
    "mended": (condition("Degraded", "True", "CacheDown"), condition("Degraded", "False", "AsExpected"), "Normal"),
    "bound": (condition("Placed", "False", "NoCapacity"), condition("Placed", "True", "Bound"), "Normal"),
    "suspended": (condition("Ready", "True", "Ready"), condition("Ready", "False", "Suspended"), "Normal"),
}


@pytest.mark.parametrize(("before", "after", "type_"), CASES.values(), ids=CASES)
def test_a_turn_is_one_event(before: dict[str, Any], after: dict[str, Any], type_: str) -> None:
    assert [(t.type, t.reason) for t in transitions([before], [after])] == [(type_, after["reason"])]


def test_another_message_or_time_is_no_event() -> None:
    before = condition("Ready", "False", "Starting", "0 of 2 ready")
    assert transitions([before], [condition("Ready", "False", "Starting", "1 of 2 ready")]) == []


def test_conditions_about_parts_are_not_events() -> None:
    """Ready carries their reason; each would be a second event for the same thing."""
    parts = ("PrefillReady", "DecodeReady", "RouterReady", "HandoffVerified", "UpdateAvailable", "Reconciling", "Stalled")
    assert transitions([], [condition(part, "False", "CrashLoop") for part in parts]) == []


def test_an_event_without_a_message_names_the_condition() -> None:
    (event,) = transitions([], [condition("Degraded", "True", "CacheDown")])
    assert event.note == "Degraded=True"
