"""kubectl pdd explain on a real API server, under decisions of the real law, and the commands of docs/kubectl-pdd.md."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from test_scaling_live import Live, decoding, live

from cluster.handle import Cluster
from opsrunner.api import Api
from opsrunner.plugin import Pdd, environment
from pd_operator.core.scaling.record import parse, replay
from pd_operator.signals.load import nothing
from pd_simulate import cli as simulate
from plugins.quickstart import blocks

pytest_plugins = ("opsrunner.fixtures",)
pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "kubectl-pdd.md"
RBAC = ROOT / "docs" / "examples" / "rbac" / "kubectl-pdd.yaml"


@pytest.fixture
def pdd(kwok_cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Pdd:
    """The plugin as administrator."""
    return Pdd(kwok_cluster.kubeconfig, capsys)


async def test_explain_under_real_decisions(kwok_cluster: Cluster, api: Api, space: str, pdd: Pdd, tmp_path: Path) -> None:
    """Each decision is explained from the status alone, exactly, and what is said to raise the pool does."""
    async with live(kwok_cluster, api, space, "told") as it:
        await _explained(it, pdd, tmp_path / "told.jsonl")


async def _explained(chat: Live, pdd: Pdd, file: Path) -> None:
    space = chat.key[0]
    command = ("explain", "told", "-n", space)
    await chat.tick(decoding(400), 2)
    code, out, _ = await pdd.later(*command)
    assert code == 0 and "decode: stays at 3 (Hold)" in out and "n_D = (R 400 + H 0) / (0.85 x b 200) = 2.35" in out, out
    threshold = float(re.search(r"rises to 4 when R \+ H >= (\d+) requests \(now 400\)", out)[1])  # type: ignore[index]

    code, line, _ = await pdd.later(*command, "-o", "json")
    assert code == 0 and line.strip() in chat.lines and replay(line) == []
    file.write_text(line)
    assert simulate.main(["replay", str(file)]) == 0

    await chat.tick(decoding(threshold - 1), 2)
    assert chat.pool()["spec"]["replicas"] == 3
    await chat.tick(decoding(threshold))
    assert chat.pool()["spec"]["replicas"] == 4

    await chat.tick(count=2)
    written = list(chat.tap.writes)
    await chat.tick(count=10)  # the same answers: nothing is written, so the record stays
    assert chat.tap.writes == written
    await chat.tick(decoding(threshold + 90), 25)  # the same answer for over five minutes, and a need that moved
    assert parse((await pdd.later(*command, "-o", "json"))[1]).readings.running.value == threshold + 90

    await chat.tick(nothing("no page of pod x for 16 s"), 2)
    out = (await pdd.later(*command))[1]
    assert "decode: stays at 4 (SignalsUnknown)" in out and "no page of pod x for 16 s" in out and "unknown   A" in out
    status = json.loads((await pdd.later("status", "told", "-n", space, "-o", "json"))[1])
    assert [n["reason"] for n in status["notes"] if n["name"] == "scaling of decode"] == ["NoSeries"]

    await chat.edit(scaling={"mode": "Advisory"})
    await chat.tick(decoding(2000), 2)
    out = (await pdd.later(*command))[1]
    assert "Advisory: decided and reported" in out and "decode: 4 -> 6 (MaxReplicas); 4 of 4 ready; its number is 4" in out
    assert "under any load: maxReplicas is 6" in out and re.search(r"rises to \d+ with scaling.decode.maxReplicas: \d+", out)
    await chat.edit(scaling=None)
    out = (await pdd.later(*command))[1]
    assert "Static: the number is that of the spec" in out and "decode: 4 replicas, 4 of 4 ready" in out


async def test_the_pages_commands(kwok_cluster: Cluster, api: Api, space: str, tmp_path: Path) -> None:
    """Every command of docs/kubectl-pdd.md, by the real kubectl, which finds the program by its name."""
    async with live(kwok_cluster, api, space, "chat") as it:
        await _page(kwok_cluster, it, tmp_path)


async def _page(kwok_cluster: Cluster, chat: Live, tmp_path: Path) -> None:
    await chat.tick(decoding(400), 2)
    admin = yaml.safe_load(kwok_cluster.kubeconfig.read_text())
    for context in admin["contexts"]:
        context["context"]["namespace"] = chat.key[0]
    mine = tmp_path / "kubeconfig"
    mine.write_text(yaml.safe_dump(admin))
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    printed = ""
    for block in blocks(PAGE):
        done = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=tmp_path, env=environment(mine), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        if "pdd verify" in block:  # fake nodes run no canary, so this object has none
            assert done.returncode == 2 and "spec.verification is Disabled" in done.stderr, done.stderr
            continue
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        printed += done.stdout
    assert f"{chat.key[0]}/chat READY" in printed and "n_D = (R 400 + H 0)" in printed
    assert "clusterrole.rbac.authorization.k8s.io/kubectl-pdd " in printed
    kwok_cluster.kubectl("delete", "-f", str(RBAC))
