"""Matrix: a YAML file of blocks, each a product of lists, and the cells it stands for. `smoke` and `full` ship."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from pd_simulate.cell import Cell, Sweep
from pd_simulate.scenario import DEFAULT_PROFILE, SHOCKS
from pd_simulate.units import InputError, seconds

SHIPPED = ("smoke", "full")
LONG_PROMPTS = ("mooncake", "mix")  # `slo: auto` takes the class `long` for these, `chat` for others
Duration = Annotated[str, Field(max_length=20)]


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class Tuning(_Model):
    """Equal tuning budget: random configurations of each policy's own tunables, run on the first half, before the comparison."""

    configurations: int = Field(default=20, ge=1, le=100)
    requests: int = Field(default=20_000, ge=100, le=60_000)
    attainment: float = Field(default=0.95, gt=0, lt=1)


class Block(_Model):
    """One product. `policies: all` are those of the registry; `knobs` is how many values of each policy's own headroom knob, and
    `lower` how many below them.
    """

    traces: list[str] = Field(min_length=1, max_length=50)
    policies: list[str] | Literal["all"] = "all"
    exclude: list[str] = []
    knobs: int = Field(default=5, ge=0, le=5)
    lower: int = Field(default=0, ge=0, le=2)
    seeds: int = Field(default=10, ge=1, le=100)
    budgets: list[Annotated[int, Field(ge=2, le=1024)]] = Field(default=[32], min_length=1)
    admission: list[Literal["none", "ours"]] = Field(default=["none"], min_length=1)
    shocks: list[str] = Field(default=["none"], min_length=1)
    half: Literal["all", "first", "second"] = "second"
    span: Duration = "0s"
    requests: int = Field(default=60_000, ge=1, le=60_000)
    load: float = Field(default=0.7, ge=0, le=3)
    profile: str = DEFAULT_PROFILE
    slo: str = "auto"
    lead_time: Duration = "60s"
    tuning: Tuning | None = None


class Matrix(_Model):
    """The whole file."""

    name: str = Field(min_length=1, max_length=100)
    note: str = ""
    left_out: list[str] = []  # what this matrix leaves out and why: stands in the report
    blocks: list[Block] = Field(min_length=1, max_length=50)


def shipped(name: str) -> Matrix:
    """A matrix that ships, by its name."""
    return parse((resources.files("pd_simulate") / "matrices" / f"{name}.yaml").read_text(), name)


def read(path: Path) -> Matrix:
    """A user's matrix. Raises InputError."""
    try:
        text = path.read_text()
    except OSError as exc:
        raise InputError(f"--matrix {path}: {exc.strerror}; accepted is a YAML file (see docs/simulate/index.md)") from exc
    return parse(text, str(path))


def parse(text: str, source: str) -> Matrix:
    """The matrix of a YAML text. Raises InputError that names each field, its value and what is accepted."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise InputError(f"{source}: not YAML: {exc}") from exc
    try:
        matrix = Matrix.model_validate(values)
    except ValidationError as exc:
        raise InputError("; ".join(_explain(source, error) for error in exc.errors())) from exc
    for number, block in enumerate(matrix.blocks):
        if not block.knobs + block.lower:
            raise InputError(
                f"{source}: blocks.{number}.knobs 0 without `lower`: accepted are 1 to 5, or 0 with a `lower` of 1 or 2"
            )
        if unknown := [name for name in block.shocks if name not in SHOCKS]:
            raise InputError(f"{source}: blocks.{number}.shocks {unknown[0]!r}: accepted are {', '.join(SHOCKS)}")
        seconds(block.lead_time, f"{source}: blocks.{number}.leadTime")
        seconds(block.span, f"{source}: blocks.{number}.span")
    return matrix


def _explain(source: str, error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "the file"
    shown = repr(error["input"])
    return f"{source}: {where} {shown if len(shown) < 60 else shown[:57] + '...'}: {error['msg']}"


def knob_values(sweep: Sweep, count: int, lower: int = 0) -> list[float | None]:
    """`count` of the policy's knob values, ends included, evenly chosen; one = the middle. [None] when it has no knob.

    Before them `lower` of the values that lie below, lowest headroom first.
    """
    if not sweep.knobs:
        return [None]
    below, last = sweep.lower[:lower][::-1], len(sweep.knobs) - 1
    if count < 2:
        return [*below, *sweep.knobs[last // 2 : last // 2 + count]]
    chosen = {round(index * last / (count - 1)) for index in range(count)}
    return [*below, *(sweep.knobs[index] for index in sorted(chosen))]


def cells(matrix: Matrix, registry: Sequence[Sweep], chosen: Callable[[Cell], Cell] = lambda cell: cell) -> list[Cell]:
    """The cells, block after block without repetition, those of one workload side by side.

    `chosen` puts in the settings found by tuning.

    Raises InputError for a policy that the registry lacks.
    """
    found: dict[str, Cell] = {}
    for block in matrix.blocks:
        product = sorted(_product(block, registry), key=lambda pair: _order(*pair))
        made = [chosen(cell) if block.tuning else cell for cell, _ in product]
        for cell in made:
            found.setdefault(cell.key(), cell)
    return list(found.values())


def _order(cell: Cell, sweep: Sweep) -> tuple[str, str, int, int, str, int, str]:
    """Knob values of one policy lie apart, so that the search of one static split is done before the next one asks for it."""
    knob = sweep.knobs.index(cell.knob) if cell.knob in sweep.knobs else 0
    return (cell.trace, cell.shock, cell.budget, cell.seed, cell.admission, knob, cell.policy)


def tunings(matrix: Matrix, registry: Sequence[Sweep]) -> list[tuple[Cell, Tuning]]:
    """For each policy and scenario that is tuned: the cell of its training half, with default settings and the middle knob."""
    found: dict[str, tuple[Cell, Tuning]] = {}
    for block in matrix.blocks:
        if block.tuning is None:
            continue
        for cell, sweep in _product(block, registry):
            base = training(cell, block.tuning, sweep)
            found.setdefault(base.key(), (base, block.tuning))
    return list(found.values())


def training(cell: Cell, tuning: Tuning, sweep: Sweep) -> Cell:
    """The training cell that a cell of the comparison takes its settings from: first half, no shock, no admission, seed 1000."""
    middle = knob_values(sweep, 1)[0]
    changes = {"knob": middle, "seed": 1000, "admission": "none", "shock": "none", "half": "first", "settings": ()}
    values = {name: getattr(cell, name) for name in Cell.__slots__}
    return Cell(**{**values, **changes, "requests": tuning.requests, "purpose": "tune"})


def _product(block: Block, registry: Sequence[Sweep]) -> list[tuple[Cell, Sweep]]:
    known = {sweep.name: sweep for sweep in registry}
    wanted = list(known) if block.policies == "all" else block.policies
    for name in (*wanted, *block.exclude):
        if name not in known:
            raise InputError(f"policy {name!r}: accepted are {', '.join(known)}")
    answer = []
    for trace, shock, budget, seed, admission, name in itertools.product(
        block.traces, block.shocks, block.budgets, range(block.seeds), block.admission, wanted
    ):
        if name in block.exclude:
            continue
        for knob in knob_values(known[name], block.knobs, block.lower):
            cell = Cell(
                trace=trace,
                policy=name,
                knob=knob,
                seed=seed,
                budget=budget,
                admission=admission,
                shock=shock,
                half=block.half,
                span=seconds(block.span, "span"),
                requests=block.requests,
                load=block.load,
                profile=block.profile,
                slo=slo_class(trace) if block.slo == "auto" else block.slo,
                lead_time=seconds(block.lead_time, "leadTime"),
                digest=digest(trace),
            )
            answer.append((cell, known[name]))
    return answer


def slo_class(trace: str) -> str:
    """The SLO class that `auto` stands for."""
    return "long" if trace.startswith(LONG_PROMPTS) else "chat"


def digest(trace: str) -> str:
    """A hash of a trace file's content, "" for a built-in name."""
    path = Path(trace)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ""
