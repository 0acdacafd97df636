"""Slices whose nodes died (opsrunner/deaths.py) are whole elsewhere, and what never ends is not waited for without a bound."""

from __future__ import annotations

import time

import pytest

from opsrunner import waits
from opsrunner.api import Api, Object
from opsrunner.deaths import Deaths
from pd_operator.core.names import COMPONENT, SLICE
from pd_operator.core.observed import LOST_AFTER

pytestmark = pytest.mark.cluster

PAIR = ["decode", "prefill"]
GC = 90.0  # seconds in which the pod garbage collector finds pods of a missing node: every 20 s, after 40 s of quarantine


def test_a_slice_leaves_a_node_that_is_gone(deaths: Deaths) -> None:
    """Its pod is held to run until the garbage collector ends it; then half of the slice is left, and it moves whole."""
    nodes, before = deaths.gone, deaths.slices["gone"]
    waits.until("the slice to be elsewhere", lambda: before not in nodes.places("gone"), timeout=GC + 60)
    nodes.ready("gone")
    ((_, where),) = nodes.places("gone").items()
    assert where == [(role, nodes.node("n-d1")) for role in PAIR]


def test_a_slice_leaves_a_silent_node_at_once(deaths: Deaths, api: Api, space: str) -> None:
    """Pods that are told to end are not counted, whether or not they ever do."""
    nodes = deaths.silent
    waits.until("another slice", lambda: set(nodes.places("silent")) - {deaths.slices["silent"]})
    nodes.placed("silent", "True", "Bound")
    waits.until(
        "it serves",
        lambda: (
            [s["domain"] for s in api.must_get("PDDeployment", space, "silent")["status"]["slices"] if s["state"] == "Serving"]
            == [nodes.node("spare")]
        ),
        show=lambda: waits.describe(api.get("PDDeployment", space, "silent")),
    )


def test_what_stays_terminating_is_lost_after_a_bound(deaths: Deaths, api: Api, space: str) -> None:
    """The engine on the healthy node waits for its slice's router to end, which never does: it goes after the bound."""
    nodes, old = deaths.silent, deaths.slices["silent"]

    def left() -> list[Object]:
        return [p for p in api.list("Pod", space, f"{SLICE}={old}") if p["spec"].get("nodeName") == nodes.node("n-0")]

    if time.monotonic() - deaths.at < LOST_AFTER - 30:
        assert left(), "the engine ended before its router"
    waits.until("the engine of the old slice to go", lambda: not left(), timeout=LOST_AFTER + 90)
    assert time.monotonic() - deaths.at >= LOST_AFTER
    nodes.ready("silent")
    stuck = {p["metadata"]["labels"][COMPONENT] for p in api.list("Pod", space, f"{SLICE}={old}")}
    assert stuck == {"engine", "router"}, "nobody ended the pods of the dead node by force"
