"""Load: all signals of one PDDeployment at one instant; with the replicas of a snapshot it becomes the `Readings` of a tick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pd_operator.core.names import Role
from pd_operator.core.scaling.readings import UNKNOWN, Readings, Replicas, Signal, SliceHandoff, State


@dataclass(frozen=True, slots=True)
class Load:
    """The signals of `Readings`, by the same names and in the same units."""

    prompt_rate: Signal = UNKNOWN
    request_rate: Signal = UNKNOWN
    queued_tokens: Signal = UNKNOWN
    prefill_rate: Signal = UNKNOWN
    prefill_seconds: Signal = UNKNOWN
    running: Signal = UNKNOWN
    handoff_waiting: Signal = UNKNOWN
    decode_starts: Signal = UNKNOWN
    kv_tokens: Signal = UNKNOWN
    kv_capacity: Signal = UNKNOWN
    output_tokens: Signal = UNKNOWN
    itl: Signal = UNKNOWN
    prefill_latency: Signal = UNKNOWN
    ttft: Signal = UNKNOWN
    every_prefill_waiting: bool = False
    slices: tuple[SliceHandoff, ...] = ()
    requests: Mapping[str, Signal] = field(default_factory=dict)  # slice -> requests per second; no decision of the law reads it
    unread: Mapping[Role, int] = field(default_factory=dict)  # ready replicas that are too new to have been read

    def readings(self, prefill: Replicas, decode: Replicas, rollout: bool = False) -> Readings:
        """What a tick decides on: the load, and what the snapshot says of the replicas."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("requests", "unread")}
        prefill, decode = prefill.without(self.unread.get("prefill", 0)), decode.without(self.unread.get("decode", 0))
        return Readings(prefill=prefill, decode=decode, rollout=rollout, **values)

    def signals(self) -> dict[str, Signal]:
        """The signals by name."""
        return {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Signal)}


SIGNALS = tuple(Load().signals())


def nothing(why: str, slices: tuple[str, ...] = ()) -> Load:
    """A load of which nothing is known."""
    unknown: Any = Signal(State.UNKNOWN, source=why)
    handoffs = tuple(SliceHandoff(name, unknown, unknown) for name in slices)
    return replace(Load(slices=handoffs, requests=dict.fromkeys(slices, unknown)), **dict.fromkeys(SIGNALS, unknown))
