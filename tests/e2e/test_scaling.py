"""Pools follow real load: real kubelets, the real router, stand-in engines, signals from the pods' own pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.handle import Cluster
from demo import stack
from pd_operator.core.scaling.record import parse
from pd_simulate.cli import main as simulate
from served import Served
from served.fixtures import decisions
from traffic.load import steady

pytestmark = pytest.mark.timeout(600)  # with the cluster, and the images when they are not in the cache
TICK = 5  # seconds
STREAMS = 10  # at once; one decode replica runs BATCH of them
BATCH = 3
STEP = "0.05"  # seconds a token
TOKENS = 400  # 20 s for a stream that runs from its beginning; the last ones begin a minute later
RISE = 100.0  # seconds from the load to the replica, on a machine with much other work
IDLE = 30.0  # seconds: many ticks, and far less than the down window of 300 s


@pytest.fixture(scope="module")
def fast(install: Cluster) -> Iterator[Cluster]:
    """The operator with a tick of 5 s; the other tests get it back as it was."""
    upgrade(install, f"signals.tickSeconds={TICK}")
    yield install
    upgrade(install, "signals.tickSeconds=15")


def upgrade(cluster: Cluster, setting: str) -> None:
    """Change chart values of the install."""
    arguments = ["upgrade", "pd-operator", str(stack.CHART), "--namespace", stack.INSTALL_NAMESPACE, "--reuse-values"]
    done = stack.helm(cluster, *arguments, "--set", setting, "--wait", "--timeout", "120s")
    assert done.returncode == 0, done.stderr


def pool(served: Served, role: str) -> dict[str, Any]:
    """The PDPool of a role."""
    found: dict[str, Any] = served.cluster.json("get", "pdp", f"{served.name}-{role}", "-n", served.namespace)
    return found


def active(served: Served, role: str) -> tuple[str, str]:
    """Status and message of ScalingActive."""
    conditions = pool(served, role)["status"].get("conditions", [])
    return next(((c["status"], c["message"]) for c in conditions if c["type"] == "ScalingActive"), ("", ""))


async def test_decode_that_is_short_gets_replicas_and_prefill_does_not(
    fast: Cluster, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bounds = {"prefill": {"maxReplicas": 3}, "decode": {"maxReplicas": 3}}
    slow = {"args": [f"--max-num-seqs={BATCH}"], "env": [{"name": "STANDIN_DECODE_BASE_S", "value": STEP}]}
    served.apply(scaling={"mode": "Auto", **bounds}, decode=slow, router={"replicas": 1})
    served.ready()
    load = served.load(tokens=4)
    await load.burst(6, concurrency=2)  # what one prefill replica does is learned from prompts
    await asyncio.to_thread(served.until, "the signals of both pools", lambda: _known(served), 60)
    assert [pool(served, role)["spec"]["replicas"] for role in ("prefill", "decode")] == [1, 1]

    begin = time.monotonic()
    async with steady(load, streams=STREAMS, stream_tokens=TOKENS, workers=1, pause=1.0):
        rose = lambda: pool(served, "decode")["spec"]["replicas"] > 1  # noqa: E731
        await asyncio.to_thread(served.until, "decode to be given more", rose, RISE)
        decided = time.monotonic() - begin
        ready = lambda: (pool(served, "decode")["status"].get("readyReplicas") or 0) > 1  # noqa: E731
        await asyncio.to_thread(served.until, "the replica to be ready", ready, RISE)
        print(f"\ndecided after {decided:.1f} s, ready after {time.monotonic() - begin:.1f} s")
    told = pool(served, "decode")
    print(told["status"]["lastDecision"]["message"])
    assert told["spec"]["replicas"] in (2, 3) and pool(served, "prefill")["spec"]["replicas"] == 1
    assert not load.failed, load.summary()

    await asyncio.sleep(IDLE)
    after = {role: pool(served, role) for role in ("prefill", "decode")}
    assert after["prefill"]["spec"]["replicas"] == 1
    assert after["decode"]["spec"]["replicas"] == told["spec"]["replicas"]  # idle for less than the down window
    assert active(served, "decode")[0] == "True", active(served, "decode")
    await load.burst(20, concurrency=2)
    assert not load.failed, load.summary()
    events = served.cluster.kubectl("get", "events.events.k8s.io", "-n", served.namespace, "-o", "jsonpath={.items[*].reason}")
    assert "ScaledDecode" in events and "ScaledPrefill" not in events
    replays(decisions(fast), f"{served.namespace}/{served.name}", tmp_path, capsys)


def replays(lines: list[str], name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's decisions, decided again by the simulator's command, are the same byte for byte."""
    assert any(parse(line).name == name and parse(line).decision.decode.desired > 1 for line in lines)
    (folder / "decisions.jsonl").write_text("".join(f"{line}\n" for line in lines))
    capsys.readouterr()
    assert simulate(["replay", str(folder / "decisions.jsonl")]) == 0
    assert capsys.readouterr().out == f"{len(lines)} decisions agree\n"


def _known(served: Served) -> bool:
    return all(active(served, role)[0] == "True" for role in ("prefill", "decode"))
