"""Invariant I10 on a live run: an HF token and an engine's API key stand in their Secret and nowhere else.

The canary holds the key too: its Job, its pod and what it leaves are looked through for each router.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.handle import KubectlError
from demo import stack
from pd_operator.core.canary_case import KEY_VARIABLE
from served import Served
from served.fixtures import DECISIONS

ONE = {"minReplicas": 1, "maxReplicas": 1}
SCALED = {"mode": "Auto", "prefill": ONE, "decode": ONE}  # so that there are decisions
CANARY = "app.kubernetes.io/component=canary"


def decisions(served: Served, pod: str) -> str:
    """The decision log of a pod of the operator; it begins anew with each start of that pod."""
    return served.cluster.kubectl("exec", pod, "-n", stack.INSTALL_NAMESPACE, "--", "cat", DECISIONS, check=False)


def decided(served: Served) -> bool:
    """Whether a decision about it is in the log of a pod of the operator."""
    pods = served.cluster.json("get", "pods", "-n", stack.INSTALL_NAMESPACE)["items"]
    return any(served.namespace in decisions(served, pod["metadata"]["name"]) for pod in pods)


def everything(served: Served) -> Iterator[tuple[str, str]]:
    """Name and text of all that the cluster holds but Secrets, of all logs, all metrics of ours, and the decisions."""
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
        name = pod["metadata"]["name"]
        path = f"/api/v1/namespaces/{stack.INSTALL_NAMESPACE}/pods/{name}:8081/proxy/metrics"
        yield f"metrics of {name}", run("get", "--raw", path)
        yield f"decisions of {name}", decisions(served, name)
    for pod in served.pods():
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] != "canary":  # it serves nothing, and has ended
            port = 29000 if "router" in pod["metadata"]["name"] else 8000
            yield f"metrics of {pod['metadata']['name']}", served.metrics(pod, port)


def canary(served: Served) -> Iterator[tuple[str, str]]:
    """Name and text of all that a canary that proved its slice has left, its key's reference among it."""
    run, space = served.cluster.kubectl, ("-n", served.namespace)
    (job,) = served.cluster.json("get", "jobs", *space, "-l", CANARY)["items"]
    (pod,) = served.cluster.json("get", "pods", *space, "-l", CANARY)["items"]
    (container,) = pod["spec"]["containers"]
    references = [var["valueFrom"] for var in container["env"] if var["name"] == KEY_VARIABLE]
    assert references == [{"secretKeyRef": {"name": "keys", "key": "key"}}], "it asks with the engines' key"
    (status,) = pod["status"]["containerStatuses"]
    assert json.loads(status["state"]["terminated"]["message"])["sent"] == 3, status
    log = run("logs", pod["metadata"]["name"], *space)
    assert "handoff: Verified" in log, log
    events = run("get", "events", *space, "--field-selector", f"involvedObject.name={job['metadata']['name']}", "-o", "json")
    assert "SuccessfulCreate" in events
    name = job["metadata"]["name"]
    yield f"Job {name}", json.dumps(job)
    yield f"pod of {name}", json.dumps(pod)
    yield f"log of {name}", log
    yield f"events of {name}", events


def env(**names: str) -> list[dict[str, Any]]:
    """Variables whose values are keys of the Secret `keys`."""
    return [{"name": name, "valueFrom": {"secretKeyRef": {"name": "keys", "key": key}}} for name, key in names.items()]


def proof(served: Served, router: str, known: list[str]) -> str:
    """What the newest proof is about, when it is another one and its slice has no other router; else ""."""
    programs = {pod["spec"]["containers"][0]["command"][0] for pod in served.pods("router")}
    (slice_,) = served.object()["status"]["slices"]
    about = str(slice_.get("verified", {}).get("about", ""))
    return about if programs == {router} and about not in known else ""


async def test_a_token_and_a_key_are_nowhere_but_in_their_secret(served: Served) -> None:
    token, key = (f"{prefix}{secrets.token_hex(16)}" for prefix in ("hf_", "sk-"))
    literals = [f"--from-literal=token={token}", f"--from-literal=key={key}"]
    served.cluster.kubectl("create", "secret", "generic", "keys", *literals, "-n", served.namespace)
    pages: dict[str, str] = {}
    known: list[str] = []
    # vllm-router gets the engines' key too, and smg hands the client's on: both are tried.
    for router in ("vllm-router", "smg"):
        wanted = {"type": router, "replicas": 1}
        served.apply(
            engine={"env": env(HF_TOKEN="token", VLLM_API_KEY="key")}, router=wanted, verification="Required", scaling=SCALED
        )
        served.ready()
        # Another router is another path: its canary runs again.
        known.append(served.until(f"a proof behind {router} alone", lambda r=router: proof(served, r, known), 240))
        pages.update({f"{router}: {name}": text for name, text in canary(served)})
        load = served.load()
        load.key = key
        await load.burst(4, concurrency=2)
        assert not load.failed, load.summary()
    assert len(pages) == 8, "each router had a canary of its own"
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
    served.until("a decision about it in the log", lambda: decided(served))
    pages.update(everything(served))
    assert len(pages) > 48 and any(name.startswith("log of pd-operator") and text for name, text in pages.items())
    logged = [text for name, text in pages.items() if name.startswith("decisions of ")]
    assert any(served.namespace in text for text in logged), "a decision about it is in the log"
    for secret in (token, key, wrong, plain):
        assert [name for name, text in pages.items() if secret in text] == []
