"""Replay: recorded decisions, decided again by today's law; the first that differs is shown with all its inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pd_operator.core.scaling import record
from pd_operator.core.scaling.explain import explain


@dataclass(frozen=True, slots=True)
class Replayed:
    """Decisions that agreed before the first that did not; `difference` is that one, in lines for people."""

    agreed: int
    difference: tuple[str, ...] = ()


def replay(lines: Iterable[str]) -> Replayed:
    """Decide every line again, to the first difference. Blank lines are skipped.

    Raises ValueError that names the line and what does not fit.
    """
    agreed = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            differences = record.replay(line)
        except ValueError as exc:
            raise ValueError(f"line {number}: {exc}") from exc
        if differences:
            return Replayed(agreed, tuple(_describe(number, line, differences)))
        agreed += 1
    return Replayed(agreed)


def _describe(number: int, line: str, differences: list[str]) -> list[str]:
    item = record.parse(line)
    recorded, again = item.decision, record.make(item.name, item.readings, item.learned, item.bounds, item.now, item.law).decision
    name = f" of {item.name}" if item.name else ""
    return [
        f"line {number}: the decision{name} at {item.now:g} s differs",
        *(f"  {text}" for text in differences),
        f"recorded: prefill {recorded.prefill.desired}, decode {recorded.decode.desired}",
        *(f"  {text}" for text in explain(recorded, item.bounds, item.law)),
        f"now: prefill {again.prefill.desired}, decode {again.decode.desired}",
        *(f"  {text}" for text in explain(again, item.bounds, item.law)),
        "readings:",
        *(f"  {name}: {value}" for name, value in _inputs(item)),
    ]


def _inputs(item: record.Record) -> list[tuple[str, object]]:
    readings = [(name, getattr(item.readings, name)) for name in item.readings.__dataclass_fields__]
    return [*readings, ("learned", item.learned), ("bounds", item.bounds)]
