"""Record: one decision with everything it was made from, as one line of JSON that replays to the same bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from pd_operator.core.scaling import codec
from pd_operator.core.scaling.bounds import Bounds
from pd_operator.core.scaling.decide import decide
from pd_operator.core.scaling.decision import Decision
from pd_operator.core.scaling.law import DEFAULT, Law
from pd_operator.core.scaling.learned import Learned
from pd_operator.core.scaling.readings import Readings

FORMAT = 1  # of the line; another number is refused


@dataclass(frozen=True, slots=True)
class Record:
    """One decision. `name` is namespace/name of the PDDeployment, for people."""

    now: float
    readings: Readings
    learned: Learned
    bounds: Bounds
    decision: Decision
    law: Law = field(default_factory=Law)  # all switches off: DEFAULT may change, what an older line means may not
    name: str = ""
    format: int = 0

    def line(self) -> str:
        """One line of JSON, without a line end. Raises ValueError on a number that JSON has no word for."""
        return codec.dumps(self)


def make(name: str, readings: Readings, learned: Learned, bounds: Bounds, now: float, law: Law = DEFAULT) -> Record:
    """Decide, and keep what the decision was made from."""
    readings = readings.clean()
    return Record(now, readings, learned, bounds, decide(readings, learned, bounds, now, law), law, name, FORMAT)


def parse(line: str) -> Record:
    """The record of a line. Raises ValueError naming what does not fit."""
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a line of JSON: {error}") from error
    form = data.get("format") if isinstance(data, dict) else None
    if form != FORMAT:
        raise ValueError(f"format is {form!r}: accepted is {FORMAT}")
    return codec.decode(Record, data)


def replay(line: str) -> list[str]:
    """Decide again from a line; the differences, one each, none when the answer is the same byte for byte."""
    record = parse(line)
    again = decide(record.readings, record.learned, record.bounds, record.now, record.law)
    if codec.dumps(again) == codec.dumps(record.decision):
        return []
    return _differences(codec.encode(record.decision), codec.encode(again), "decision")


def _differences(before: object, after: object, path: str) -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() | after.keys())
        return [d for k in keys for d in _differences(before.get(k), after.get(k), f"{path}.{k}")]
    return [] if before == after else [f"{path}: recorded {json.dumps(before)}, now {json.dumps(after)}"]
