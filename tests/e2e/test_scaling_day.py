"""One deployment through the phases of a day: real kubelets, the real router, stand-in engines, a real Prometheus, AIPerf in a pod.

A burst of prompts, outputs three times as long, a load that falls while decode still waits for held KV. What is asserted stands in
the decision log, tick by tick; the simulator is given the same requests and must come to the same attainment.

A phase begins when the log shows what the one before was for, and the decode replica that a shortage orders starts only when the
test lets it: no phase depends on how fast this machine is.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import images
from cluster.handle import Cluster
from cluster.identity import Identity
from cluster.tools import tool
from demo import stack
from demo.chat import total
from loadgen import Generator, Sent, Summary, running
from loadgen.lives import Lives
from loadgen.predicted import Engines, predict
from monitor.podmonitor import jobs
from monitor.prometheus import Prometheus
from opsrunner.api import Api
from pd_operator.core.scaling.decision import Bottleneck, Reason
from pd_operator.core.scaling.record import Record, parse
from pd_simulate.cli import main as simulate
from pd_simulate.fleet import Slo
from served import Served
from standin.core import DEFAULT_KV_TOKENS
from standin.settings import StepLaw
from traffic.load import prompt

pytestmark = pytest.mark.timeout(1200)
TICK = SCRAPE = 5  # seconds
LOG = "/tmp/decisions.jsonl"
WORDS = 270  # of a prompt, about 400 tokens: a second of prefill
TTFT, ITL = 6.0, 0.15  # seconds; spec.slo
BURST, SURGE = 30, 40  # prompts at once; the first is half a minute's work for the one prefill replica
OUTPUT = 30  # tokens, 1.5 s; three times as long from the second run on
RATE = 1.1  # requests a second at noon: 5 with long outputs in decode, and not two replicas of prefill busy
SEATS = 4  # requests that a decode replica runs
CHUNK = 512
COMPUTED = "vllm:request_success_total"  # of prefill: prompts
LAST = 5  # handoffs, of which more wait when prefill has to give a replica back
LIMIT = 180.0  # seconds that anything may take on a machine with much other work
POINTS = 0.05  # between the live attainment and the simulator's

PREFILL = StepLaw(prefill_per_token=0.0025)
DECODE = StepLaw(decode_base=0.05)
ENGINES = Engines(PREFILL, DECODE, SEATS, CHUNK, DEFAULT_KV_TOKENS)
HELD_S = 600  # at most; then the init container fails and says so
HELD = f"""
import os, sys, time
end = time.monotonic() + {HELD_S}
while not os.path.exists("/tmp/go"):
    if time.monotonic() > end:
        sys.exit("no /tmp/go after {HELD_S} s")
    time.sleep(0.2)
"""
HOLD: dict[str, Any] = {  # an init container: a decode engine starts when the test says so
    "name": "hold",
    "image": images.BASE,
    "imagePullPolicy": "IfNotPresent",
    "command": ["python3", "-c", HELD],
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}
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
NOON = worded(2 * 10**6, evenly(0, FALL_AT, RATE, 3 * OUTPUT), together(SURGE_AT, SURGE, 3 * OUTPUT))


@pytest.fixture(scope="module")
def prometheus(install: Cluster) -> Iterator[Prometheus]:
    """A Prometheus with the chart's monitors beside the cluster, and the operator that scales by it with a tick of 5 s and a
    decision log; the other tests get the operator back as it was."""
    found: list[dict[str, Any]] = []
    for monitor in monitors():
        found += [job | {"scrape_interval": f"{SCRAPE}s"} for job in jobs(monitor, install.kubeconfig)]
    assert install.state is not None
    host = Identity(install.state).gateway(0)  # pods reach the bridges
    with Prometheus({"scrape_configs": found}, host=host) as server:
        source = f"signals.source=prometheus,signals.prometheus.url={server.url}"
        upgrade(install, f"{source},signals.tickSeconds={TICK},log.decisions={LOG}")
        yield server
        upgrade(install, "signals.source=podScrape,signals.prometheus.url=,signals.tickSeconds=15,log.decisions=")


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


@dataclass
class Day:
    """The deployment, who sends to it, and what the operator decided for it."""

    served: Served
    prometheus: Prometheus
    generator: Generator
    api: Api

    def lines(self) -> list[str]:
        """The decision log of the operator's pod."""
        program = f"print(open({LOG!r}).read())"
        read = ["exec", "deploy/pd-operator", "-n", stack.INSTALL_NAMESPACE, "--", "python3", "-c", program]
        return [line for line in self.served.cluster.kubectl(*read).splitlines() if line]

    def ticks(self) -> list[Record]:
        """The decisions for this deployment, in order."""
        name = f"{self.served.namespace}/{self.served.name}"
        return [record for record in map(parse, self.lines()) if record.name == name]

    def send(self, trace: Sequence[Sent]) -> Summary:
        """Send a trace to the front Service, and wait for its end."""
        found = self.generator.run(self.served.load().url, self.served.name, trace)
        first = ", ".join(f"p{p} {found.number('time_to_first_token', f'p{p}') / 1e3:.1f} s" for p in (50, 90))
        print(f"\n{len(trace)} requests, {len(found.failed)} failed; TTFT {first}; within {found.within(TTFT, ITL)}")
        assert not found.failed, found.failed[:5]
        return found

    def pool(self, role: str) -> dict[str, Any]:
        """The PDPool of a role."""
        return self.api.get("PDPool", self.served.namespace, f"{self.served.name}-{role}") or {}

    def pods(self, role: str) -> list[dict[str, Any]]:
        """Pods of a role, those that are being deleted as well."""
        selector = f"pdserve.dev/deployment={self.served.name},pdserve.dev/role={role}"
        found: list[dict[str, Any]] = self.api.page("Pod", self.served.namespace, selector)["items"]
        return found

    def bound(self, **most: int) -> None:
        """Set maxReplicas of roles."""
        body = yaml.safe_dump({"spec": {"scaling": {role: {"maxReplicas": count} for role, count in most.items()}}})
        self.served.cluster.kubectl(
            "patch", "pdd", self.served.name, "-n", self.served.namespace, "--type=merge", f"--patch={body}"
        )

    def held(self) -> list[str]:
        """Decode pods that wait for `release`."""
        found = []
        for pod in self.pods("decode"):
            started = {one["name"]: one["state"] for one in pod["status"].get("initContainerStatuses", [])}
            if "running" in started.get(HOLD["name"], {}):
                found.append(str(pod["metadata"]["name"]))
        return found

    def release(self) -> None:
        """Let the decode engine that is held start; waits until there is one."""
        pods = self.served.until("a decode pod that is held", self.held, LIMIT)
        for pod in pods:
            self.served.cluster.kubectl("exec", pod, "-n", self.served.namespace, "-c", HOLD["name"], "--", "touch", "/tmp/go")

    def counted(self, role: str, metric: str) -> float:
        """A metric's sum over the ready engines of a role now."""
        found = 0.0
        for pod in self.pods(role):
            if ("Ready", "True") in [(c["type"], c["status"]) for c in pod["status"].get("conditions", [])]:
                with urllib.request.urlopen(f"http://{pod['status']['podIP']}:8000/metrics", timeout=5) as page:
                    found += total(page.read().decode(), metric)
        return found

    def waiting(self, role: str) -> float:
        """Requests that wait on the ready engines of a role now."""
        return self.counted(role, "vllm:num_requests_waiting")

    async def recorded(self, what: str, test: Callable[[Record], bool], since: float) -> None:
        """Wait until a decision after `since` (seconds since 1970) is one of which `test` is true."""

        def found() -> bool:
            time.sleep(1.0)  # the log is read with kubectl exec
            return any(test(record) for record in self.ticks() if record.now > since)

        await self.until(what, found)

    async def until(self, what: str, test: Callable[[], Any], limit: float = LIMIT) -> Any:
        """Poll until `test` gives something true."""
        return await asyncio.to_thread(self.served.until, what, test, limit)


async def test_a_day_of_one_deployment(
    prometheus: Prometheus, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.apply(
        **SPEC,
        scaling=SCALING,
        router={"replicas": 1, "args": ["--policy", "round_robin"]},  # what the simulator does exactly as it does
        slo={"ttft": f"{TTFT:g}s", "itl": f"{1000 * ITL:g}ms"},
        verification="Advisory",
    )
    with ExitStack() as lasting:
        generator = lasting.enter_context(running(served.cluster, f"{served.namespace}-load"))
        day = Day(served, prometheus, generator, Api(served.cluster.kubeconfig))
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
