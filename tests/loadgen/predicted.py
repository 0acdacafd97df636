"""The simulator fed with what a live run was: its requests, the stand-in's step times, the replicas that were ready when."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.pod import Seen
from pd_operator.core.names import ROLES, Role
from pd_simulate import profiles, traces
from pd_simulate.fleet import Fleet, LeadTime, Router, Slo
from pd_simulate.result import Result
from pd_simulate.simulation import simulate
from pd_simulate.view import Targets, View
from standin.settings import StepLaw

CONTEXTS = (64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8)
TICK = 0.5  # seconds between two looks at what was ready

Counts = Mapping[Role, Sequence[tuple[float, int]]]  # (seconds since 1970, replicas from then on), in order


@dataclass(frozen=True)
class Engines:
    """The laws of both roles' stand-ins and their sizes: what a user measures of an engine and gives as a table."""

    prefill: StepLaw
    decode: StepLaw
    seats: int  # --max-num-seqs of decode
    step_tokens: int  # --max-num-batched-tokens of prefill
    kv_tokens: int
    kv_bytes: int = 512

    def table(self, path: Path) -> Path:
        """Write the step times as `pdd-simulate --profile` reads them."""
        sizes = {"kv_capacity": self.kv_tokens, "kv_bytes_per_token": self.kv_bytes, "max_num_seqs": self.seats}
        rows: list[dict[str, object]] = []
        for tokens in CONTEXTS:
            seconds = self.prefill.prefill_base + self.prefill.prefill_per_token * tokens
            rows.append({"phase": "prefill", "context_tokens": tokens, "batch_size": 1, "latency_ms": 1000 * seconds, **sizes})
            for batch in BATCHES:
                law = self.decode
                seconds = law.decode_base + batch * (law.decode_per_request + law.decode_per_context_token * tokens)
                row = {"phase": "decode", "context_tokens": tokens, "batch_size": batch, "latency_ms": 1000 * seconds}
                rows.append({"config": "standin", **row, **sizes})
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["config", "phase", "context_tokens", "batch_size", "latency_ms", *sizes])
            writer.writeheader()
            writer.writerows({"config": "standin", **row} for row in rows)
        return path


@dataclass(slots=True)
class AsRecorded:
    """A policy that has what was ready at each moment of the run."""

    counts: Counts
    begin: float
    name: str = "recorded"
    tick: float = field(default=TICK)

    def decide(self, view: View) -> Targets:
        """What was ready then."""
        return Targets(*(at(self.counts[role], self.begin + view.now) for role in ROLES))


def at(counts: Sequence[tuple[float, int]], moment: float) -> int:
    """The count at a moment; before the first one, that one."""
    return next((count for since, count in reversed(counts) if since <= moment), counts[0][1])


def predict(requests: Sequence[Seen], engines: Engines, counts: Counts, slo: Slo, folder: Path) -> Result:
    """Simulate the run from files, as the command reads them."""
    trace = folder / "live.csv"
    with trace.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arrival", "prompt", "output"])
        writer.writerows((f"{r.begin - requests[0].begin:.6f}", r.prompt_tokens, r.tokens) for r in requests)
    begin = requests[0].begin
    first = {role: at(counts[role], begin) for role in ROLES}
    fleet = Fleet(
        profile=profiles.fit(engines.table(folder / "steps.csv")).profile,
        prefill=first["prefill"],
        decode=first["decode"],
        slo=slo,
        lead_prefill=LeadTime(0.0, 0.0),  # what is recorded is when they were ready
        lead_decode=LeadTime(0.0, 0.0),
        router=Router("round_robin", pairs="arrival"),
        step_tokens=engines.step_tokens,
        lease=600.0,  # decode renews the lease of what it queues
        warmup=0.0,
    )
    return simulate(traces.read(trace), fleet, AsRecorded(counts, begin), seed=0)
