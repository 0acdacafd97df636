"""kubectl pdd plan, from a saved snapshot and through the function that reads a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import MINIMAL, deep
from placement_world import GIB, GPU, RACK

from pd_operator import plugin
from pd_operator.core.placement import saved
from pd_operator.core.placement.capacity import NodeCapacity
from pd_operator.core.placement.saved import Saved, SavedPod
from pd_operator.kube import read

CHAT = {
    "placement": {"transferDomain": {"topologyKey": RACK}},
    "prefill": {"replicas": 1, "resources": {"limits": {GPU: 8}}},
    "decode": {"replicas": 2, "resources": {"limits": {GPU: 4}}},
}


def manifest(name: str = "chat", namespace: str = "", **changes: Any) -> dict[str, Any]:
    """A PDDeployment."""
    spec = deep(deep(MINIMAL, CHAT), changes)
    return {
        "apiVersion": "pdserve.dev/v1alpha1",
        "kind": "PDDeployment",
        "metadata": {"name": name} | ({"namespace": namespace} if namespace else {}),
        "spec": spec,
    }


def nodes(*racks: str) -> tuple[NodeCapacity, ...]:
    """One node of 8 accelerators for each rack named."""
    whole = {GPU: 8, "cpu": 64_000, "memory": 512 * GIB, "pods": 110}
    return tuple(NodeCapacity(f"n{n}", {RACK: rack}, whole) for n, rack in enumerate(racks))


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `kubectl pdd plan` on manifests and a snapshot: (exit code, output, errors)."""

    def call(snapshot: Saved | None, manifests: list[dict[str, Any]], *more: str) -> tuple[int, str, str]:
        file = tmp_path / "chat.yaml"
        file.write_text(yaml.safe_dump_all(manifests))
        argv = ["plan", "-f", str(file), *more]
        if snapshot is not None:
            (tmp_path / "snapshot.json").write_text(saved.dump(snapshot))
            argv += ["--snapshot", str(tmp_path / "snapshot.json")]
        code = plugin.main(argv)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_a_plan_from_a_snapshot(run: Any) -> None:
    code, out, err = run(Saved(nodes("a", "a", "b")), [manifest()])
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "default/chat: Placed: 1 prefill and 2 decode in a"
    # the 1 node of b: either a prefill or two decode
    assert out.splitlines()[-1].startswith("b       0        0       1/2   1 prefill replica or 2 decode replicas would fit alone")


def test_what_does_not_fit_is_exit_code_1(run: Any) -> None:
    code, out, _ = run(Saved(nodes("a", "b")), [manifest()])
    assert code == 1
    assert "NoCapacity" in out and "nothing fits now" in out


def test_json(run: Any) -> None:
    code, out, _ = run(Saved(nodes("a", "a", "b")), [manifest()], "-o", "json", "-n", "team")
    (answer,) = json.loads(out)
    assert code == 0
    assert answer["deployment"] == "team/chat" and answer["wanted"] == {"prefill": 1, "decode": 2}
    assert answer["slices"] == [{"domain": "a", "prefill": 1, "decode": 2, "crossing": False}]
    assert [d["domain"] for d in answer["domains"]] == ["a", "b"]


def test_what_runs_already_is_kept(run: Any) -> None:
    running = (
        SavedPod("default", "p", "n2", {GPU: 8}, "chat", "prefill"),
        SavedPod("default", "d", "n3", {GPU: 4}, "chat", "decode"),
    )
    code, out, _ = run(Saved(nodes("a", "a", "b", "b"), running), [manifest()], "-o", "json")
    (answer,) = json.loads(out)
    assert code == 0 and answer["slices"] == [{"domain": "b", "prefill": 1, "decode": 2, "crossing": False}]
    assert answer["moved"] == {"prefill": 0, "decode": 0}


def test_several_are_planned_beside_each_other(run: Any) -> None:
    code, out, _ = run(
        Saved(nodes("a", "a", "b", "b")), [manifest("one"), {"kind": "Service"}, manifest("two", "team")], "-o", "json"
    )
    assert code == 0
    assert [(a["deployment"], a["slices"][0]["domain"]) for a in json.loads(out)] == [("default/one", "a"), ("team/two", "b")]


def test_numbers_may_be_given(run: Any) -> None:
    snapshot = Saved(nodes("a", "a", "a"))
    assert run(snapshot, [manifest()], "--decode", "4")[0] == 0
    code, _, err = run(snapshot, [manifest()], "--prefill", "0")
    assert code == 2 and "prefill=0, decode=2: both must be 0, or both at least 1" in err
    scaled = manifest(scaling={"prefill": {"minReplicas": 2, "maxReplicas": 4}, "decode": {"minReplicas": 3, "maxReplicas": 4}})
    for role in ("prefill", "decode"):
        del scaled["spec"][role]["replicas"]
    assert json.loads(run(snapshot, [scaled], "-o", "json")[1])[0]["wanted"] == {"prefill": 2, "decode": 3}
    assert json.loads(run(snapshot, [manifest(suspend=True)], "-o", "json")[1])[0]["reason"] == "Suspended"


def test_a_replica_that_spans_nodes_and_the_users_template(run: Any) -> None:
    template = {"spec": {"nodeSelector": {"gpu": "h100"}}}
    spans = manifest(prefill={"nodes": 2, "template": template})
    plain = Saved(nodes("a", "a", "a"))
    assert "nodes that its pods may use: 0 of 3" in run(plain, [spans])[1]
    labelled = Saved(tuple(NodeCapacity(n.name, {**n.labels, "gpu": "h100"}, n.allocatable) for n in plain.nodes))
    assert run(labelled, [spans])[0] == 0
    assert run(Saved(labelled.nodes[:2]), [spans])[0] == 1


def test_the_cluster_is_read_once_and_may_be_saved(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    async def objects(kubeconfig: str | None = None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        asked.append(kubeconfig)
        status = {"allocatable": {GPU: "8", "cpu": "64", "pods": "110", "memory": "1Ti"}}
        status["conditions"] = [{"type": "Ready", "status": "True"}]  # type: ignore[assignment]
        return [{"metadata": {"name": n, "labels": {RACK: "a"}}, "status": status} for n in ("n1", "n2")], []

    monkeypatch.setattr(read, "capacity_objects", objects)
    file = str(tmp_path / "kept.json")
    code, out, _ = run(None, [manifest()], "--save", file, "--kubeconfig", "here")
    assert (code, asked) == (0, ["here"])
    assert run(None, [manifest()], "--snapshot", file) == (0, out, "")
    assert asked == ["here"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        (
            "kind: Service",
            "no PDDeployment in the file; a document with apiVersion: pdserve.dev/v1alpha1, kind: PDDeployment is accepted",
        ),
        ("kind: PDDeployment\nmetadata: {}", "metadata.name is missing"),
        ("kind: PDDeployment\nmetadata: {name: chat}\nspec: {}", "chat: spec.model: Field required"),
    ],
)
def test_files_that_are_refused(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.yaml").write_text(text)
    assert plugin.main(["plan", "-f", str(tmp_path / "x.yaml"), "--snapshot", "none"]) == 2
    assert message in capsys.readouterr().err


def test_files_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none")
    assert plugin.main(["plan", "-f", missing]) == 2
    assert f"{missing}: No such file" in capsys.readouterr().err
    good = tmp_path / "chat.yaml"
    good.write_text(yaml.safe_dump(manifest()))
    (tmp_path / "bad.json").write_text("[]")
    assert plugin.main(["plan", "-f", str(good), "--snapshot", str(tmp_path / "bad.json")]) == 2
    assert "CapacitySnapshot and 1 are accepted" in capsys.readouterr().err


def test_no_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = tmp_path / "chat.yaml"
    good.write_text(yaml.safe_dump(manifest()))
    assert plugin.main(["plan", "-f", str(good), "--kubeconfig", str(tmp_path / "none")]) == 2
    assert "no usable cluster credentials" in capsys.readouterr().err
