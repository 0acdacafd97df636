"""kubectl pdd plan against a real API server: it reads nodes and pods, and writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cluster import audit
from cluster.handle import Cluster
from pd_operator import plugin

DOMAIN, GPU = "pdserve.dev/domain", "nvidia.com/gpu"
CHAT = {
    "apiVersion": "pdserve.dev/v1alpha1",
    "kind": "PDDeployment",
    "metadata": {"name": "planned"},
    "spec": {
        "model": {"uri": "hf://meta-llama/Llama-3.1-8B-Instruct"},
        "engine": {"type": "vllm", "version": "0.32.0"},
        "placement": {"transferDomain": {"topologyKey": DOMAIN}},
        "prefill": {"replicas": 1, "resources": {"limits": {GPU: 8}}},
        "decode": {"replicas": 2, "resources": {"limits": {GPU: 8}}},
    },
}


def test_a_plan_reads_the_cluster_and_writes_nothing(
    kwok_cluster: Cluster, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = json.loads(kwok_cluster.kubectl("get", "nodes", "-l", DOMAIN, "-o", "json"))["items"]
    domains = {node["metadata"]["labels"][DOMAIN] for node in nodes}
    assert len(domains) > 1
    file, kept = tmp_path / "chat.yaml", tmp_path / "snapshot.json"
    file.write_text(yaml.safe_dump(CHAT))
    common = ["plan", "-f", str(file), "-n", namespace, "-o", "json"]
    assert plugin.main([*common, "--kubeconfig", str(kwok_cluster.kubeconfig), "--save", str(kept)]) == 0
    live = capsys.readouterr().out
    (answer,) = json.loads(live)
    assert answer["reason"] == "Placed" and answer["slices"][0]["domain"] in domains
    assert {d["domain"] for d in answer["domains"]} >= domains
    assert len(json.loads(kept.read_text())["nodes"]) >= len(nodes)
    assert plugin.main([*common, "--snapshot", str(kept)]) == 0
    assert capsys.readouterr().out == live
    assert kwok_cluster.kubectl("get", "deployments", "-n", namespace, "-o", "name") == ""
    if kwok_cluster.audit_log is not None:
        written = audit.events(kwok_cluster.audit_log, verbs=("create", "update", "patch", "delete", "deletecollection"))
        assert not [e for e in written if e.get("objectRef", {}).get("name") == "planned"]


def test_a_foreign_pod_is_counted(
    kwok_cluster: Cluster, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pod that takes all accelerators of a node makes that node useless to a plan."""
    nodes = json.loads(kwok_cluster.kubectl("get", "nodes", "-l", DOMAIN, "-o", "json"))["items"]
    target = next(n for n in nodes if n["status"]["allocatable"].get(GPU) == "8")
    name = target["metadata"]["name"]
    container = {"name": "c", "image": "x", "resources": {"limits": {GPU: "8"}}}
    spec = {"nodeName": name, "tolerations": [{"operator": "Exists"}], "containers": [container]}
    kwok_cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "foreign", "namespace": namespace}, "spec": spec})
    pinned = {"spec": {"nodeSelector": {"kubernetes.io/hostname": name}}}
    wanted = {**CHAT, "spec": {**CHAT["spec"], "prefill": {**CHAT["spec"]["prefill"], "template": pinned}}}  # type: ignore[dict-item, index]
    file = tmp_path / "chat.yaml"
    file.write_text(yaml.safe_dump(wanted))
    assert plugin.main(["plan", "-f", str(file), "-n", namespace, "--kubeconfig", str(kwok_cluster.kubeconfig)]) == 1
    out = capsys.readouterr().out
    assert "NoCapacity" in out
    assert "nodes with nvidia.com/gpu=8 free: 0 of 1; largest free is 0 (3 nodes: node selector does not match)" in out
