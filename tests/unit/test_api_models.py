"""The models: defaults, strictness, scalars, and what the tables say without a server."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import manifests
from pd_operator.api.pool import PDPoolSpec
from pd_operator.api.scalars import PERCENT, NumberOr, ceil_seconds, format_bytes, quantity, seconds, unique
from pd_operator.api.status import PDDeploymentStatus
from pd_operator.api.types import PDDeploymentSpec, Share


def spec(patch: dict[str, object] | None = None) -> PDDeploymentSpec:
    return PDDeploymentSpec.model_validate(manifests.merge(manifests.minimal(), {"spec": patch or {}})["spec"], strict=True)


def test_minimal_has_the_defaults_of_the_design() -> None:
    minimal = spec()
    assert minimal.suspend is False
    assert minimal.prefill.replicas is None and minimal.scaling is None and minimal.lmcache is None
    assert minimal.verification == "Required"
    assert (minimal.handoff.connector, minimal.handoff.on_failure, minimal.handoff.lease_duration) == ("nixl", "Recompute", "30s")
    assert (minimal.router.type, minimal.router.replicas) == ("smg", 2)
    assert (minimal.rollout.max_surge, minimal.rollout.max_unavailable, minimal.rollout.drain_timeout) == ("25%", "25%", "120s")
    assert minimal.backpressure.max_queue_time == "5s"
    cache = spec({"lmcache": {}}).lmcache
    assert cache is not None
    assert (cache.version, cache.l1_size, cache.chunk_size, cache.transfer, cache.p2p.enabled) == (
        "0.5.5",
        "20Gi",
        256,
        "Engine",
        False,
    )


@pytest.mark.parametrize("entry", manifests.good(), ids=str)
def test_good_manifests_are_read_and_written_unchanged(entry: manifests.Entry) -> None:
    read = PDDeploymentSpec.model_validate(entry.manifest["spec"], strict=True)
    written = read.model_dump(by_alias=True, exclude_none=True)
    assert PDDeploymentSpec.model_validate(written, strict=True) == read


def test_unknown_fields_are_refused_in_spec_and_dropped_in_status() -> None:
    with pytest.raises(ValidationError, match="lmCache"):
        spec({"lmCache": {}})
    with pytest.raises(ValidationError, match="extra"):
        PDPoolSpec.model_validate({"role": "prefill", "deploymentName": "chat", "extra": 1})
    assert PDDeploymentStatus.model_validate({"of-a-later-version": 1, "url": "http://chat"}).url == "http://chat"


def test_models_are_immutable() -> None:
    with pytest.raises(ValidationError):
        spec().suspend = True  # type: ignore[misc]


@pytest.mark.parametrize("value", [0, 1, 10000, "0%", "9%", "10%", "100%"])
def test_share(value: int | str) -> None:
    assert spec({"rollout": {"maxSurge": value}}).rollout.max_surge == value


@pytest.mark.parametrize("value", [-1, 10001, True, "1", "101%", "05%", "1.5%", "25 %", ""])
def test_not_a_share(value: int | str) -> None:
    with pytest.raises(ValidationError, match="maxSurge"):
        spec({"rollout": {"maxSurge": value}})


def test_number_or_refuses_a_boolean_also_outside_strict_mode() -> None:
    with pytest.raises(ValueError, match="must be a percentage"):
        NumberOr(100, PERCENT, "a percentage").check(True)
    assert Share  # the annotation that uses it


@pytest.mark.parametrize(
    ("text", "value"), [("30s", 30), ("1m30s", 90), ("1.5h", 5400), ("250ms", 0.25), ("1h1m1s1ms", 3661.001), ("0s", 0)]
)
def test_seconds(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "30", "s", "-1s", "1d", "1 s", "1e3s", "999999h", "1s1s1s1s1s"])
def test_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        seconds(text)


def test_ceil_seconds_covers_the_duration_and_no_more() -> None:
    assert [ceil_seconds(text) for text in ("1ms", "1s", "1001ms", "1m0.5s", "0.3s0.7s")] == [1, 1, 2, 61, 1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        (2, 2),
        ("500m", "0.5"),
        ("1k", 1000),
        ("20Gi", 20 * 2**30),
        ("1.5Gi", 3 * 2**29),
        ("1Ei", 2**60),
        ("5u", "5e-6"),
        ("1e3", 1000),
    ],
)
def test_quantity(text: str | int, value: str | int) -> None:
    assert quantity(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1gi", "1KiB", "one"])
def test_not_a_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity(text)


@given(st.integers(1, 2**50))
def test_format_bytes_rounds_up_by_less_than_a_mebibyte(count: int) -> None:
    assert 0 <= quantity(format_bytes(Decimal(count))) - count < 2**20


def test_unique_names_the_trouble() -> None:
    assert unique(["a", "b"]) == ["a", "b"]
    with pytest.raises(ValueError, match="the same entry twice"):
        unique(["a", "a"])
