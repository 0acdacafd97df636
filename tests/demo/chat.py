"""One chat request through the front Service, and the counters of all engines before and after it."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from typing import Any

from cluster.handle import Cluster, KubectlError
from cluster.progress import say

ANSWER_LIMIT_S = 120.0  # the first request through a new pair of engines pays for the NIXL handshake
CONNECT_LIMIT_S = 30.0  # kube-proxy learns of a new endpoint a moment after it is ready
COUNTERS_LIMIT_S = 30.0
MAX_TOKENS = 24
# Long enough for one chunk of LMCache (256 tokens) with any tokenizer. A new number comes before it, or a second run would find
# everything in the caches and prove nothing.
PROMPT = "Explain step by step how a request moves from the prefill engine to the decode engine. " * 24

BYTES = "bytes pulled over NIXL"
OBJECTS = "objects on its LMCache server"
# Metric of vLLM, with the label that matters -> what people call it. vllm/v1/metrics/loggers.py and nixl/stats.py.
ENGINE = {
    'vllm:prompt_tokens_by_source_total{source="local_compute"}': "prompt tokens computed here",
    'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}': "prompt tokens received",
    "vllm:nixl_bytes_transferred_sum": BYTES,
    "vllm:generation_tokens_total": "tokens generated",
}
Counters = dict[str, dict[str, float]]  # pod -> counter -> value
Moved = dict[str, dict[str, tuple[float, float]]]  # pod -> counter -> before and after


def show(cluster: Cluster, namespace: str, name: str) -> None:
    """Ask, print the answer, who served it, and the counters that moved.

    Raises RuntimeError when the answer is not complete, or when no counter shows that state went from prefill to decode.
    """
    before = counters(cluster, namespace, name)
    address = cluster.kubectl("get", "service", name, "-n", namespace, "-o", "jsonpath={.spec.clusterIP}").strip()
    say(f"POST http://{address}/v1/chat/completions (Service {name}, port 80)")
    begin = time.monotonic()
    answer = ask(f"http://{address}/v1/chat/completions", name)
    say(f"answered in {time.monotonic() - begin:.2f} s")
    choice, usage = answer["choices"][0], answer["usage"]
    if choice["finish_reason"] not in ("length", "stop") or not 0 < usage["completion_tokens"] <= MAX_TOKENS:
        raise RuntimeError(f"the answer is not complete: {json.dumps(answer)[:500]}")
    print(f"\nanswer ({usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} generated, {choice['finish_reason']}):")
    print(f"  {choice['message']['content'].strip()!r}\n")
    moved = _settled(cluster, namespace, name, before)
    for pod, changes in moved.items():
        print(f"{pod}")
        for counter, (old, new) in changes.items():
            print(f"  {counter:34} {old:>12.0f} -> {new:>12.0f}  (+{new - old:.0f})")
    print(f"\nprefill by {_who(moved, 'prefill')}, decode by {_who(moved, 'decode')}\n")


def ask(url: str, model: str) -> dict[str, Any]:
    """One chat completion. Raises RuntimeError on any status but 200, TimeoutError when the Service never accepts a connection."""
    body = {
        "model": model,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "messages": [{"role": "user", "content": f"{time.time_ns()}. {PROMPT}"}],
    }
    deadline = time.monotonic() + CONNECT_LIMIT_S
    while True:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            # No proxy of the environment: the address is this machine's own cluster.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=ANSWER_LIMIT_S) as response:
                return dict(json.load(response))
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{url}: status {error.code}: {error.read()[:500]!r}") from None
        except urllib.error.URLError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {CONNECT_LIMIT_S:.0f} s for {url} to accept a connection: {error.reason}") from None
            time.sleep(0.5)


def counters(cluster: Cluster, namespace: str, name: str) -> Counters:
    """The counters of every engine pod, read through the API server."""
    pods = cluster.json("get", "pods", "-n", namespace, "-l", f"pdserve.dev/deployment={name},app.kubernetes.io/component=engine")
    found: Counters = {}
    for pod in pods["items"]:
        if pod["metadata"].get("deletionTimestamp"):
            continue
        title = f"{pod['metadata']['labels']['pdserve.dev/role']} {pod['metadata']['name']}"
        text = _read(cluster, namespace, pod, 8000, "metrics")
        found[title] = {label: total(text, metric) for metric, label in ENGINE.items()}
        if any(c["name"] == "lmcache" for c in pod["spec"].get("initContainers", [])):
            status = json.loads(_read(cluster, namespace, pod, 8080, "status") or "{}")
            found[title][OBJECTS] = float(status.get("storage_manager", {}).get("l1_manager", {}).get("total_object_count", 0))
    return found


def total(text: str, metric: str) -> float:
    """Sum over a metric's series (Prometheus' text form), of those with the label in `name{label="value"}`. Absent is 0."""
    name, _, label = metric.rstrip("}").partition("{")
    series = re.findall(rf"^{re.escape(name)}(\{{[^}}]*\}})? (\S+)", text, flags=re.M)
    return sum(float(value) for labels, value in series if label in labels)


def _read(cluster: Cluster, namespace: str, pod: dict[str, Any], port: int, path: str) -> str:
    url = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}:{port}/proxy/{path}"
    try:
        return cluster.kubectl("get", "--raw", url)
    except KubectlError as error:
        raise RuntimeError(f"cannot read /{path} of {pod['metadata']['name']}, port {port}: {error}") from None


def _settled(cluster: Cluster, namespace: str, name: str, before: Counters) -> Moved:
    """Changes since `before`, once they show a handoff and, with LMCache, a store.

    Raises RuntimeError when they do not within COUNTERS_LIMIT_S seconds.
    """
    deadline = time.monotonic() + COUNTERS_LIMIT_S
    while True:
        after = counters(cluster, namespace, name)
        moved = {pod: changes for pod, values in after.items() if (changes := _grown(before.get(pod, {}), values))}
        missing = []
        if not _moved(moved, "decode", BYTES):
            missing.append("no state went from prefill to decode")
        if any(OBJECTS in values for values in after.values()) and not _moved(moved, "prefill", OBJECTS):
            missing.append("the prefill engine's LMCache server stored nothing")
        if not missing:
            return moved
        if time.monotonic() > deadline:
            raise RuntimeError(f"answered, but after {COUNTERS_LIMIT_S:.0f} s {' and '.join(missing)}: {json.dumps(moved)}")
        time.sleep(1)


def _grown(before: dict[str, float], after: dict[str, float]) -> dict[str, tuple[float, float]]:
    return {counter: (before.get(counter, 0.0), value) for counter, value in after.items() if value > before.get(counter, 0.0)}


def _moved(moved: Moved, role: str, counter: str) -> bool:
    return any(counter in changes for pod, changes in moved.items() if pod.startswith(role))


def _who(moved: Moved, role: str) -> str:
    return " and ".join(pod.removeprefix(f"{role} ") for pod in moved if pod.startswith(role)) or "nobody"
