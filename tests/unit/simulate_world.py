"""Small worlds for the simulator's tests: plain engines, policies that hold or move about, workloads written by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

from pd_simulate.fleet import Fleet, Link, Scrape, Slice, Slo
from pd_simulate.view import Profile, Targets, View
from pd_simulate.workload import Workload

# 1,000 tokens/s of prefill, 10 ms a decode step whatever is in it, room for all: times can be computed by hand.
PLAIN = Profile("plain", 0.0, 1e-3, 0.0, 0.010, 0.0, 0.0, 10_000_000, 10_000_000, 1_000, 1)
# The shape of a real one: steps grow with requests and context.
REAL = Profile("real", 3.35e-3, 18.03e-6, 520e-12, 4.96e-3, 0.012e-3, 29.4e-9, 384_000, 384_000, 256, 131_072)
# Transfers that take no time, scrapes that lose nothing, an SLO that nothing breaks.
AT_ONCE = (Slice(link=Link(bandwidth=1e18, setup=0.0)),)
EXACT = Scrape(interval=15.0, jitter=0.0, loss=0.0)
ENDLESS = Slo(1e6, 0.0, 1e6)


class Hold:
    """Always the same counts; keeps the views it was shown."""

    name = "hold"
    tick = 15.0

    def __init__(self, prefill: int, decode: int, convertible: int = 0) -> None:
        self.targets = Targets(prefill, decode, "hold", convertible)
        self.views: list[View] = []

    def decide(self, view: View) -> Targets:
        self.views.append(view)
        return self.targets


class Script:
    """Counts by time: the last entry that has begun."""

    name = "script"
    tick = 5.0

    def __init__(self, *steps: tuple[float, int, int]) -> None:
        self.steps = steps
        self.views: list[View] = []

    def decide(self, view: View) -> Targets:
        self.views.append(view)
        _, prefill, decode = [step for step in self.steps if step[0] <= view.now][-1]
        return Targets(prefill, decode)


class Wild:
    """Random counts, beyond the bounds too, by seed."""

    name = "wild"
    tick = 5.0

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def decide(self, view: View) -> Targets:
        return Targets(self.random.randint(0, 5), self.random.randint(0, 6), convertible=self.random.randint(0, 1))


def fleet(profile: Profile = PLAIN, **settings: Any) -> Fleet:
    """One P and one D, nothing in the way; settings replace."""
    base = Fleet(profile, prefill=1, decode=1, slices=AT_ONCE, scrape=EXACT, slo=ENDLESS, warmup=0.0, budget=64)
    return replace(base, **settings)


def work(*requests: tuple[float, int, int], **changes: Any) -> Workload:
    """(arrival, prompt, output) of each request, in order."""
    arrival, prompt, output = (np.array(column) for column in zip(*requests, strict=True))
    made = Workload("hand", arrival.astype(float), prompt.astype(np.int64), output.astype(np.int64), float(arrival[-1]) + 1.0)
    return replace(made, **changes)
