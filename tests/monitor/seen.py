"""What podScrape sees of pods whose pages are given, without any network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from monitor.pods import Pod, deployment
from pd_operator.signals import exposition
from pd_operator.signals.fleet import Deployment, Target
from pd_operator.signals.formulas import load
from pd_operator.signals.group import Group, from_windows, group_key
from pd_operator.signals.load import Load
from pd_operator.signals.window import Columns, Window


def windows(history: Sequence[Sequence[Pod]], step: float = 5.0) -> dict[Target, Window]:
    """A window of every pod, scraped every `step` seconds, the last time at 1,000."""
    found: dict[Target, Window] = {}
    columns: dict[str, Columns] = {}
    for n, pods in enumerate(history):
        for pod in pods:
            target = pod.target()
            reader = exposition.reader(target.program, target.version)
            assert reader is not None
            key = (target.namespace, target.pod)
            made = next((w for t, w in found.items() if (t.namespace, t.pod) == key), None)
            if made is None:
                made = Window(reader.table, columns.setdefault(target.program + target.version, Columns()), 30.0, step)
            found[target] = made
            made.add(1000.0 - step * (len(history) - 1 - n), reader.read(pod.page()))
    return found


def seen(
    history: Sequence[Sequence[Pod]],
    now: float = 1001.0,
    fleet: Deployment | None = None,
    percentile: int = 95,
    step: float = 5.0,
    patience: float = 17.5,
) -> Load:
    """The load of these pods, each row one scrape; `fleet` names pods that never answered as well."""
    made = {(t.namespace, t.pod): w for t, w in windows(history, step).items()}
    fleet = fleet or deployment(*history[-1], percentile=percentile)
    groups: dict[Any, Group] = {}
    for key in {group_key(t) for t in fleet.targets}:
        members = [(t, made.get((t.namespace, t.pod)), "refused") for t in fleet.targets if group_key(t) == key]
        groups[key] = from_windows(members, now, fleet.percentile, patience=patience)
    return load(fleet, groups)


def busy(scrapes: int = 3, **changes: Any) -> list[list[Pod]]:
    """Scrapes, 5 s apart, of 1 P, 1 D, 1 router: 4 requests/s of 500 uncached tokens, 20 decoding. `changes` are by side."""
    rows = []
    for n in range(scrapes):
        p = Pod("prefill", computed=5000 + 10_000 * n, prefills=10 + 20 * n, prefill_seconds=2 + 4 * n, waiting=3, running=1)
        p = p.but(first_tokens={0.5: 20.0 * n, math.inf: 20.0 * n}, first_token_seconds=6.0 * n)
        d = Pod(
            "decode", running=20, usage=0.5, fetching={"waiting_to_start": 2, "in_progress": 1, "completed_waiting": 1}, waiting=5
        )
        d = d.but(first_tokens={0.1: 18.0 * n, 0.5: 20.0 * n}, first_token_seconds=1.0 * n, gaps=1000 * n, gap_seconds=30.0 * n)
        d = d.but(outputs=20 * n, output_tokens=6000 * n)
        r = Pod("router", offered=100 + 20 * n, queued=1)
        rows.append([one.but(**changes.get(one.side, {})) for one in (p, d, r)])
    return rows
