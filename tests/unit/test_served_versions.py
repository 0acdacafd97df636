"""What tests say of a condition that flaps, from all versions of an object."""

from __future__ import annotations

from served.versions import Versions


def told(*states: tuple[str, str]) -> Versions:
    versions = Versions()
    for number, (status, reason) in enumerate(states):
        conditions = [{"type": "HandoffVerified", "status": status, "reason": reason}]
        versions.add({"metadata": {"name": "chat", "resourceVersion": str(number)}, "status": {"conditions": conditions}})
    return versions


def test_a_condition_that_was_false_for_one_version_fell() -> None:
    versions = told(("True", "Verified"), ("True", "Verified"), ("False", "SilentFallback"), ("True", "Verified"))
    assert versions.falls("chat", "HandoffVerified") == [("False", "SilentFallback")]
    assert versions.last() == {"chat": "3"}


def test_a_condition_that_is_unknown_again_fell_too() -> None:
    assert told(("True", "Verified"), ("Unknown", "NotYetRun")).falls("chat", "HandoffVerified") == [("Unknown", "NotYetRun")]


def test_what_was_never_true_did_not_fall() -> None:
    versions = told(("Unknown", "NotYetRun"), ("False", "NoTransfer"), ("True", "Verified"), ("True", "Verified"))
    assert versions.falls("chat", "HandoffVerified") == []
    assert versions.states("chat", "HandoffVerified") == [("Unknown", "NotYetRun"), ("False", "NoTransfer"), ("True", "Verified")]


def test_a_condition_that_is_gone_fell() -> None:
    versions = told(("True", "Verified"))
    versions.add({"metadata": {"name": "chat", "resourceVersion": "9"}})
    assert versions.falls("chat", "HandoffVerified") == [("", "")]
    assert versions.states("other", "HandoffVerified") == []
