"""I2: a manifest in the form in which the API server stores it; test_i2_intact_live.py asks a server for the same."""

from __future__ import annotations

from typing import Any

import pytest

from pd_operator.core.revision import applied_hash
from pd_operator.core.stored_form import stored_form, stored_quantity

QUANTITIES: tuple[tuple[Any, Any], ...] = (
    (1, "1"), ("1", "1"), (0.5, "500m"), ("0.1", "100m"), ("1000m", "1"), ("1500m", "1500m"), (2000, "2k"), ("1000k", "1M"),
    ("1024Mi", "1Gi"), ("4608Mi", "4608Mi"), ("1.5Gi", "1536Mi"), ("0.1Gi", "107374182400m"), ("2048", "2048"), ("1Ki", "1Ki"),
    ("0.5Ki", "512"), ("1000Mi", "1000Mi"), ("0", "0"), ("0Gi", "0"), ("0.0001", "1m"), ("12E", "12E"),
    ("1e3", "1e3"), ("some", "some"), ("", ""), (True, True), (None, None), ("0.0000000001", "1m"),
)  # fmt: skip


@pytest.mark.parametrize(("sent", "stored"), QUANTITIES, ids=str)
def test_quantities(sent: Any, stored: Any) -> None:
    assert stored_quantity(sent) == stored and type(stored_quantity(sent)) is type(stored)
    assert stored_quantity(stored) == stored


def workload(**container: Any) -> dict[str, Any]:
    return {
        "kind": "Deployment",
        "metadata": {"labels": {"sizeLimit": "1024Mi"}},
        "spec": {"template": {"spec": {"containers": [{"name": "c", **container}]}}},
    }


SAME = {
    "a count": ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, {"resources": {"limits": {"nvidia.com/gpu": "1"}}}),
    "an empty variable": ({"env": [{"name": "A", "value": ""}]}, {"env": [{"name": "A"}]}),
}
OTHER = {
    "another count": ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, {"resources": {"limits": {"nvidia.com/gpu": 2}}}),
    "a variable": ({"env": [{"name": "A", "value": ""}]}, {"env": [{"name": "A", "value": " "}]}),
    "an argument": ({"args": ["1"]}, {"args": [1]}),
    "another empty field": ({"securityContext": {}}, {}),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_what_is_stored_alike_has_one_hash(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert applied_hash(workload(**one)) == applied_hash(workload(**other))


@pytest.mark.parametrize(("one", "other"), OTHER.values(), ids=OTHER)
def test_what_is_stored_otherwise_has_another(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert applied_hash(workload(**one)) != applied_hash(workload(**other))


def test_labels_are_left_alone_and_nothing_is_copied_without_need() -> None:
    plain = workload(resources={"limits": {"cpu": "1"}}, env=[{"name": "A", "value": "1"}])
    assert stored_form(plain) is plain
    changed = workload(resources={"limits": {"cpu": 1}})
    assert stored_form(changed)["metadata"] is changed["metadata"]
    assert changed["spec"]["template"]["spec"]["containers"][0]["resources"] == {"limits": {"cpu": 1}}, (
        "the manifest stays as it is"
    )
