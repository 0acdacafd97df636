"""The tables of upstream: complete, without overlap, with a source each; core has a predicate for each check; the page agrees."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import builders
import pytest
from builders import make_spec
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from pd_operator.api.conditions import Reason
from pd_operator.core.capabilities import HYBRID, RECURRENT, Carriage, Check, State
from pd_operator.core.compatibility_model import ARCHITECTURES, ATTENTION_FREE, MODEL_TYPES
from pd_operator.core.compatibility_verdict import NAMES, PREDICATES
from pd_operator.upstream import catalog, pairs, pairs_docs, states

ENGINES = sorted(NAMES)
BOUNDS = sorted({b for r in (*pairs.ROWS, *states.ROWS) for b in (r.since, r.until) if b}, key=Version)
PAGE = builders.ROOT / "docs" / "reference" / "compatibility.md"


def around(bound: str) -> list[str]:
    """A boundary, its release candidate, its local build, and versions on both sides."""
    version = Version(bound)
    return [bound, f"{bound}rc1", f"{bound}+cu130", f"{version.major}.{version.minor}.{version.micro + 1}"]


VERSIONS = sorted({"0.1.0", "9.9.9", *(v for bound in BOUNDS for v in around(bound))}, key=Version)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("version", VERSIONS)
def test_exactly_one_row_tells_what_becomes_of_a_state(engine: str, version: str) -> None:
    found = Counter(c.state for c in states.carries(engine, version))
    assert found == dict.fromkeys(State, 1)


@given(st.integers(0, 2), st.integers(0, 60), st.integers(0, 9), st.sampled_from(["", "rc2", ".dev3", ".post1", "+cpu"]))
def test_one_row_for_any_version(major: int, minor: int, micro: int, suffix: str) -> None:
    for engine in ENGINES:
        assert len(states.carries(engine, f"{major}.{minor}.{micro}{suffix}")) == len(State)


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_of_one_rule_do_not_overlap(version: str) -> None:
    for engine in ENGINES:
        found = Counter((r.check, r.names) for r in pairs.rules(engine, version, cache=True))
        assert set(found.values()) == {1}


def test_a_release_candidate_counts_with_the_release_before() -> None:
    def replay(version: str) -> Carriage:
        return next(c.carriage for c in states.carries("vllm", version) if c.state is State.REPLAY)

    assert [replay(v) for v in ("0.31.0rc1", "0.31.0", "0.32.0rc1", "0.32.0")] == [
        Carriage.CARRIED,
        Carriage.LOST,
        Carriage.LOST,
        Carriage.CARRIED,
    ]


def test_what_is_not_supported_today_ends_somewhere() -> None:
    """A row that refuses because upstream lacks something must not refuse for ever: behind it stands one that does not."""
    for version in ("0.33.0", "0.34.0"):
        rule = next(r for r in pairs.rules("vllm", version, cache=False) if r.check is Check.PIPELINE)
        assert rule.reason is (Reason.INCOMPATIBLE_PAIR if version == "0.33.0" else None)
    lost = {c.state for c in states.carries("vllm", "9.9.9") if c.carriage is Carriage.LOST}
    assert lost == {State.CROSS}


@pytest.mark.parametrize("version", ["", "latest", "v0.32.0.x"])
def test_a_version_that_cannot_be_read_has_no_rows(version: str) -> None:
    assert pairs.rules("vllm", version, cache=True) == () and states.carries("vllm", version) == ()


def test_rows_of_the_cache_hold_with_the_cache_only() -> None:
    with_cache, without = (pairs.rules("vllm", "0.32.0", cache) for cache in (True, False))
    extra = {r.check for r in with_cache} - {r.check for r in without}
    assert set(without) < set(with_cache)
    assert extra == {r.check for r in pairs.ROWS if r.with_cache}
    assert {Check.CHUNK_BLOCK, Check.SERVER_MEMORY, Check.CACHE_IMAGE} <= extra


def test_every_check_has_a_predicate_and_a_row() -> None:
    assert set(PREDICATES) == set(Check)
    assert {r.check for r in pairs.ROWS} == set(Check)
    assert len({id(p) for p in PREDICATES.values()}) == len(PREDICATES)


def test_every_reason_of_a_row_is_one_of_accepted() -> None:
    assert {r.reason for r in pairs.ROWS} == {
        None,
        Reason.INCOMPATIBLE_PAIR,
        Reason.STATE_NOT_TRANSFERABLE,
        Reason.UNSUPPORTED_VERSION,
    }


def test_every_fact_has_a_source_and_a_clause() -> None:
    for row in pairs.ROWS:
        assert len(row.source) > 10 and len(row.why) > 15, row
        assert not row.why.endswith(".") and row.engine in ENGINES
    for fact in states.ROWS:
        assert len(fact.source) > 10 and len(fact.how) > 10, fact
        assert bool(fact.accepted) == (fact.carriage is not Carriage.CARRIED), fact


def test_sources_that_name_a_pull_request_or_a_file_are_of_upstream() -> None:
    text = " ".join(r.source for r in (*pairs.ROWS, *states.ROWS))
    assert len(re.findall(r"\w+\.py", text)) >= 25
    assert not re.search(r"/work|/tmp|site-packages|https?://", text)


def test_kinds_of_states() -> None:
    assert RECURRENT < HYBRID < set(State)
    kinds = {kind for kind in (*MODEL_TYPES.values(), *ARCHITECTURES.values()) if kind is not None}
    assert kinds == RECURRENT - {State.PLE_CONV, State.OTHER}
    assert set(MODEL_TYPES) >= ATTENTION_FREE


def test_a_tested_version_is_named_for_programs_that_are_built_only() -> None:
    def fields(changes: dict[str, Any]) -> dict[str, str]:
        return {u.field: u.why for u in catalog.upstream(make_spec(changes)).unproven}

    assert fields({"lmcache": {}}) == {}
    newer = {
        "engine": {"version": "0.33.0"},
        "router": {"type": "vllm-router", "version": "0.2.0"},
        "lmcache": {"version": "0.5.6"},
    }
    assert fields(newer) == {
        "spec.engine.version": "tested is 0.32.0",
        "spec.router.version": "tested is 0.1.17",
        "spec.lmcache.version": "tested is 0.5.5",
    }
    assert (
        fields({"engine": {"type": "sglang", "version": "0.5.23"}, "router": {"type": "sglang-router", "version": "0.3.2"}}) == {}
    )
    assert fields({"engine": {"version": "0.22.0"}}) == {}, "refused"


# --- the page -------------------------------------------------------------------------------------------------------------


def rows_of(heading: str) -> list[list[str]]:
    """Cells of the table below a heading."""
    section = PAGE.read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == pairs_docs.markdown()


def test_the_page_has_a_line_for_every_row() -> None:
    shown = rows_of("Pairs")
    wanted = [r for r in pairs.ROWS if r.check is not Check.ROUTER_PROTOCOL]
    assert len(shown) == len(wanted)
    assert sorted(cells[4] for cells in shown) == sorted(r.why for r in wanted)
    assert all(len(cells) == 6 and all(cells) for cells in shown)
    assert len(rows_of("States at handoff")) == sum(len(r.states) for r in states.ROWS)
    assert {cells[1] for cells in rows_of("States at handoff")} == {str(s) for s in State}
    assert [cells[0] for cells in rows_of("Engines and routers")] == ["vLLM", "SGLang", "TensorRT-LLM"]


def test_the_page_has_every_model_type() -> None:
    shown = " ".join(cells[1] for cells in rows_of("Model types"))
    assert all(f"`{name}`" in shown for name in MODEL_TYPES)


@pytest.mark.parametrize(
    ("since", "until", "text"),
    [("", "", "all"), ("0.29.0", "", "0.29.0 and later"), ("", "0.29.0", "below 0.29.0"), ("1", "2", "1 to below 2")],
)
def test_ranges_are_words(since: str, until: str, text: str) -> None:
    assert pairs_docs.versions(since, until) == text
