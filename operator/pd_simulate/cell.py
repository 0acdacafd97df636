"""Cell: the settings of one simulated run, their key, and the row of a results file that says what came of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Half = Literal["all", "first", "second"]
Admission = Literal["none", "ours"]


@dataclass(frozen=True, slots=True)
class Cell:
    """All that decides a run. Two cells with equal fields give equal results (the code being the same)."""

    trace: str  # a built-in name or a file
    policy: str
    knob: float | None = None  # value of the policy's own headroom knob; None = its default
    seed: int = 0
    budget: int = 32  # GPUs
    admission: Admission = "none"  # ours = with the operator's limits at router and engines, whatever the policy
    shock: str = "none"
    half: Half = "all"  # which half of the trace
    span: float = 0.0  # seconds: only the busiest stretch of that length of it; 0 = all of it
    requests: int = 60_000  # at most so many requests of it
    load: float = 0.7  # share of the budget that a static split needs at the peak: scales the rate; 0 = the trace's own rate
    profile: str = ""
    slo: str = "chat"
    lead_time: float = 60.0  # mean seconds from ordering a replica to its being Ready
    settings: tuple[tuple[str, float | str], ...] = ()  # further tunables of the policy, by name
    purpose: Literal["compare", "tune"] = "compare"
    digest: str = ""  # of the file's content when the trace is a file

    @property
    def scenario(self) -> str:
        """What is equal for every policy that is compared: all but policy, knob, seed and settings."""
        return json.dumps([getattr(self, name) for name in SCENARIO])

    @property
    def title(self) -> str:
        """A short name for people."""
        knob = "" if self.knob is None else f" {self.knob:g}"
        shock = "" if self.shock == "none" else f"+{self.shock}"
        return f"{self.trace}{shock} {self.budget} GPUs {self.policy}{knob} seed {self.seed}"

    def key(self) -> str:
        """A hash of the settings: what a resumed comparison looks for."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:20]


SCENARIO = ("trace", "shock", "budget", "admission", "half", "span", "requests", "load", "profile", "slo", "lead_time", "digest")


def from_json(values: Mapping[str, Any]) -> Cell:
    """The cell that `asdict` and JSON made `values` of. Raises ValueError that names the field."""
    known = {field.name for field in fields(Cell)}
    if unknown := set(values) - known:
        raise ValueError(f"unknown fields {', '.join(sorted(unknown))} of a cell; known are {', '.join(sorted(known))}")
    if missing := {"trace", "policy"} - set(values):
        raise ValueError(f"a cell needs {', '.join(sorted(missing))}")
    settings = tuple((str(name), value) for name, value in values.get("settings", ()))
    return Cell(**{**values, "settings": settings})


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a comparison needs of one policy: the values of its headroom knob, lowest headroom first, and those that lie below."""

    name: str
    knobs: Sequence[float]
    lower: Sequence[float] = ()  # lowest headroom last: for where the lowest of `knobs` attains more than what is compared


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a results file: exactly one of `summary` and `error` is set."""

    cell: Cell
    summary: dict[str, Any] | None
    error: str | None
    seconds: float  # that the run took here
    code: str  # fingerprint of the simulator and the law that computed it

    def line(self) -> str:
        """The row as a JSON line."""
        values = {"key": self.cell.key(), **asdict(self)}
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=True) + "\n"


def row(values: Mapping[str, Any]) -> Row:
    """The row of a parsed JSON line. Raises ValueError or KeyError when it is not one."""
    return Row(from_json(values["cell"]), values["summary"], values["error"], float(values["seconds"]), str(values["code"]))
