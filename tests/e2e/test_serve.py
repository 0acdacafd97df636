"""One `kubectl apply` runs the whole topology on real nodes, serves, and leaves nothing when it goes."""

from __future__ import annotations

import time

from served import Served

LOCAL = 'vllm:prompt_tokens_by_source_total{source="local_compute"}'
RECEIVED = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
SUCCESS = "vllm:request_success_total"


def _containers(pod: dict) -> set[str]:
    statuses = [*pod["status"].get("initContainerStatuses", []), *pod["status"]["containerStatuses"]]
    return {status["name"] for status in statuses if status["ready"] and "running" in status["state"]}


async def test_five_processes_serve_two_hundred_chats_and_go(served: Served) -> None:
    served.apply(lmcache={"l1Size": "1Gi"})
    found = served.ready()
    assert found["status"]["url"] == f"http://chat.{served.namespace}.svc"
    assert "finalizers" not in found["metadata"]
    for role in ("prefill", "decode"):
        pods = served.pods(role)
        assert [_containers(pod) for pod in pods] == [{"engine", "lmcache"}], role
    # Ready needs one router that sees both roles; the other one follows.
    served.until("both routers", lambda: [_containers(pod) for pod in served.pods("router")] == [{"router"}, {"router"}])

    load = served.load(tokens=16)
    await load.burst(200, concurrency=8)
    assert not load.failed, load.summary()
    assert len(load.answers) == 200
    prompt_tokens = sum(answer.prompt_tokens for answer in load.answers)
    assert served.total("prefill", SUCCESS) == 200
    assert served.total("decode", SUCCESS) == 200
    assert served.total("prefill", LOCAL) == prompt_tokens
    assert served.total("decode", RECEIVED) == prompt_tokens
    assert served.total("decode", LOCAL) == 0
    assert served.total("decode", "vllm:nixl_bytes_transferred_count") == 200
    slices = {pod["metadata"]["labels"]["pdserve.dev/slice"] for pod in served.pods()}
    assert len(slices) == 1

    begin = time.monotonic()
    served.cluster.kubectl("delete", "pdd", "chat", "-n", served.namespace, "--wait=true", timeout=30)
    kinds = "pdp,deploy,svc,pdb,netpol,role,rolebinding,controllerrevision,pods"
    served.cluster.kubectl("wait", "--for=delete", "pods", "--all", "-n", served.namespace, "--timeout=90s", timeout=100)
    left = served.cluster.json("get", kinds, "-n", served.namespace)["items"]
    assert not left, [f"{item['kind']} {item['metadata']['name']}" for item in left]
    print(f"everything gone after {time.monotonic() - begin:.1f} s")
    served.cluster.kubectl("delete", "namespace", served.namespace, "--timeout=60s", timeout=70)


async def test_the_object_goes_on_serving_while_the_operator_is_down(served: Served) -> None:
    """Invariant I11."""
    served.apply(prefill={"replicas": 2}, decode={"replicas": 2})
    served.ready()
    served.cluster.kubectl("scale", "deployment", "pd-operator", "-n", "pd-operator", "--replicas=0")
    try:
        load = served.load()
        await load.burst(20, concurrency=4)
        victim = served.pods("decode")[0]["metadata"]["name"]
        served.cluster.kubectl("delete", "pod", victim, "-n", served.namespace, "--wait=false")
        await load.burst(100, concurrency=4)
        assert not load.failed, load.summary()
    finally:
        served.cluster.kubectl("scale", "deployment", "pd-operator", "-n", "pd-operator", "--replicas=1")
        served.cluster.kubectl("rollout", "status", "deployment/pd-operator", "-n", "pd-operator", "--timeout=90s", timeout=100)
