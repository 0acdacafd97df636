"""I3, I12: every field of the schema stands in exactly one class, and an edit changes the hash of its class and no other."""

from __future__ import annotations

import json
from typing import Any

import builders
import pytest
from builders import OTHER, deep, make_spec, other
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.api.types import PDDeploymentSpec
from pd_operator.core.names import ROLES
from pd_operator.core.revision import CLASSES, canonical, class_of, manifest_hash, pairing_hash, pods_hash, role_hash

PATHS = list(builders.model_paths(PDDeploymentSpec))
LEAVES = builders.leaves()
LISTED = {  # as the design lists them; a field that moves between classes is a decision, not a detail
    "A": "engine model.uri model.name handoff lmcache backpressure prefill.args prefill.env decode.args decode.env"
    " placement.transferDomain rollout.restartID",
    "B": "prefill.resources prefill.parallelism prefill.nodes prefill.template decode.resources decode.parallelism decode.nodes"
    " decode.template lmcache.l1Size rollout.drainTimeout",
    "C": "prefill.replicas decode.replicas suspend scaling slo placement.maxDomains placement.schedulingTimeout router gateway"
    " model.configMapRef verification rollout",
}


def hashes(spec: PDDeploymentSpec) -> dict[str, str]:
    return {"pairing": pairing_hash(spec), **{role: role_hash(spec, role) for role in ROLES}}


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Which hashes differ between two sets of changes to the minimal spec."""
    old, new = hashes(make_spec(before)), hashes(make_spec(after))
    return {name for name in old if old[name] != new[name]}


def test_the_walk_sees_the_schema() -> None:
    assert {"model.uri", "prefill.parallelism.tensor", "lmcache.p2p.enabled", "scaling.maxGPUs", "rollout.restartID"} <= set(PATHS)


def test_every_leaf_has_another_value() -> None:
    assert set(LEAVES) - builders.ONE_VALUE == set(OTHER)


@pytest.mark.parametrize("path", LEAVES)
def test_every_field_has_a_class(path: str) -> None:
    assert class_of(path) in ("A", "B", "C")


def test_no_entry_is_left_over() -> None:
    assert set(CLASSES) <= set(PATHS)


def test_a_field_that_is_not_in_the_table_is_an_error() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        class_of("nowhere.at.all")


def test_the_classes_are_those_of_the_design() -> None:
    for letter, paths in LISTED.items():
        for path in paths.split():
            assert class_of(path) == letter, path


@pytest.mark.parametrize("path", [p for p in LEAVES if p in OTHER])
def test_an_edit_changes_the_hash_of_its_class_alone(path: str) -> None:
    base: dict[str, Any] = {}
    if path.startswith("lmcache."):
        base = {"lmcache": {}}
    if path.startswith("scaling."):
        base = {"scaling": builders.SCALING}
    expected = {"A": {"pairing"}, "B": {path.split(".", maxsplit=1)[0]}, "C": set()}[class_of(path)]
    if path == "lmcache.l1Size":
        expected = set(ROLES)
    if path == "rollout.drainTimeout":
        expected = {"decode"}
    assert changed(base, deep(base, other(path))) == expected


@pytest.mark.parametrize("path", [p for p in PATHS if p not in LEAVES])
def test_no_object_of_the_schema_mixes_classes_without_saying_so(path: str) -> None:
    """Where the fields of an object have several classes, each has an entry of its own or the object's class."""
    inside = {class_of(p) for p in LEAVES if p.startswith(f"{path}.")}
    assert len(inside) == 1 or any(known.startswith(f"{path}.") for known in CLASSES)


def test_an_empty_cache_differs_from_none() -> None:
    assert changed({}, {"lmcache": {}}) == {"pairing"}


def test_spelled_out_defaults_change_nothing() -> None:
    bare = make_spec({"lmcache": {}})
    spelled = PDDeploymentSpec.model_validate(bare.model_dump(by_alias=True, exclude_none=True))
    assert hashes(bare) == hashes(spelled)
    assert pods_hash(bare) == pods_hash(spelled)


def test_empty_objects_and_lists_change_nothing() -> None:
    empty = {
        "engine": {"args": [], "env": []},
        "handoff": {},
        "prefill": {"args": [], "template": {}, "parallelism": {}},
        "placement": {"transferDomain": {}},
        "router": {},
        "rollout": {"restartID": ""},
        "backpressure": {},
    }
    assert changed({}, empty) == set()


@given(st.randoms(use_true_random=False))
def test_the_order_of_keys_changes_nothing(random: Any) -> None:
    def shuffle(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        keys = list(value)
        random.shuffle(keys)
        return {key: shuffle(value[key]) for key in keys}

    changes = {
        "lmcache": {"l1Size": "1Gi", "p2p": {"enabled": True}},
        "prefill": {
            "args": ["--a"],
            "template": {"metadata": {"labels": {"a": "1", "b": "2"}}, "spec": {"priorityClassName": "high"}},
        },
    }
    whole = deep(builders.MINIMAL, changes)
    assert hashes(PDDeploymentSpec.model_validate(whole)) == hashes(PDDeploymentSpec.model_validate(shuffle(whole)))


def test_the_order_of_arguments_counts() -> None:
    assert changed({"engine": {"args": ["--a", "--b"]}}, {"engine": {"args": ["--b", "--a"]}}) == {"pairing"}


def test_replicas_of_one_role_touch_nothing_of_the_other() -> None:
    assert changed({}, {"prefill": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}}) == {"prefill"}
    assert changed({}, {"decode": {"resources": {"requests": {"cpu": "1"}}}}) == {"decode"}


def test_lengths_and_alphabet() -> None:
    spec = make_spec()
    found = {8: pairing_hash(spec), 6: pods_hash(spec), 16: manifest_hash({"a": 1})}
    for length, value in found.items():
        assert len(value) == length and set(value) <= set("0123456789abcdef")


def test_canonical_text_does_not_depend_on_order_or_spaces() -> None:
    assert canonical({"b": [1, {"d": "ä", "c": None}], "a": 2}) == '{"a":2,"b":[1,{"c":null,"d":"ä"}]}'
    assert json.loads(canonical({"b": 1})) == {"b": 1}


def test_revisions_stay_what_they_are() -> None:
    """Hashes name objects of running clusters: a change here would replace every slice with the next version of the operator."""
    assert pairing_hash(make_spec()) == "77bf3529"
    assert pairing_hash(make_spec({"lmcache": {}})) == pairing_hash(make_spec({"lmcache": {"version": "0.5.5"}}))
    assert pods_hash(make_spec()) == pods_hash(make_spec({"lmcache": {}}))
