"""What the schema cannot refuse is refused by the operator, with reason, field and what would be accepted."""

from __future__ import annotations

import pytest

import manifests
from pd_operator.api.types import PDDeploymentSpec
from pd_operator.core.capabilities import Refusal
from pd_operator.core.compatibility import review
from pd_operator.core.references import references
from pd_operator.upstream import catalog

IMAGES = {part: f"example.org/{part}:v0" for part in ("engine", "router", "lmcache", "canary")}


def refusals(entry: manifests.Entry) -> list[Refusal]:
    """The review of an entry, told what the entry says about images, server and references."""
    spec = PDDeploymentSpec.model_validate(entry.manifest["spec"], strict=True)
    missing = references(spec) if entry.missing else ()
    return review(spec, catalog.upstream(spec), entry.images or IMAGES, missing, (1, entry.server))


@pytest.mark.parametrize("entry", manifests.bad("operator"), ids=str)
def test_operator_refuses(entry: manifests.Entry) -> None:
    found = refusals(entry)
    told = {(r.reason.value, r.field): r.message for r in found}
    assert (entry.reason, entry.field) in told, told
    message = told[entry.reason, entry.field]
    assert entry.field in message
    assert entry.message in message


@pytest.mark.parametrize("entry", manifests.bad("operator"), ids=str)
def test_the_expected_refusal_is_the_one_that_status_shows(entry: manifests.Entry) -> None:
    first = refusals(entry)[0]
    assert (first.reason.value, first.field) == (entry.reason, entry.field)


@pytest.mark.parametrize("entry", manifests.good(), ids=str)
def test_operator_accepts(entry: manifests.Entry) -> None:
    assert refusals(entry) == []


def test_the_tables_are_large_enough_and_their_names_are_unique() -> None:
    server, operator, good = manifests.bad("server"), manifests.bad("operator"), manifests.good()
    assert len(server) + len(operator) >= 60
    assert len(good) >= 30
    names = [entry.name for entry in (*server, *operator, *good)]
    assert sorted(set(names)) == sorted(names)
    assert all(entry.reason and entry.field for entry in operator)
    assert all(entry.message for entry in server)
