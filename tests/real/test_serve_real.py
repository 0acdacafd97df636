"""Real vLLM, LMCache and NIXL under the operator, on real nodes: the answer is right, and counters prove how it came about."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import pytest

from cluster import images
from cluster.handle import Cluster
from demo import stack
from real.harm import killed
from served import Served
from served.fixtures import clear, install
from served.watched import NAMED, Object, asking
from traffic.load import connections

__all__ = ["install"]  # a fixture
pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

CHUNK = 64  # tokens; docs/examples/chat-vllm-cpu.yaml
BLOCK = 32
TOKENS = 48
READY_LIMIT_S = 900.0
ANNOTATION = "smg.ai/kv-connector"
RECEIVED = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
LOCAL = 'vllm:prompt_tokens_by_source_total{source="local_compute"}'
BYTES = "vllm:nixl_bytes_transferred_sum"
COUNT = "vllm:nixl_bytes_transferred_count"
PROMPTS = (
    "prefill decode cache block token router engine server request stream answer system " * 12,
    "the quick brown fox jumps over the lazy dog kubernetes pod node service volume probe " * 12,
)


@contextmanager
def serving(install: Cluster, namespace: str) -> Iterator[Object]:
    """The example with real engines, serving in a namespace of its own that allows hostPath."""
    images.load(install, "real")
    install.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    one = Object(install, namespace)
    install.apply(example(), namespace=namespace)
    one.ready(READY_LIMIT_S)
    yield one
    clear(install, namespace)
    install.kubectl("delete", "namespace", namespace, "--timeout=120s", timeout=130)


@pytest.fixture(scope="module")
def real_served(install: Cluster) -> Iterator[Served]:
    """One stack for all tests of this file."""
    with serving(install, "real") as one:
        yield one


def example(**changes: Any) -> dict[str, Any]:
    """The example with real engines and P2P, proven before it serves; `a__b=value` sets spec.a.b."""
    document = stack.example(stack.ENGINES["vllm"])
    document["spec"]["engine"]["image"] = images.REAL.name
    document["spec"]["lmcache"]["image"] = images.REAL.name
    document["spec"]["lmcache"]["p2p"] = {"enabled": True}
    document["spec"]["verification"] = "Required"
    document["spec"]["engine"]["env"].append({"name": "VLLM_SERVER_DEV_MODE", "value": "1"})  # the canary may drop prefill's cache
    for path, value in changes.items():
        target = document["spec"]
        *parents, last = path.split("__")
        for part in parents:
            target = target.setdefault(part, {})
        target[last] = value
    return document


async def ask(url: str, prompt: str) -> dict[str, Any]:
    """One answer at temperature 0 with its token ids; complete, or the test fails."""
    body = {
        "model": "chat",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with (
        connections() as session,
        session.post(f"{url}/v1/chat/completions", json=body, timeout=aiohttp.ClientTimeout(total=180)) as response,
    ):
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
    choice = answer["choices"][0]
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", TOKENS), answer
    return {"ids": choice["token_ids"], "text": choice["message"]["content"], "prompt_tokens": answer["usage"]["prompt_tokens"]}


@pytest.fixture(scope="module")
def unified(real_served: Served) -> Iterator[str]:
    """Address of one engine that does prefill and decode by itself: the same image, model and flags, no connector."""
    pod = real_served.pods("prefill")[0]
    engine = next(c for c in pod["spec"]["containers"] if c["name"] == "engine")
    args = list(engine["args"])
    at = args.index("--kv-transfer-config")
    del args[at : at + 2]
    kept = ("image", "imagePullPolicy", "command", "env", "ports", "resources", "securityContext", "volumeMounts", "readinessProbe")
    container = {"name": "engine", "args": args, **{k: engine[k] for k in kept if k in engine}}
    container["volumeMounts"] = [m for m in container["volumeMounts"] if not m["mountPath"].startswith("/var/run/secrets")]
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "unified"},
        "spec": {
            "containers": [container],
            "volumes": [v for v in pod["spec"]["volumes"] if not v["name"].startswith("kube-api-access")],
            "securityContext": pod["spec"]["securityContext"],
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 5,
        },
    }
    real_served.cluster.apply(manifest, namespace=real_served.namespace)
    real_served.cluster.kubectl(
        "wait", "--for=condition=Ready", "pod/unified", "-n", real_served.namespace, "--timeout=600s", timeout=610
    )
    address = real_served.cluster.kubectl("get", "pod", "unified", "-n", real_served.namespace, "-o", "jsonpath={.status.podIP}")
    yield f"http://{address.strip()}:8000"
    real_served.cluster.kubectl("delete", "pod", "unified", "-n", real_served.namespace, "--timeout=60s", timeout=70)


async def _check_answers(served: Served, unified: str, salt: str) -> None:
    """Handoff, offload and equality for two prompts."""
    answers = []
    for prompt in PROMPTS:
        text = f"{salt} {prompt}"
        before = {m: served.total("decode", m) for m in (BYTES, RECEIVED, LOCAL)}
        objects = served.objects("prefill")
        got = await ask(served.load().url, text)
        after = {m: served.total("decode", m) for m in (BYTES, RECEIVED, LOCAL)}
        assert after[BYTES] > before[BYTES]
        assert after[RECEIVED] - before[RECEIVED] == got["prompt_tokens"]
        assert after[LOCAL] == before[LOCAL], "decode recomputed a prompt"
        stored = served.until("stored objects", lambda o=objects: served.objects("prefill") - o, limit=30)
        assert stored == got["prompt_tokens"] // CHUNK
        alone = await ask(unified, text)
        assert got["ids"] == alone["ids"]
        assert len(set(got["ids"])) >= 20, got["ids"]
        answers.append(got["ids"])
    assert answers[0] != answers[1]


def test_the_canary_proved_the_pair_before_it_served(real_served: Served) -> None:
    """Real engines: what NIXL moved, what LMCache stored, and that the answers are those of one engine."""
    (slice_,) = real_served.object()["status"]["slices"]
    proof = slice_["verified"]
    print(json.dumps(slice_, indent=1))
    assert proof["canary"] == slice_["canary"]["number"] and slice_["canary"]["failures"] == 0
    assert "answers equal those of one engine alone" in proof["handoff"] and " 0 bytes" not in proof["handoff"]
    assert "chunks stored" in proof["offload"]
    assert re.search(r"; [1-9]\d* tokens came back from it", proof["offload"]), "LMCache gave back what it had stored"
    for type_ in ("HandoffVerified", "OffloadVerified"):
        condition = real_served.condition(type_)
        assert (condition["status"], condition["reason"]) == ("True", "Verified"), condition


def test_servers_of_one_slice_find_each_other_with_p2p(real_served: Served) -> None:
    for role in ("prefill", "decode"):
        real_served.until(f"{role} registered", lambda r=role: _status(real_served, r)["p2p_state"] == "registered", 60)
        real_served.until(f"one peer of {role}", lambda r=role: _status(real_served, r)["p2p_peer_count"] == 1, 60)


async def test_answers_through_smg_are_those_of_one_engine(real_served: Served, unified: str) -> None:
    await _check_answers(real_served, unified, "smg")


async def test_an_annotation_that_is_gone_is_named_and_taken_back(real_served: Served) -> None:
    """Real vLLM behind smg answers 200, and decode computes every prompt: only counters show it."""
    chat = Object(real_served.cluster, real_served.namespace)
    (pod,) = chat.pods("prefill")
    load = chat.load(tokens=4)
    async with asking({"chat": load}):
        await asyncio.to_thread(chat.until, "verified replicas", lambda: chat.verified() == [1, 1], NAMED)
        moved = chat.total("decode", COUNT)
        await asyncio.to_thread(chat.until, "handoffs of a minute", lambda: chat.total("decode", COUNT) >= moved + 90, NAMED)
        assert chat.degraded()[:2] == ("False", "AsExpected") and not chat.accusations(), "ordinary load accuses nobody"
        chat.cluster.kubectl("annotate", "pod", pod["metadata"]["name"], "-n", chat.namespace, f"{ANNOTATION}-")
        told = await asyncio.to_thread(chat.named, "SilentFallback")
        print(f"\n{told}")
        assert "Next: " in told and ANNOTATION in told
        found = chat.condition("HandoffVerified")
        assert (found["status"], found["reason"]) == ("False", "SilentFallback"), found
        assert chat.condition("Ready")["reason"] == "SilentFallback"
        assert chat.object()["status"]["handoff"]["fallbackRequests"] >= 5
        chat.cluster.kubectl("annotate", "pod", pod["metadata"]["name"], "-n", chat.namespace, f"{ANNOTATION}=NixlConnector")
        await asyncio.to_thread(chat.named, "AsExpected", NAMED)
        await asyncio.to_thread(chat.ready, NAMED)
    assert not load.failed, load.summary()
    assert chat.condition("HandoffVerified")["status"] == "True"


async def test_an_lmcache_server_that_stays_down_is_named(real_served: Served) -> None:
    """Real vLLM lives on without its server, and the pod is not ready."""
    chat = Object(real_served.cluster, real_served.namespace)
    (pod,) = chat.pods("prefill")
    async with killed(pod["metadata"]["name"], "lmcache"):
        told = await asyncio.to_thread(chat.until, "CacheDown", lambda: findings(chat).get("CacheDown"), NAMED)
    print(f"\n{told}")
    assert pod["metadata"]["name"] in told and "does not answer" in told and "Next: " in told
    assert chat.degraded()[1] in ("CacheDown", "PairLost"), "its pod is not ready, and there is no other prefill"
    await asyncio.to_thread(chat.named, "AsExpected", READY_LIMIT_S)  # the kubelet waits longer from start to start
    await asyncio.to_thread(chat.ready, NAMED)


async def test_answers_through_vllm_router_are_those_of_one_engine(real_served: Served, unified: str) -> None:
    """The router is a live field: its pods change, the engines' do not."""
    engines = {pod["metadata"]["uid"] for role in ("prefill", "decode") for pod in real_served.pods(role)}
    real_served.cluster.apply(example(router__type="vllm-router"), namespace=real_served.namespace)
    proof = real_served.object()["status"]["slices"][0]["verified"]
    real_served.until("only vllm-router pods", lambda: _routers(real_served) == {"vllm-router"}, 240)
    real_served.ready(READY_LIMIT_S)
    # Another router is another path: its canary runs again, and its requests must not stand among ours.
    real_served.until(
        "a proof of the new router", lambda: real_served.object()["status"]["slices"][0]["verified"]["about"] != proof["about"], 240
    )
    await _check_answers(real_served, unified, "vllm-router")
    assert engines == {pod["metadata"]["uid"] for role in ("prefill", "decode") for pod in real_served.pods(role)}


def findings(served: Served) -> dict[str, str]:
    found = served.object()["status"].get("handoff", {}).get("findings", [])
    return {one["reason"]: one["message"] for one in found}


def _routers(served: Served) -> set[str]:
    return {pod["spec"]["containers"][0]["command"][0] for pod in served.pods("router")}


def _status(served: Served, role: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(served.metrics(served.pods(role)[0], 8080, "status"))
    return found
