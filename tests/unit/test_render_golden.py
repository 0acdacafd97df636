"""Golden manifests: what is rendered for each kind of spec, as YAML to read. `UPDATE_GOLDEN=1` writes the files anew.

Left out: the applied-hash annotation (it changes with everything), the templates inside a ControllerRevision (they are those of the
Deployments, which is checked here), and of most cases what is the same as in `minimal` or `chat` but for the revision.
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

import builders
import pytest
import yaml
from builders import GPU, containers, manifests, pod_specs, rendered
from pod_security import violations

from pd_operator.core.names import WORKER
from pd_operator.render.site import SOFT

GOLDEN = builders.ROOT / "tests" / "golden"
UPDATE = os.environ.get("UPDATE_GOLDEN") == "1"
EXAMPLES = builders.ROOT / "docs" / "examples"
INJECTED = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")  # by LeaderWorkerSet, before all others
APART = [{"weight": 1, "podAffinityTerm": {"topologyKey": "example.org/rack"}}]
TOKEN = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}]
TEMPLATE = {
    "metadata": {"labels": {"team": "search"}, "annotations": {"example.org/scrape": "true"}},
    "spec": {
        "nodeSelector": {"example.org/pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "priorityClassName": "high",
        "volumes": [
            {"name": "cache", "persistentVolumeClaim": {"claimName": "compiled"}},  # in place of our emptyDir
            {"name": "nic", "emptyDir": {}},
        ],
        "containers": [
            {
                "name": "engine",
                "resources": {"limits": {"example.org/nic": 1}},
                "volumeMounts": [{"name": "nic", "mountPath": "/dev/nic"}],
                "env": [{"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"}],
                "livenessProbe": None,
                "readinessProbe": {"exec": {"command": ["true"]}},
            },
            {
                "name": "exporter",
                "image": "example.org/exporter:1",
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            },
        ],
        "initContainers": [
            {
                "name": "lmcache",
                "resources": {"limits": {"memory": "64Gi"}},
                "env": [{"name": "NIXL_PTHR_DELAY_US", "value": "1000"}],
            },
        ],
    },
}


class Plain(yaml.SafeDumper):
    """Without anchors: each file reads as what is applied."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


CHAT = yaml.safe_load((EXAMPLES / "chat.yaml").read_text())["spec"]
# name -> changes to the minimal spec
CHANGES: dict[str, dict[str, Any]] = {
    "minimal": {},
    "chat": CHAT,
    "p2p": {"lmcache": {"l1Size": "1Gi", "p2p": {"enabled": True}, "chunkSize": 64}},
    "cuda-ipc": {"lmcache": {"transfer": "Server"}},
    "vllm-router": {"router": {"type": "vllm-router", "replicas": 3, "args": ["--policy=consistent_hash"]}},
    "model-pvc": {"model": {"uri": "pvc://weights/llama/8b", "name": "llama"}},
    "model-oci": {"model": {"uri": "oci://example.org/models/llama:1"}},
    "secrets": {
        "engine": {"env": TOKEN},
        "decode": {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]},
        "lmcache": {"l1Size": "1Gi"},
    },
    "parallelism": {
        "prefill": {
            "replicas": 2,
            "parallelism": {"tensor": 4},
            "resources": {"limits": {"nvidia.com/gpu": 8}},
            "args": ["--max-num-batched-tokens=16384"],
        },
        "decode": {"replicas": 4, "parallelism": {"tensor": 2, "data": 4, "expert": True}, "resources": GPU},
        "engine": {"args": ["--seed=1"]},
    },
    "nodes": {
        "prefill": {"parallelism": {"tensor": 8}, "resources": {"limits": {"nvidia.com/gpu": 8}}},
        "decode": {"nodes": 2, "replicas": 3, "parallelism": {"tensor": 16}, "resources": {"limits": {"nvidia.com/gpu": 8}}},
        "lmcache": {"l1Size": "1Gi"},
    },
    "nodes-data": {
        "prefill": {"parallelism": {"tensor": 4}, "resources": {"limits": {"nvidia.com/gpu": 4}}},
        "decode": {
            "nodes": 4,
            "parallelism": {"tensor": 2, "data": 16, "expert": True},
            "resources": {"limits": {"nvidia.com/gpu": 8}},
            "template": {
                "spec": {"affinity": {"podAntiAffinity": {SOFT: [{"weight": 1, "podAffinityTerm": {"topologyKey": "x"}}]}}}
            },
        },
        "rollout": {"type": "Recreate"},
        "lmcache": {"l1Size": "1Gi"},
    },
    "template": {
        "lmcache": {"l1Size": "40Gi", "p2p": {"enabled": True}},
        "prefill": {"template": TEMPLATE},
        "router": {"template": {"metadata": {"labels": {"team": "search"}}, "spec": {"nodeSelector": {"example.org/pool": "cpu"}}}},
    },
    "recreate": {
        "rollout": {"type": "Recreate", "drainTimeout": "10m"},
        "handoff": {"leaseDuration": "1m", "onFailure": "Fail"},
    },
    "scaling": {
        "scaling": {
            "mode": "External",
            "prefill": {"minReplicas": 2, "maxReplicas": 4},
            "decode": {"minReplicas": 2, "maxReplicas": 8},
        }
    },
    "gateway": {
        "gateway": {
            "parentRefs": [{"name": "public", "namespace": "infra", "sectionName": "https"}],
            "hostnames": ["*.example.org"],
        }
    },
    "vllm-0.26.0": {"engine": {"version": "0.26.0"}, "lmcache": {"l1Size": "1Gi"}},
    "vllm-0.33.0": {
        "engine": {"version": "0.33.0"},
        "lmcache": {"version": "0.5.6", "l1Size": "1Gi"},
        "handoff": {"onFailure": "Fail"},
    },
}
CASES = {name: {"verification": None, **changes} for name, changes in CHANGES.items()}  # None: the default of the schema


def texts(changes: dict[str, Any]) -> list[str]:
    """Each manifest of a first pass as YAML."""
    _, _, bundle = rendered(changes)
    templates = list(pod_specs(bundle).values())
    shown = []
    for manifest in manifests(bundle):
        plain = builders.deep(manifest, {"metadata": {"annotations": None}})
        if manifest["kind"] == "ControllerRevision":
            for role, template in manifest["data"]["templates"].items():
                assert template in templates, role
            plain["data"]["templates"] = "those of the Deployments"
        shown.append(yaml.dump(plain, Dumper=Plain, sort_keys=False, width=132, allow_unicode=True))
    return shown


@cache
def shown_already() -> frozenset[str]:
    """Manifests of `minimal` and `chat`, without their revisions."""
    return frozenset(
        text.replace(builders.revision_of(base), "") for base in (CASES["minimal"], CASES["chat"]) for text in texts(base)
    )


def document(name: str) -> str:
    """What the golden file of a case holds."""
    known = shown_already() if name not in ("minimal", "chat") else frozenset()
    revision = builders.revision_of(CASES[name])
    return "---\n".join(text for text in texts(CASES[name]) if text.replace(revision, "") not in known)


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    path = GOLDEN / f"{name}.yaml"
    text = document(name)
    if UPDATE:
        path.write_text(text)
    assert path.read_text() == text, f"{path.name} differs; if that is meant: UPDATE_GOLDEN=1 pytest {__file__}"


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_pods_keep_the_restricted_profile(name: str) -> None:
    _, _, bundle = rendered(CASES[name])
    assert {n: v for n, pod in pod_specs(bundle).items() if (v := violations(pod["spec"]))} == {}


@pytest.mark.parametrize("name", CASES)
def test_every_container_of_ours_is_hardened(name: str) -> None:
    _, _, bundle = rendered(CASES[name])
    for where, pod in pod_specs(bundle).items():
        assert pod["spec"]["securityContext"]["runAsUser"] == 65532 and pod["spec"]["securityContext"]["fsGroup"] == 65532
        assert pod["spec"]["enableServiceLinks"] is False
        for container in containers(pod).values():
            if container["name"] == "exporter":
                continue
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, where
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
            assert container["imagePullPolicy"] == "IfNotPresent"
            mounts = {m["mountPath"] for m in container["volumeMounts"]}
            assert "/tmp" in mounts and {m["name"] for m in container["volumeMounts"]} <= {
                v["name"] for v in pod["spec"]["volumes"]
            }


@pytest.mark.parametrize("name", CASES)
def test_ports_and_variables_are_named_once(name: str) -> None:
    _, _, bundle = rendered(CASES[name])
    for pod in pod_specs(bundle).values():
        ports = [p for c in containers(pod).values() for p in c.get("ports", [])]
        assert len({p["name"] for p in ports}) == len(ports) == len({p["containerPort"] for p in ports})
        assert all(len(p["name"]) <= 15 for p in ports)
        for container in containers(pod).values():
            names = [v["name"] for v in container.get("env", [])]
            assert len(names) == len(set(names))
            probes = [container[p] for p in ("startupProbe", "readinessProbe", "livenessProbe") if p in container]
            named = {p["httpGet"]["port"] for p in probes if "httpGet" in p}
            assert named <= {p["name"] for p in container.get("ports", [])}


@pytest.mark.parametrize("name", CASES)
def test_variables_are_defined_before_they_are_used(name: str) -> None:
    """$(X) in a value or an argument stays as it is when X comes later or not at all."""
    _, _, bundle = rendered(CASES[name])
    for pod in pod_specs(bundle).values():
        for container in containers(pod).values():
            known = set(INJECTED) if WORKER in pod["metadata"]["labels"] else set()
            for var in container.get("env", []):
                assert set(re.findall(r"\$\((\w+)\)", var.get("value", ""))) <= known, var
                known.add(var["name"])
            for arg in container.get("args", []):
                assert set(re.findall(r"\$\((\w+)\)", arg)) <= known, arg


def test_the_checks_see_what_they_look_for() -> None:
    pod = {
        "hostNetwork": True,
        "volumes": [{"name": "x", "hostPath": {"path": "/"}}],
        "containers": [{"name": "c", "securityContext": {"runAsUser": 0}, "ports": [{"hostPort": 1}]}],
    }
    assert violations(pod) == [
        "hostNetwork",
        "volume x: ['hostPath']",
        "c: allowPrivilegeEscalation",
        "c: capabilities",
        "c: runs as root",
        "c: seccompProfile",
        "c: hostPort",
    ]
