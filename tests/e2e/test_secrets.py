"""Invariant I10 on a live run: an HF token and an engine's API key stand in their Secret and nowhere else."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.handle import KubectlError
from demo import stack
from served import Served


def everything(served: Served) -> Iterator[tuple[str, str]]:
    """Name and text of all that the cluster holds but Secrets, of all logs, and of all metrics of ours."""
    run = served.cluster.kubectl
    kinds = [k for k in run("api-resources", "--verbs=list", "-o", "name").split() if k != "secrets"]
    for kind in kinds:
        yield kind, run("get", kind, "-A", "-o", "json", "--show-managed-fields=true", check=False, timeout=60)
    for space in (served.namespace, stack.INSTALL_NAMESPACE):
        for pod in served.cluster.json("get", "pods", "-n", space)["items"]:
            name = pod["metadata"]["name"]
            for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
                log = ("logs", name, "-n", space, "-c", container["name"])
                yield f"log of {name} {container['name']}", run(*log, check=False) + run(*log, "--previous", check=False)
    for pod in served.cluster.json("get", "pods", "-n", stack.INSTALL_NAMESPACE)["items"]:
        path = f"/api/v1/namespaces/{stack.INSTALL_NAMESPACE}/pods/{pod['metadata']['name']}:8081/proxy/metrics"
        yield "metrics of the operator", run("get", "--raw", path)
    for pod in served.pods():
        port = 29000 if "router" in pod["metadata"]["name"] else 8000
        yield f"metrics of {pod['metadata']['name']}", served.metrics(pod, port)


def env(**names: str) -> list[dict[str, Any]]:
    """Variables whose values are keys of the Secret `keys`."""
    return [{"name": name, "valueFrom": {"secretKeyRef": {"name": "keys", "key": key}}} for name, key in names.items()]


async def test_a_token_and_a_key_are_nowhere_but_in_their_secret(served: Served) -> None:
    token, key = (f"{prefix}{secrets.token_hex(16)}" for prefix in ("hf_", "sk-"))
    literals = [f"--from-literal=token={token}", f"--from-literal=key={key}"]
    served.cluster.kubectl("create", "secret", "generic", "keys", *literals, "-n", served.namespace)
    # vllm-router gets the engines' key too, and smg hands the client's on: both are tried.
    for router in ("vllm-router", "smg"):
        served.apply(engine={"env": env(HF_TOKEN="token", VLLM_API_KEY="key")}, router={"type": router, "replicas": 1})
        served.ready()
        load = served.load()
        await load.burst(4, concurrency=2)
        assert not load.failed, load.summary()
    # What a person writes in the wrong place.
    wrong, plain = (f"{prefix}{secrets.token_hex(16)}" for prefix in ("sk-", "hf_"))
    misplaced: list[tuple[dict[str, Any], str]] = [
        ({"prefill": {"args": [f"--api-key={wrong}"]}}, wrong),
        ({"engine": {"env": [{"name": "HF_TOKEN", "value": plain}]}}, plain),
    ]
    for spec, value in misplaced:
        with pytest.raises(KubectlError) as refused:  # the API server refuses it: it is stored nowhere
            served.apply(**spec)
        assert "is refused" in str(refused.value) or "valueFrom" in str(refused.value)
        assert value not in str(refused.value)
    pages = dict(everything(served))
    assert len(pages) > 40 and any(name.startswith("log of pd-operator") and text for name, text in pages.items())
    for secret in (token, key, wrong, plain):
        assert [name for name, text in pages.items() if secret in text] == []
