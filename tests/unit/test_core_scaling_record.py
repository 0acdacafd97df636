"""Records: what is written is read back, and decides again to the same bytes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import builders
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_builders import BOUNDS, any_bounds, any_readings, learned, readings

from pd_operator.core.scaling import codec, record
from pd_operator.core.scaling.bounds import Bounds
from pd_operator.core.scaling.decide import decide
from pd_operator.core.scaling.decision import Reason
from pd_operator.core.scaling.law import Law
from pd_operator.core.scaling.learned import Gate, Learned, Memory
from pd_operator.core.scaling.readings import Readings, Signal, SliceHandoff, State

NOW = 1_764_460_800.123


def a_record() -> record.Record:
    return record.make("ns/chat", readings(running=340.0, handoff_waiting=60.0), learned(NOW - 15), BOUNDS, NOW, Law(jump=1.3))


def test_a_line_says_everything_and_decides_the_same() -> None:
    line = a_record().line()
    assert "\n" not in line
    assert record.parse(line) == a_record()
    assert record.parse(line).law.jump == 1.3
    assert record.replay(line) == []


def test_lines_of_an_older_law_decide_the_same() -> None:
    """Lines that were written before the law learned the spread of what runs: what they mean has not changed."""
    lines = (builders.ROOT / "tests" / "golden" / "decisions-v1.jsonl").read_text().splitlines()
    assert len(lines) == 8 and all("law" not in json.loads(line) for line in lines)
    assert [difference for line in lines for difference in record.replay(line)] == []


def test_what_decode_remembers_comes_through_a_status_and_a_replay() -> None:
    """500 run once and then 100: three replicas are kept for longer than the plain window of 300 s, where that is switched on."""
    for law, kept in ((Law(decode_memory=15.0), True), (Law(), False)):
        answers = []
        state = decide(readings(2, 3, running=500.0, kv_tokens=500_000.0), learned(), BOUNDS, NOW, law).learned
        for n in range(1, 31):
            state = codec.decode(Learned, json.loads(json.dumps(codec.encode(state))))
            made = record.make("demo/chat", readings(2, 3), state, BOUNDS, NOW + 15 * n, law)
            assert record.replay(made.line()) == []
            answers.append(made.decision.decode.desired)
            state = made.decision.learned
        assert set(answers[:19]) == {3} and (set(answers[19:]) == {3}) is kept


def test_a_line_that_was_changed_is_told_apart() -> None:
    data = json.loads(a_record().line())
    data["decision"]["decode"]["desired"] = 9
    data["decision"]["learned"]["decode"]["starts"] = 1.0
    assert record.replay(json.dumps(data)) == [
        "decision.decode.desired: recorded 9, now 2",
        "decision.learned.decode.starts: recorded 1.0, now 10.0",
    ]


def test_readings_of_another_day_give_another_answer() -> None:
    data = json.loads(a_record().line())
    data["readings"]["running"]["value"] = 10.0
    assert any(d.startswith("decision.decode.flow: recorded 1.") for d in record.replay(json.dumps(data)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("format"), "format is None: accepted is 1"),
        (lambda d: d.update(format=2), "format is 2: accepted is 1"),
        (lambda d: d.pop("now"), "Record: .*now"),
        (lambda d: d.update(colour=1), "Record.colour is not a field; accepted are bounds, decision"),
        (
            lambda d: d["bounds"]["prefill"].update(minimum="2"),
            "Record.bounds.prefill.minimum is '2': accepted is a value of type int",
        ),
        (lambda d: d["bounds"]["prefill"].update(minimum=True), "minimum is True: accepted is a value of type int"),
        (lambda d: d["readings"]["running"].update(state="busy"), "running.state is 'busy': accepted are value, idle, unknown"),
        (lambda d: d["decision"]["learned"]["decode"]["memory"].update(peaks=[[1.0]]), r"peaks\[0\] has 1 items: accepted are 2"),
        (lambda d: d.update(readings=[]), r"Record.readings is \[\]: accepted is a value of type dict"),
    ],
)
def test_a_line_that_does_not_fit_is_refused_by_name(change: Any, words: str) -> None:
    data = json.loads(a_record().line())
    change(data)
    with pytest.raises(ValueError, match=words):
        record.parse(json.dumps(data))


@pytest.mark.parametrize(("line", "words"), [("", "not a line of JSON"), ("[1]", "format is None"), ("{", "not a line of JSON")])
def test_what_is_no_record_is_refused(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        record.parse(line)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_number_that_json_has_no_word_for_is_recorded_as_unknown(value: float) -> None:
    odd = Signal(State.VALUE, value, source="vllm:num_requests_running")
    made = record.make("ns/chat", readings(running=odd, slices=(SliceHandoff("a", odd, odd),)), learned(NOW - 15), BOUNDS, NOW)
    again = record.parse(made.line())
    assert again.readings.running == Signal(State.UNKNOWN, source=f"vllm:num_requests_running said {value}")
    assert not again.readings.slices[0].waiting.known
    assert again.decision.decode.reason is Reason.SIGNALS_UNKNOWN
    assert record.replay(made.line()) == []


def test_learned_fits_a_status() -> None:
    """Two of these stand in the status of two PDPools; a busy one, with a full down window, is still small."""
    memory = Memory(tuple((NOW + i, 100 - i) for i in range(32)), NOW, 1.5)
    full = learned(NOW, memory, memory)
    full = replace(full, decode=replace(full.decode, gates=tuple(Gate(f"chat-{i}", True, 3, 12.3456) for i in range(4))))
    assert len(codec.dumps(full.decode)) < 1500
    assert len(codec.dumps(learned().prefill)) < 300
    assert codec.dumps(Learned()) == "{}"


@settings(max_examples=60, deadline=None)
@given(st.lists(any_readings(), min_size=1, max_size=4), any_bounds())
def test_whatever_was_decided_replays_and_what_was_learned_survives_json(ticks: list[Readings], bounds: Bounds) -> None:
    state = Learned()
    for i, tick in enumerate(ticks):
        made = record.make("ns/any", tick, state, bounds, NOW + 15 * i)
        assert record.replay(made.line()) == []
        state = made.decision.learned
        assert codec.loads(Learned, codec.dumps(state)) == state
