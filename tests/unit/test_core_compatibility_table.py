"""Combinations of engine, version, parallelism, settings, router, cache and model: the verdict and the sentence that a user reads.

compatibility.yaml is the table, compatibility_models.yaml the models in it. An entry is a merge patch over the minimal spec.
`verdict` is accepted (nothing is said), unproven (`says` is what stands in Accepted after "unproven:") or the reason of a refusal.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import builders
import pytest
import yaml
from builders import deep, make_snapshot, make_spec

from pd_operator.api.conditions import Reason
from pd_operator.core.capabilities import Check, Refusal, Unproven
from pd_operator.core.compatibility import review
from pd_operator.core.compatibility_case import Case
from pd_operator.core.compatibility_model import Model, read_model
from pd_operator.core.compatibility_options import options
from pd_operator.core.compatibility_verdict import PREDICATES, judge
from pd_operator.core.plan import make_plan
from pd_operator.core.status import build_status
from pd_operator.upstream import catalog

HERE = Path(__file__).parent
TABLE: list[dict[str, Any]] = yaml.safe_load((HERE / "compatibility.yaml").read_text())
MODELS: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "compatibility_models.yaml").read_text())
ACCEPTED, UNPROVEN = "accepted", "unproven"
FOUND = {Reason.INCOMPATIBLE_PAIR, Reason.STATE_NOT_TRANSFERABLE}  # what judge alone refuses with


def model(name: str) -> Model:
    """A model of the table."""
    found = read_model(name, {"config.json": json.dumps(MODELS[name]["config"])})
    assert isinstance(found, Model), found
    return found


def changes(entry: dict[str, Any]) -> dict[str, Any]:
    """The patch of an entry, with the reference to its model."""
    patch: dict[str, Any] = entry["patch"]
    return deep(patch, {"model": {"configMapRef": {"name": entry["model"]}}}) if "model" in entry else patch


def outcome(entry: dict[str, Any]) -> tuple[list[Refusal], tuple[Unproven, ...]]:
    """Refusals of the whole review, and what is unproven."""
    spec = make_spec(changes(entry))
    upstream = catalog.upstream(spec)
    images = {component: image or "example.org/image:1" for component, image in builders.images(spec).items()}
    known = model(entry["model"]) if "model" in entry else None
    return review(spec, upstream, images, model=known), judge(spec, upstream, images, known).unproven


def says(entry: dict[str, Any]) -> str:
    """The sentence for the user."""
    refusals, unproven = outcome(entry)
    if entry["verdict"] == UNPROVEN:
        return " | ".join(u.message for u in unproven)
    return next((r.message for r in refusals if (r.reason, r.field) == (entry["verdict"], entry.get("field"))), "")


@pytest.mark.parametrize("entry", TABLE, ids=lambda e: str(e["name"]))
def test_verdict(entry: dict[str, Any]) -> None:
    refusals, unproven = outcome(entry)
    verdict = entry["verdict"]
    if verdict == ACCEPTED:
        assert (refusals, unproven) == ([], ())
        return
    if verdict == UNPROVEN:
        assert refusals == []
        assert entry["field"] in [u.field for u in unproven]
    else:
        shown = [(r.reason.value, r.field) for r in refusals]
        assert (verdict, entry["field"]) in shown
        built = [reason for reason, _ in shown if reason != Reason.NOT_IMPLEMENTED]
        assert verdict == Reason.NOT_IMPLEMENTED or built[0] == verdict, "status shows the first"
    assert says(entry) == entry["says"]


def test_the_table_is_large_enough_and_balanced() -> None:
    names = [entry["name"] for entry in TABLE]
    assert len(set(names)) == len(names)
    verdicts = Counter(entry["verdict"] for entry in TABLE)
    assert len(TABLE) >= 150 and verdicts[ACCEPTED] >= 40 and verdicts[UNPROVEN] >= 20
    assert verdicts[Reason.INCOMPATIBLE_PAIR] >= 45 and verdicts[Reason.STATE_NOT_TRANSFERABLE] >= 18
    assert set(verdicts) - {ACCEPTED, UNPROVEN} >= {*FOUND, Reason.UNSAFE_FAILURE_POLICY, Reason.UNSUPPORTED_VERSION}


@pytest.mark.parametrize("entry", [e for e in TABLE if e["verdict"] in FOUND], ids=lambda e: str(e["name"]))
def test_a_refusal_names_field_value_and_what_would_be_accepted(entry: dict[str, Any]) -> None:
    """I8, for every refusal of an entry and not only for the one that it is about."""
    for refusal in outcome(entry)[0]:
        assert refusal.field.startswith("spec.") and refusal.message.startswith(refusal.field)
        assert refusal.value in refusal.message and len(refusal.message) < 600
        assert refusal.reason not in FOUND or "; accepted: " in refusal.message


def test_every_check_is_seen_in_the_table() -> None:
    """No predicate and no row of pairs.py is dead: each fires for some entry."""
    fired: Counter[Check] = Counter()
    for entry in TABLE:
        spec = make_spec(changes(entry))
        upstream = catalog.upstream(spec)
        known = model(entry["model"]) if "model" in entry else None
        case = Case(spec, upstream, builders.images(spec), known, options(spec, "prefill"), options(spec, "decode"))
        fired.update(rule.check for rule in upstream.rules if any(True for _ in PREDICATES[rule.check](case, rule)))
    assert set(fired) == set(Check)


def test_the_states_of_the_models_are_read() -> None:
    for name, entry in MODELS.items():
        assert [str(state) for state in model(name).states] == entry["states"], name
    assert {e["model"] for e in TABLE if "model" in e} <= set(MODELS)


@pytest.mark.parametrize("name", ["tensor-neither-divides", "state-v41-engram", "block-said-once", "minimal"])
def test_status_says_the_same(name: str) -> None:
    entry = next(e for e in TABLE if e["name"] == name)
    snapshot = make_snapshot(changes(entry), model=model(entry["model"]) if "model" in entry else None)
    plan = make_plan(snapshot)
    accepted = builders.conditions(build_status(snapshot, plan))["Accepted"]
    if entry["verdict"] == ACCEPTED:
        assert (accepted["status"], accepted["message"], plan.unproven) == ("True", "the spec was accepted", ())
    elif entry["verdict"] == UNPROVEN:
        assert (accepted["status"], accepted["reason"]) == ("True", "Accepted")
        assert accepted["message"] == f"the spec was accepted; unproven: {entry['says']}"
        assert [u.field for u in plan.unproven] == [entry["field"]]
    else:
        assert (accepted["status"], accepted["reason"]) == ("False", entry["verdict"])
        assert accepted["message"].startswith(entry["says"])
        assert plan.targets == ()
