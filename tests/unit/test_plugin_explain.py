"""kubectl pdd explain: exact from the record in the status, in every mode, and the text that a person reads."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import builders
import pytest
from plugin_world import seen
from scaling_builders import BOUNDS, learned, long_ago, readings, replicas

from pd_operator import plugin
from pd_operator.core.names import ROLES
from pd_operator.core.pool_status import sentence
from pd_operator.core.scaling.bounds import Bounds
from pd_operator.core.scaling.decide import decide
from pd_operator.core.scaling.learned import Learned
from pd_operator.core.scaling.readings import Readings, Signal, SliceHandoff, State
from pd_operator.core.scaling.record import Record, make, replay
from pd_operator.kube import seen as reading
from pd_operator.kube.seen import Seen
from pd_operator.plugin import terminal
from pd_operator.plugin.explain_text import text
from pd_operator.plugin.explanation import Explanation, explain
from pd_simulate import cli as simulate

GOLDEN = builders.ROOT / "tests" / "golden" / "plugin"
UPDATE = os.environ.get("UPDATE_GOLDEN") == "1"
NOW = 1_770_000_000.0
SCALING: dict[str, Any] = {"scaling": {"mode": "Auto", "prefill": {"maxReplicas": 16}, "decode": {"maxReplicas": 16}}}
LOST = Signal(State.UNKNOWN, age=16.0, source="podScrape: pod chat-1a2b3c4d-0-decode-0 has no sample for 16 s")
FULL = readings(running=400.0, kv_tokens=400_000.0, handoff_waiting=60.0, queued_tokens=4_000_000.0, prompt_rate=60_000.0)
SLICES = (SliceHandoff("chat-1a2b3c4d-0", Signal.of(60.0, 2.0), Signal.of(10.0, 2.0)),)


def sourced(given: Readings) -> Readings:
    """With what a source of signals says beside the numbers."""
    signals = {
        n: replace(s, age=3.0, source="podScrape: 2 of 2 pods")
        for n in given.__slots__
        if isinstance(s := getattr(given, n), Signal) and s.known
    }
    return replace(given, **signals)  # type: ignore[arg-type]


def tick(given: Readings, before: Learned | None = None, bounds: Bounds = BOUNDS) -> Record:
    """One tick."""
    return make("demo/chat", sourced(given), before or learned(NOW - 15), bounds, NOW)


def world(record: Record | None, *, mode: str = "Auto", later: float = 42, spec: dict[str, Any] | None = None, **pool: Any) -> Seen:
    """What the status of both pools says after a tick, some seconds later."""
    pools: dict[Any, Any] = {}
    for role in ROLES:
        status: dict[str, Any] = {
            "replicas": 2,
            "readyReplicas": 2,
            "desiredReplicas": 2,
            "learned": {"leadTime": "p50 31s, p90 44s"},
        }
        if record is not None:
            answer = record.decision.of(role)
            made = datetime.fromtimestamp(NOW - 600, UTC).isoformat()
            status |= {"desiredReplicas": answer.desired, "record": record.line()}
            status["lastDecision"] = {"time": made, "message": sentence(answer)}
        pools[role] = {"spec": {"replicas": 2, "minReplicas": 1, "maxReplicas": 16}, "status": status | pool}
    given = SCALING | {"scaling": SCALING["scaling"] | {"mode": mode}} if mode != "Static" else {}
    return replace(
        seen(spec={**given, **(spec or {})}, pools=pools), now=datetime.fromtimestamp(NOW, UTC) + timedelta(seconds=later)
    )


GATED = decide(replace(FULL, slices=SLICES), learned(NOW - 30), BOUNDS, NOW - 15).learned
WORLDS: dict[str, Seen] = {
    "auto": world(tick(readings(running=330.0, kv_tokens=330_000.0))),
    "rises": world(tick(readings(running=500.0, kv_tokens=500_000.0))),
    "gated": world(tick(replace(FULL, slices=SLICES), GATED)),
    "limited": world(tick(readings(running=900.0, kv_tokens=900_000.0), bounds=replace(BOUNDS, max_gpus=5))),
    "cooldown": world(tick(readings(running=10.0, kv_tokens=10_000.0), learned(NOW - 15, d=long_ago(3, NOW)))),
    "no-capacity": world(tick(readings(running=900.0, kv_tokens=900_000.0, decode=replicas(2, ready=1, blocked=1)))),
    "unknown": world(tick(readings(running=LOST, handoff_waiting=LOST))),
    "first": world(tick(readings(prefill_rate=0.0, prefill_seconds=0.0, prompt_rate=0.0, running=0.0, kv_tokens=0.0), Learned())),
    "advisory": world(tick(readings(running=500.0, kv_tokens=500_000.0)), mode="Advisory"),
    "external": world(tick(readings(running=500.0, kv_tokens=500_000.0)), mode="External"),
    "static": world(None, mode="Static"),
    "suspended": world(tick(readings()), spec={"suspend": True}),
    "nothing-yet": world(None),
}


@cache
def told_of(name: str) -> Explanation:
    """The explanation of a world, made once: it asks `decide` some hundred times."""
    return explain(WORLDS[name])


@pytest.mark.parametrize("name", WORLDS)
def test_worlds(name: str) -> None:
    shown, path = text(told_of(name), terminal.Paint(False)), GOLDEN / f"explain-{name}.txt"
    if UPDATE:
        path.write_text(shown)
    assert path.read_text() == shown, f"{path.name} differs; if that is meant: UPDATE_GOLDEN=1 pytest {__file__}"
    assert re.sub(r"\x1b\[[0-9;]*m", "", text(told_of(name), terminal.Paint(True))) == shown


def test_no_golden_file_is_left_over() -> None:
    assert {p.stem for p in GOLDEN.glob("explain-*.txt")} == {f"explain-{name}" for name in WORLDS}


@pytest.mark.parametrize("name", ["auto", "rises", "gated", "limited", "cooldown", "no-capacity", "unknown", "first"])
def test_what_is_told_is_the_recorded_decision(name: str) -> None:
    told = told_of(name)
    assert told.record is not None and replay(told.line) == [] and told.warnings == ()
    again = decide(told.record.readings, told.record.learned, told.record.bounds, told.record.now, told.record.law)
    assert again == told.record.decision


def test_of_two_records_the_newer_counts() -> None:
    old, new = tick(readings()), tick(readings(running=500.0, kv_tokens=500_000.0))
    there = world(replace(new, now=NOW + 15))
    there.pools["prefill"]["status"]["record"] = old.line()
    told = explain(there)
    assert told.record is not None and told.record.now == NOW + 15 and told.age == 27
    assert any("the record says" in w for w in explain(world(old, desiredReplicas=7)).warnings)


def test_a_record_of_another_version_says_so() -> None:
    line = tick(readings()).line()
    strange = explain(stored(line.replace('"format":1', '"format":2')))
    assert strange.record is None and "format is 2: accepted is 1" in strange.why_not
    data = json.loads(line)
    data["decision"]["decode"]["desired"] = 9
    other = explain(stored(json.dumps(data)))
    assert "this program decides otherwise than the operator did (decision.decode.desired: recorded 9, now 2)" in other.warnings[0]


def test_a_decision_without_its_record_says_so() -> None:
    """An operator of an older version, or a record that was too long."""
    there = world(None, lastDecision={"message": "2 -> 3 (Demand)"})
    assert "without its record" in explain(there).why_not
    assert "2 -> 3 (Demand)" in text(explain(there), terminal.Paint(False))


def stored(line: str) -> Seen:
    """A world with this line in both pools."""
    there = world(None)
    for obj in there.pools.values():
        obj["status"]["record"] = line
    return there


def test_what_cannot_be_read_is_named() -> None:
    there = replace(WORLDS["auto"], pools={}, unread={"pools": "the right to get pdpools.pdserve.dev in namespace demo is missing"})
    told = explain(there)
    assert told.record is None and "the right to get pdpools.pdserve.dev" in told.warnings[0]
    gone = explain(replace(WORLDS["auto"], pools={}))
    assert gone.warnings == ("PDPool chat-prefill does not exist", "PDPool chat-decode does not exist")
    assert "PDPool chat-decode does not exist" in text(gone, terminal.Paint(False))


def command(monkeypatch: pytest.MonkeyPatch, there: Seen, *argv: str) -> int:
    async def see(kubeconfig: str | None, namespace: str | None, name: str, *, pods: bool) -> Seen:
        assert not pods
        return there

    monkeypatch.setattr(reading, "see", see)
    return plugin.main(["explain", "chat", *argv])


def test_json_is_a_record_that_replays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command(monkeypatch, WORLDS["gated"], "-o", "json") == 0
    file = tmp_path / "chat.jsonl"
    file.write_text(capsys.readouterr().out)
    assert simulate.main(["replay", str(file)]) == 0
    assert command(monkeypatch, WORLDS["gated"]) == 0
    assert "GatedByDecode" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["static", "nothing-yet"])
def test_json_without_a_record(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, WORLDS[name], "-o", "json") == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "demo/chat has no record" in printed.err
    assert command(monkeypatch, WORLDS[name]) == 0
