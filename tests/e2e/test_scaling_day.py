"""One deployment through the phases of a day: real kubelets, the real router, stand-in engines, a real Prometheus, AIPerf in a pod.

A burst of prompts, outputs three times as long, a load that falls while decode still waits for held KV. What is asserted stands in
the decision log, tick by tick; the simulator is given the same requests and must come to the same attainment.

With PDD_SOAK_MINUTES of 8 or more an evening follows, a burst and then next to no load: the pools go down as slowly as the law
says.

A phase begins when the log shows what the one before was for, and the decode replica that a shortage orders starts only when the
test lets it: no phase depends on how fast this machine is.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.handle import Cluster
from cluster.identity import Identity
from cluster.tools import tool
from demo import stack
from loadgen import Sent, Summary, running
from loadgen.lives import Lives
from loadgen.predicted import Engines, predict
from monitor.podmonitor import jobs
from monitor.prometheus import Prometheus
from opsrunner.api import Api
from pd_operator.core.names import ROLES
from pd_operator.core.scaling.decision import Bottleneck, Reason
from pd_operator.core.scaling.law import DEFAULT
from pd_operator.core.scaling.record import Record
from pd_simulate.cli import main as simulate
from pd_simulate.fleet import Slo
from served import Served
from served.day import HOLD, Day
from standin.core import DEFAULT_KV_TOKENS
from standin.settings import StepLaw
from traffic.load import prompt

SOAK = float(os.environ.get("PDD_SOAK_MINUTES", "0"))
pytestmark = pytest.mark.timeout(1200 + 60 * SOAK)
TICK = SCRAPE = 5  # seconds
WORDS = 270  # of a prompt, about 400 tokens: a second of prefill
TTFT, ITL = 6.0, 0.15  # seconds; spec.slo
BURST, SURGE = 30, 40  # prompts at once; the first is half a minute's work for the one prefill replica
OUTPUT = 30  # tokens, 1.5 s; three times as long from the second run on
RATE = 1.1  # requests a second at noon: 5 with long outputs in decode, and not two replicas of prefill busy
SEATS = 4  # requests that a decode replica runs
CHUNK = 512
COMPUTED = "vllm:request_success_total"  # of prefill: prompts
LAST = 5  # handoffs, of which more wait when prefill has to give a replica back
# Between the live attainment and the simulator's; twice that in the short form, where seven requests that end near the limit are 5.
POINTS = 0.05 if SOAK >= 8 else 0.1

PREFILL = StepLaw(prefill_per_token=0.0025)
DECODE = StepLaw(decode_base=0.05)
ENGINES = Engines(PREFILL, DECODE, SEATS, CHUNK, DEFAULT_KV_TOKENS)
SPEC: dict[str, Any] = {
    "prefill": {
        "args": [f"--max-num-batched-tokens={CHUNK}"],
        "env": [{"name": "STANDIN_PREFILL_PER_TOKEN_S", "value": str(PREFILL.prefill_per_token)}],
    },
    "decode": {
        "args": [f"--max-num-seqs={SEATS}"],
        "env": [{"name": "STANDIN_DECODE_BASE_S", "value": str(DECODE.decode_base)}],
        "template": {"spec": {"initContainers": [HOLD]}},
    },
}
SCALING = {"mode": "Auto", "prefill": {"maxReplicas": 2}, "decode": {"maxReplicas": 1}}  # of the morning


def evenly(begin: float, end: float, rate: float, tokens: int) -> list[Sent]:
    """Requests at equal distances."""
    return [Sent(begin + n / rate, "", tokens) for n in range(round((end - begin) * rate))]


def together(at: float, count: int, tokens: int) -> list[Sent]:
    """Requests within a second."""
    return [Sent(at + n / count, "", tokens) for n in range(count)]


def worded(first: int, *parts: Sequence[Sent]) -> list[Sent]:
    """The requests of all parts in order, each with a prompt that no cache has seen."""
    ordered = sorted((one for part in parts for one in part), key=lambda one: one.at)
    return [Sent(one.at, prompt(first + n, WORDS), one.tokens) for n, one in enumerate(ordered)]


BURST_AT, SURGE_AT, FALL_AT = 16.0, 36.0, 60.0
MORNING = worded(10**6, evenly(0, 34, 0.5, OUTPUT), together(BURST_AT, BURST, OUTPUT))
EVENING = worded(3 * 10**6, together(1, BURST, OUTPUT), evenly(10, 60 * SOAK, 0.5, OUTPUT))
NOON = worded(2 * 10**6, evenly(0, FALL_AT, RATE, 3 * OUTPUT), together(SURGE_AT, SURGE, 3 * OUTPUT))


@pytest.fixture(scope="module")
def prometheus(install: Cluster) -> Iterator[Prometheus]:
    """A Prometheus with the chart's monitors beside the cluster, and the operator that scales by it with a tick of 5 s;
    the other tests get the operator back as it was."""
    found: list[dict[str, Any]] = []
    for monitor in monitors():
        found += [job | {"scrape_interval": f"{SCRAPE}s"} for job in jobs(monitor, install.kubeconfig)]
    assert install.state is not None
    host = Identity(install.state).gateway(0)  # pods reach the bridges
    with Prometheus({"scrape_configs": found}, host=host) as server:
        source = f"signals.source=prometheus,signals.prometheus.url={server.url}"
        upgrade(install, f"{source},signals.tickSeconds={TICK}")
        yield server
        upgrade(install, "signals.source=podScrape,signals.prometheus.url=,signals.tickSeconds=15")


def monitors() -> list[dict[str, Any]]:
    """The chart's PodMonitors of what serves."""
    argv = [str(tool("helm")), "template", "pd-operator", str(stack.CHART), "--namespace", stack.INSTALL_NAMESPACE]
    argv += ["--set", "image.repository=example.org/pd-operator", "--set", "servingMonitors.enabled=true"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    return [document for document in yaml.safe_load_all(done.stdout) if document and document["kind"] == "PodMonitor"]


def upgrade(cluster: Cluster, setting: str) -> None:
    """Change chart values of the install."""
    arguments = ["upgrade", "pd-operator", str(stack.CHART), "--namespace", stack.INSTALL_NAMESPACE, "--reuse-values"]
    done = stack.helm(cluster, *arguments, "--set", setting, "--wait", "--timeout", "120s")
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("prometheus")
async def test_a_day_of_one_deployment(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served.apply(
        **SPEC,
        scaling=SCALING,
        router={"replicas": 1, "args": ["--policy", "round_robin"]},  # what the simulator does exactly as it does
        slo={"ttft": f"{TTFT:g}s", "itl": f"{1000 * ITL:g}ms"},
        verification="Advisory",
    )
    with ExitStack() as lasting:
        generator = lasting.enter_context(running(served.cluster, f"{served.namespace}-load"))
        day = Day(served, generator, Api(served.cluster.kubeconfig))
        await asyncio.to_thread(day.release)
        served.ready()
        canary = lambda: served.condition("HandoffVerified").get("status") == "True"  # noqa: E731
        await day.until("the canary, whose requests are not ours", canary)
        await day.until("the signals of both pools", lambda: known(day))
        lives = lasting.enter_context(Lives(day.api, served.namespace, seconds=1200))

        morning = await asyncio.to_thread(day.send, MORNING)
        burst_of_prompts(day.ticks(), morning)
        noon = await noon_with_a_fall(day)
        long_outputs([t for t in day.ticks() if t.now > noon.requests[0].begin], noon)

        everything = Summary({}, (*morning.requests, *noon.requests))
        foretold(everything, lives, tmp_path)
        if SOAK >= 8:
            await told_of(day, everything)
            await evening(day)
        replays(day.lines(), tmp_path, capsys)


def known(day: Day) -> bool:
    """Whether both pools follow the load."""
    found = [day.pool(role).get("status", {}).get("conditions", []) for role in ("prefill", "decode")]
    return all(any((c["type"], c["status"]) == ("ScalingActive", "True") for c in conditions) for conditions in found)


def burst_of_prompts(ticks: Sequence[Record], seen: Summary) -> None:
    """(b) The first tick whose sample of the queue was taken after the burst is the one that orders prefill."""
    burst = [one.begin for one, sent in zip(seen.requests, MORNING, strict=True) if BURST_AT <= sent.at < BURST_AT + 1]
    before = [t for t in ticks if t.now < burst[0]]
    assert before and all(t.decision.prefill.desired == 1 for t in before)
    sampled = [t for t in ticks if t.readings.queued_tokens.known and t.now - t.readings.queued_tokens.age > burst[-1]]
    first = sampled[0]
    print(f"burst: {first.decision.prefill.formula}; {first.now - burst[-1]:.1f} s after its last prompt")
    assert first.readings.queued_tokens.value > WORDS * BURST / 2
    rises = [t for t in ticks if t.decision.prefill.desired > t.decision.prefill.current]
    # A scrape in the midst of the burst may order it one tick before.
    assert rises and rises[0].now <= first.now and rises[0].now > burst[0]
    assert rises[0].decision.prefill.reason in (Reason.DEMAND, Reason.BACKLOG, Reason.MAX_REPLICAS)  # the last: it asks for 3


async def noon_with_a_fall(day: Day) -> Summary:
    """The second run. Decode's second replica starts when prefill was seen to be gated; when all prompts are computed and handoffs
    still wait, prefill has to give replicas back with what they hold."""
    morning = time.time()
    await day.recorded("a tick that finds decode idle", lambda t: t.decision.decode.need == 0, morning)
    day.bound(decode=2)
    computed = day.counted("prefill", COMPUTED)
    sending = asyncio.create_task(asyncio.to_thread(day.send, NOON))
    try:
        await day.recorded("decode to be congested", lambda t: bool(t.decision.congested), morning)
        day.bound(prefill=3)
        await day.recorded("prefill to be gated", is_gated, time.time())
        await asyncio.to_thread(day.release)
        everything = lambda: day.counted("prefill", COMPUTED) >= computed + len(NOON)  # noqa: E731
        await day.until("the last prompts to be computed", everything)
        assert day.waiting("decode") > LAST, "nothing is held"
        day.bound(prefill=1)
    finally:
        noon = await sending
    return noon


def is_gated(tick: Record) -> bool:
    """Whether prefill wants more than it has, and may have, and gets nothing because decode is congested."""
    prefill = tick.decision.prefill
    room = prefill.current < tick.bounds.prefill.maximum
    return prefill.reason is Reason.GATED_BY_DECODE and room and prefill.wanted > prefill.desired == prefill.current


def is_blind(tick: Record) -> bool:
    """Whether a role was held for a signal that is not known."""
    return any(tick.decision.of(role).reason is Reason.SIGNALS_UNKNOWN for role in ROLES)


def long_outputs(ticks: Sequence[Record], seen: Summary) -> None:
    """(a), (c) Decode is short: decode rises, prefill does not although prompts wait, and the handoff's wait falls.
    (e) The load falls while KV is held, and a replica of prefill goes: nothing was lost, which `send` has asserted."""
    rises = [t for t in ticks if t.decision.decode.desired > t.decision.decode.current]
    assert rises and rises[0].decision.decode.reason in (Reason.DEMAND, Reason.BACKLOG)
    congested = [t for t in ticks if t.decision.congested]
    assert all(t.decision.bottleneck is Bottleneck.DECODE for t in congested)
    assert not [t for t in congested if t.decision.prefill.desired > t.decision.prefill.current]
    assert any(map(is_gated, ticks))
    waits = [(t.now, t.decision.decode.inputs["wait"] or 0.0, t.readings.decode.ready) for t in ticks]
    print("handoff wait, decode ready: " + ", ".join(f"{wait:.1f} s {ready}" for _, wait, ready in waits))
    alone = max(wait for _, wait, ready in waits if ready == 1)
    assert waits[-1][1] < alone
    last = seen.requests[-1].begin
    fell = [t for t in ticks if t.now > last and t.decision.prefill.desired < t.decision.prefill.current]
    assert fell and fell[0].readings.handoff_waiting.value > 0, "prefill gave nothing back while KV was held"


async def evening(day: Day) -> None:
    """(d) A burst that takes prefill up, then next to no load: each role goes down by one a minute, not before fewer would have
    done for a whole window, and never below its minimum; no request is lost on the way, which `send` asserts."""
    day.bound(prefill=3)
    begun = time.time()
    seen = await asyncio.to_thread(day.send, EVENING)
    ticks = day.ticks()
    unread, blind = sum(t.readings.unread > 0 for t in ticks), sum(map(is_blind, ticks))
    print(f"of {len(ticks)} ticks {unread} had a replica that was not read yet, and {blind} a signal that was not known")
    for role in ROLES:
        answers = [(t.now, t.decision.of(role)) for t in ticks]
        late = [(at, answer) for at, answer in answers if at > begun]
        most, least = (pick(answer.desired for _, answer in late) for pick in (max, min))
        assert (most > 1, least, late[-1][1].desired) == (True, 1, 1), f"{role}: {most}, {least}, {late[-1][1].desired}"
        before = -math.inf
        for at, answer in [(at, answer) for at, answer in late if answer.desired < answer.current]:
            wanted = max(past for past, one in answers if past < at and one.wanted >= answer.current)
            print(
                f"{role}: {answer.current} -> {answer.desired} at {at - begun:.0f} s, {at - wanted:.0f} s after it was last wanted"
            )
            assert answer.current - answer.desired == 1
            assert at - wanted >= DEFAULT.down_window - TICK and at - before >= DEFAULT.down_interval
            before = at
    await told_of(day, seen)


async def told_of(day: Day, seen: Summary) -> None:
    """What the operator says of the attainment, and what AIPerf saw of the requests that ended in the same window."""
    old = day.own("attainment_window_seconds")
    await day.until("another look", lambda: day.own("attainment_window_seconds") != old)  # the looks are not whole seconds apart
    now, window = time.time(), day.own("attainment_window_seconds")
    told = [day.own("attainment_ratio", objective=name) for name in ("ttft", "itl")]
    mine = [r for r in seen.requests if now - window < r.begin + r.ttft + r.itl * (r.tokens - 1) <= now]
    live = Summary({}, tuple(mine)).within(TTFT, ITL)[:2]
    print(f"attainment of {window:.0f} s, TTFT and ITL: " + ", ".join(f"{100 * share:.1f} %" for share in told), end="; ")
    print(f"AIPerf saw of {len(mine)} requests " + ", ".join(f"{100 * share:.1f} %" for share in live))
    print(day.status().get("attainment"))
    assert all(abs(a - b) <= POINTS for a, b in zip(told, live, strict=True)), (told, live)


def foretold(seen: Summary, lives: Lives, folder: Path) -> None:
    """The simulator, given the run, comes to its attainment. A step of decode takes what it took: a machine with other work adds
    a tenth to the law, and what waits at the limit is then another number."""
    live = seen.within(TTFT, ITL)
    step = statistics.median(one.itl for one in seen.requests)
    assert step > 0.9 * DECODE.decode_base, f"a token every {step:.3f} s"
    engines = replace(ENGINES, decode=StepLaw(decode_base=step, decode_per_request=0.0, decode_per_context_token=0.0))
    result = predict(seen.requests, engines, lives.counts, Slo(TTFT, 0.0, ITL), folder)
    within = [(ttft <= TTFT, itl <= ITL) for ttft, itl in zip(result.ttft, result.itl, strict=True)]
    told = tuple(sum(one) / len(within) for one in (*zip(*within, strict=True), [a and b for a, b in within]))
    print(f"a step of decode takes {1000 * step:.1f} ms")
    print("live TTFT, ITL, both:      " + ", ".join(f"{100 * share:.1f} %" for share in live))
    print("simulated TTFT, ITL, both: " + ", ".join(f"{100 * share:.1f} %" for share in told))
    assert all(abs(a - b) <= POINTS for a, b in zip(live, told, strict=True)), (live, told)


def replays(lines: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's decisions, decided again by the simulator's command, are the same byte for byte."""
    (folder / "decisions.jsonl").write_text("".join(f"{line}\n" for line in lines))
    said = capsys.readouterr().out
    assert simulate(["replay", str(folder / "decisions.jsonl")]) == 0
    assert capsys.readouterr().out == f"{len(lines)} decisions agree\n"
    print(said)
