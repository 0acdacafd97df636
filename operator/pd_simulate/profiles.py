"""Step-time profiles: fitted coefficients that ship with the package, and fits of a table of one's own.

`python -m pd_simulate.profiles TABLE.csv` prints the error on held-out points per configuration; with `--write` it writes the
coefficients of the configurations in SIZES to data/profiles.json, which is what ships (made from aiconfigurator 0.12.0).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pd_simulate.view import Profile

SHIPPED = "data/profiles.json"
# vLLM's default of --max-num-seqs.
MAX_NUM_SEQS = 256


@dataclass(frozen=True)
class Sizes:
    """`gpus` of one replica, `kv_bytes` of one token of context, KV `capacity` in tokens."""

    gpus: int
    kv_bytes: int
    capacity: int


def _sizes(gpus: int, memory: float, weights: float, kv_bytes: int, copies: int = 1) -> Sizes:
    """KV gets 90 % of the GPUs' memory (vLLM's default) less the weights, in bytes; `copies` of each token's KV are kept."""
    return Sizes(gpus, kv_bytes, int((0.9 * memory * gpus - weights) / (kv_bytes * copies)))


# Memory: 80 GB (H100), 141 GB (H200). Weights: parameters x 2 bytes, 1 for FP8. KV bytes per token: facts/autoscaling.md 4.4.
# DeepSeek-V3 with TP8 keeps the latent KV on each of the 8 ranks.
SIZES = {
    "L8B-H100-TP1": _sizes(1, 80e9, 16.1e9, 131_072),
    "L8B-H200-TP1": _sizes(1, 141e9, 16.1e9, 131_072),
    "L70B-H100-TP4": _sizes(4, 80e9, 141.2e9, 327_680),
    "L70B-H200-TP4": _sizes(4, 141e9, 141.2e9, 327_680),
    "L70B-FP8-H200-TP2": _sizes(2, 141e9, 70.6e9, 327_680),
    "Q32B-H100-TP2": _sizes(2, 80e9, 65.6e9, 262_144),
    "DSV3-H200-TP8": _sizes(8, 141e9, 685e9, 70_272, copies=8),
}


@dataclass(frozen=True)
class Fit:
    """A fitted profile and the absolute relative errors on points held out (steptime.held_out)."""

    profile: Profile
    prefill_errors: tuple[float, ...]
    decode_errors: tuple[float, ...]

    def lines(self) -> list[str]:
        """What a person reads: mean (MAPE) and worst error per phase, in per cent."""
        rows = []
        for phase, errors in (("prefill", self.prefill_errors), ("decode", self.decode_errors)):
            mean = 100 * sum(errors) / len(errors) if errors else float("nan")
            worst = 100 * max(errors, default=float("nan"))
            rows.append(
                f"{self.profile.name:20} {phase:8} {len(errors):3} points held out: MAPE {mean:5.2f} %, worst {worst:5.2f} %"
            )
        return rows


@cache
def _shipped() -> dict[str, Profile]:
    text = resources.files("pd_simulate").joinpath(SHIPPED).read_text(encoding="utf-8")
    return {name: _profile(name, values) for name, values in json.loads(text).items()}


def _profile(name: str, values: Mapping[str, Any]) -> Profile:
    knots = tuple((float(b), float(alpha), float(beta)) for b, alpha, beta in values["knots"])
    return Profile(name, **{**values, "knots": knots})


def names() -> tuple[str, ...]:
    """Profiles that ship."""
    return tuple(_shipped())


def get(name: str) -> Profile:
    """A shipped profile, e.g. `L8B-H200-TP1` (Llama-3.1-8B on one H200). Raises ValueError for other names."""
    if name not in _shipped():
        raise ValueError(f"profile: {name!r}; accepted: {', '.join(names())}")
    return _shipped()[name]


def fit(path: Path, config: str = "") -> Fit:
    """The profile of a table of step times (steptime.COLUMNS; `config` picks one of several).

    A configuration that is not in SIZES needs the columns kv_capacity (tokens), kv_bytes_per_token and, if not 1, tp (GPUs of a
    replica); max_num_seqs is optional. Raises steptime.ProfileError, a ValueError.
    """
    from pd_simulate import steptime  # noqa: PLC0415  (scipy is only needed to fit)

    table = steptime.read(path)
    configs = sorted({key for key, _ in table.points})
    if config not in configs and (config or len(configs) != 1):
        raise steptime.ProfileError(f"{path.name}: config {config!r}; accepted: one of {', '.join(configs)}")
    return _fit(path, table, config or configs[0])


def _fit(path: Path, table: Any, config: str) -> Fit:
    from pd_simulate import steptime  # noqa: PLC0415

    phases = {}
    for phase in ("prefill", "decode"):
        if (config, phase) not in table.points:
            raise steptime.ProfileError(f"{path.name}: {config} has no rows of phase {phase}; accepted: rows of both phases")
        phases[phase] = table.points[config, phase]
    sizes, seats = _facts(path, config, table.facts[config])
    prefill = steptime.fit_prefill(phases["prefill"])
    d, e, f = (float(one) for one in steptime.fit_straight(phases["decode"]))
    knots = steptime.knots_of(phases["decode"])
    profile = Profile(
        config,
        a=prefill.a,
        b=prefill.b,
        c=prefill.c,
        d=d,
        e=e,
        f=f,
        kv_capacity=sizes.capacity,
        prefill_kv_capacity=sizes.capacity,
        max_num_seqs=seats,
        kv_bytes_per_token=sizes.kv_bytes,
        gpus_prefill=sizes.gpus,
        gpus_decode=sizes.gpus,
        floor=prefill.floor,
        knots=steptime.fit_knots(phases["decode"], knots) if len(knots) else (),
    )
    errors = {phase: tuple(float(one) for one in steptime.held_out(phase, points)) for phase, points in phases.items()}
    return Fit(profile, errors["prefill"], errors["decode"])


def _facts(path: Path, config: str, given: Mapping[str, str]) -> tuple[Sizes, int]:
    from pd_simulate.steptime import ProfileError  # noqa: PLC0415

    def whole(field: str, default: int | None) -> int:
        value = given.get(field, default)
        if value is None or not str(value).isdigit() or int(value) < 1:
            raise ProfileError(f"{path.name}: {config}, column {field}: {value!r}; accepted: a whole number above 0")
        return int(value)

    known = SIZES.get(config)
    gpus = whole("tp", known.gpus if known else 1)
    kv_bytes = whole("kv_bytes_per_token", known.kv_bytes if known else None)
    capacity = whole("kv_capacity", known.capacity if known else None)
    return Sizes(gpus, kv_bytes, capacity), whole("max_num_seqs", MAX_NUM_SEQS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit a table, print the errors, and with --write keep the coefficients."""
    parser = argparse.ArgumentParser(
        prog="python -m pd_simulate.profiles", description="Fit step times, print the error on held-out points."
    )
    parser.add_argument("table", type=Path, help="CSV (or .csv.gz): config, phase, context_tokens, batch_size, latency_ms")
    parser.add_argument("--write", type=Path, help="write the coefficients of all configurations to this JSON file")
    options = parser.parse_args(arguments)
    from pd_simulate import steptime  # noqa: PLC0415

    try:
        table = steptime.read(options.table)
        fits = [_fit(options.table, table, config) for config in sorted({key for key, _ in table.points})]
    except (OSError, ValueError) as exc:
        print(exc, file=sys.stderr)
        return 1
    print("\n".join(line for one in fits for line in one.lines()))
    if options.write:
        rows = {one.profile.name: {k: v for k, v in asdict(one.profile).items() if k != "name"} for one in fits}
        options.write.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
