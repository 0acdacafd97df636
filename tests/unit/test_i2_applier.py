"""I2, I7: when the applier writes, and when it takes an object for ours; with a real store and without any server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import builders
import pytest
from builders import NAMESPACE, UID, by_name, rendered

from pd_operator.controller.applier import EXPECTATION, Applier, Written
from pd_operator.core.names import APPLIED_HASH, SLICE
from pd_operator.core.observed import ChildFact
from pd_operator.kube.client import KubeClient
from pd_operator.kube.store import Key, Store, owner_of

KEY: Key = ("Service", NAMESPACE, "chat")
_, _, BUNDLE = rendered()
MANIFEST: dict[str, Any] = by_name(BUNDLE)["Service", "chat"]
HASH: str = MANIFEST["metadata"]["annotations"][APPLIED_HASH]
FACT = ChildFact(
    "Service",
    NAMESPACE,
    "chat",
    "uid-1",
    owner_uid=UID,
    labels=MANIFEST["metadata"]["labels"],
    applied_hash=HASH,
    resource_version="10",
    digest="as-applied",
)


def applier(fact: ChildFact | None = FACT, written: bool = True, age: float = 0.0, **fields: Any) -> Applier:
    """One that wrote the Service `age` seconds ago, over a store that shows `fact`."""
    store: Store[ChildFact] = Store(owner_of)
    if fact is not None:
        store.put("services", KEY, fact)
    found = Applier(cast(KubeClient, None), store)
    if written:
        base = Written(builders.NAME, UID, "uid-1", HASH, "as-applied", 10, time.monotonic() - age)
        found._written[KEY[0], KEY[1], KEY[2]] = replace(base, **fields)
    return found


OLD = EXPECTATION + 1
CASES: dict[str, tuple[Callable[[], Applier], bool]] = {
    "nothing known, as after a restart": (lambda: applier(written=False), True),
    "nothing known, and a list shows what was applied": (lambda: applier(replace(FACT, intact=True), written=False), False),
    "nothing known, and a list shows what was applied for another manifest": (
        lambda: applier(replace(FACT, intact=True, applied_hash="other"), written=False),
        True,
    ),
    "nothing known, and a list shows what was applied for another owner": (
        lambda: applier(replace(FACT, intact=True, owner_uid="other"), written=False),
        True,
    ),
    "nothing known and nothing there": (lambda: applier(None, written=False), True),
    "as it was written": (applier, False),
    "as it was written, long ago": (lambda: applier(age=OLD), False),
    "another manifest is wanted": (lambda: applier(hash="other"), True),
    "another manifest is wanted, and the watch is behind": (
        lambda: applier(replace(FACT, resource_version="9"), hash="other"),
        True,
    ),
    "edited by somebody": (lambda: applier(replace(FACT, resource_version="11", digest="edited")), True),
    "touched by somebody, our fields as they were": (lambda: applier(replace(FACT, resource_version="11")), False),
    "deleted and made again by somebody": (lambda: applier(replace(FACT, resource_version="12", uid="uid-2")), True),
    "the watch is behind": (lambda: applier(replace(FACT, resource_version="9", digest="before")), False),
    "the watch has been behind for too long": (
        lambda: applier(replace(FACT, resource_version="9", digest="before"), age=OLD),
        True,
    ),
    "not shown yet": (lambda: applier(None), False),
    "not shown for too long": (lambda: applier(None, age=OLD), True),
}


@pytest.mark.parametrize(("found", "writes"), CASES.values(), ids=CASES)
def test_what_is_written(found: Callable[[], Applier], writes: bool) -> None:
    assert found()._differs(MANIFEST) is writes


def test_what_was_shown_and_then_deleted_is_written_again_at_once() -> None:
    found = applier()
    assert not found._differs(MANIFEST)
    found._store.remove("services", KEY)
    assert found._differs(MANIFEST) and found.unseen([MANIFEST]) == []


def test_an_older_object_of_that_name_that_goes_says_nothing_about_ours() -> None:
    found = applier(replace(FACT, uid="uid-0", resource_version="3"))
    found._store.remove("services", KEY)
    assert not found._differs(MANIFEST) and found.unseen([MANIFEST]) == ["Service chat"]


def test_engines_that_no_watch_has_shown_are_told_with_their_site() -> None:
    """Until the watch shows them, or their deletion, or it is so late that they are written again."""
    fact = replace(FACT, kind="Deployment", site="there", labels={**FACT.labels, SLICE: "chat-1-0"})
    for shown, age, expected in ((None, 0.0, {"chat-1-0": "there"}), (fact, 0.0, {}), (None, OLD, {})):
        found = applier(shown, age=age)
        found._made[UID] = {KEY: ("chat-1-0", "there")}  # type: ignore[dict-item]
        assert found.unshown(UID) == expected and found.unshown("other") == {}
        found.forget(NAMESPACE, builders.NAME)
        assert found.unshown(UID) == {}


OURS: dict[str, tuple[Callable[[], Applier], bool]] = {
    "its owner is ours": (lambda: applier(written=False), True),
    "no owner": (lambda: applier(replace(FACT, owner_uid=""), written=False), False),
    "another owner": (lambda: applier(replace(FACT, owner_uid="other"), written=False), False),
    "nobody knows it": (lambda: applier(None, written=False), False),
    "we wrote it a moment ago": (lambda: applier(None), True),
    "we wrote it for a namesake that is gone": (lambda: applier(None, owner_uid="before"), False),
    "somebody took our reference off what we wrote": (lambda: applier(replace(FACT, owner_uid="", resource_version="11")), True),
    "somebody put another in its place": (lambda: applier(replace(FACT, owner_uid="", uid="uid-2", resource_version="12")), False),
}


@pytest.mark.parametrize(("found", "ours"), OURS.values(), ids=OURS)
def test_what_is_taken_for_ours(found: Callable[[], Applier], ours: bool) -> None:
    assert found()._is_ours(MANIFEST) is ours


def test_a_deployment_that_is_gone_is_forgotten() -> None:
    found = applier()
    found.forget(NAMESPACE, "other")
    assert not found._differs(MANIFEST)
    found.forget(NAMESPACE, builders.NAME)
    assert found._differs(MANIFEST) and found._written == {}
