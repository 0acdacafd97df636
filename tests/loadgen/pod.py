"""The generator's pod: a trace goes in, AIPerf sends it at its times, its records and its summary come out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster import images
from cluster.handle import Cluster
from loadgen import installed

NAME = "loadgen"
START_S = 120.0  # of the pod, and of AIPerf's processes on a machine with much other work
REQUEST_LIMIT_S = 120


@dataclass(frozen=True)
class Sent:
    """One request of a trace: seconds from its begin, prompt, tokens to generate."""

    at: float
    prompt: str
    tokens: int


@dataclass(frozen=True)
class Seen:
    """One request as AIPerf saw it. Seconds; `begin` since 1970. `problem` is "" only for a complete answer."""

    begin: float
    prompt_tokens: int
    tokens: int
    ttft: float
    itl: float  # mean gap
    problem: str = ""


@dataclass(frozen=True)
class Summary:
    """What AIPerf says of a run, and its requests in order of their begin."""

    numbers: dict[str, Any]
    requests: tuple[Seen, ...]

    def number(self, name: str, statistic: str = "avg") -> float:
        """A number of its JSON summary, e.g. time_to_first_token p50 (ms)."""
        return float(self.numbers[name][statistic])

    @property
    def failed(self) -> list[Seen]:
        """Requests without a complete answer."""
        return [one for one in self.requests if one.problem]

    def within(self, ttft: float, itl: float) -> tuple[float, float, float]:
        """Shares of the requests within the TTFT limit, within the ITL limit, within both (seconds)."""
        first = [not one.problem and one.ttft <= ttft for one in self.requests]
        gaps = [not one.problem and one.itl <= itl for one in self.requests]
        both = [a and b for a, b in zip(first, gaps, strict=True)]
        first_share, gap_share, share = (sum(one) / len(self.requests) for one in (first, gaps, both))
        return first_share, gap_share, share


class Generator:
    """A pod that can run AIPerf. Its namespace must allow hostPath."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace

    def run(self, url: str, model: str, trace: Sequence[Sent]) -> Summary:
        """Send the trace to `url` at its times and wait for its end. Raises KubectlError with AIPerf's own words."""
        lines = (json.dumps({"timestamp": round(1000 * r.at), "text_input": r.prompt, "output_length": r.tokens}) for r in trace)
        self._exec("sh", "-c", "rm -rf /tmp/run && mkdir /tmp/run && cat > /tmp/run/trace.jsonl", stdin="\n".join(lines) + "\n")
        flags = [
            *("--model", model, "--url", url, "--endpoint-type", "chat", "--streaming"),
            *("--input-file", "/tmp/run/trace.jsonl", "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"),
            *("--tokenizer", installed.TOKENIZER, "--use-server-token-count"),
            *("--extra-inputs", "ignore_eos:true", "--use-legacy-max-tokens"),
            *("--connection-reuse-strategy", "never", "--request-timeout-seconds", str(REQUEST_LIMIT_S)),
            *("--no-server-metrics", "--no-gpu-telemetry", "--ui", "none", "--workers-max", "1", "--record-processors", "1"),
            *("--artifact-dir", "/tmp/run/out", "--export-level", "records"),
        ]
        self._exec("python3", "-m", "aiperf", "profile", *flags, timeout=START_S + trace[-1].at + REQUEST_LIMIT_S)
        numbers = json.loads(self._exec("cat", "/tmp/run/out/profile_export_aiperf.json"))
        records = [json.loads(line) for line in self._exec("cat", "/tmp/run/out/profile_export.jsonl").splitlines()]
        requests = sorted((_seen(record, trace) for record in records), key=lambda one: one.begin)
        assert len(requests) == len(trace), f"AIPerf tells of {len(requests)} requests, and the trace has {len(trace)}"
        return Summary(numbers, tuple(requests))

    def _exec(self, *argv: str, stdin: str | None = None, timeout: float = 60) -> str:
        interactive = ["-i"] if stdin is not None else []
        return self._cluster.kubectl("exec", *interactive, NAME, "-n", self._namespace, "--", *argv, stdin=stdin, timeout=timeout)


def _seen(record: dict[str, Any], trace: Sequence[Sent]) -> Seen:
    """One line of profile_export.jsonl. A cut stream ends without an error: the number of tokens tells."""
    told, metrics = record["metadata"], record.get("metrics") or {}
    value = lambda name: float((metrics.get(name) or {}).get("value", 0.0))  # noqa: E731
    tokens, wanted = int(value("usage_completion_tokens")), trace[told["session_num"]].tokens
    problem = json.dumps(record["error"])[:300] if record.get("error") else ""
    if not problem and (tokens != wanted or told.get("was_cancelled")):
        problem = f"{tokens} tokens, asked for {wanted}"
    begin = told["request_start_ns"] / 1e9
    prompt, ttft, itl = int(value("usage_prompt_tokens")), value("time_to_first_token") / 1e3, value("inter_token_latency") / 1e3
    return Seen(begin, prompt, tokens, ttft, itl, problem)


@contextmanager
def running(cluster: Cluster, namespace: str) -> Iterator[Generator]:
    """The pod, for the length of the context, in a namespace of its own."""
    cluster.kubectl("create", "namespace", namespace)
    volume = {"name": "installed", "hostPath": {"path": str(installed.ensure()), "type": "Directory"}}
    environment = {
        "PYTHONPATH": "/opt/loadgen/packages",
        "HF_HOME": "/opt/loadgen",
        "HF_HUB_OFFLINE": "1",
        "HOME": "/tmp",
        "USER": "loadgen",
    }
    container = {
        "name": "aiperf",
        "image": images.BASE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "workingDir": "/tmp",
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "volumeMounts": [{"name": "installed", "mountPath": "/opt/loadgen", "readOnly": True}],
    }
    identity = {"runAsUser": 65532, "runAsGroup": 65532, "runAsNonRoot": True}
    spec = {"containers": [container], "volumes": [volume], "securityContext": identity, "terminationGracePeriodSeconds": 0}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": NAME}, "spec": spec}, namespace=namespace)
    try:
        cluster.kubectl(
            "wait", "pod", NAME, "-n", namespace, "--for=condition=Ready", f"--timeout={START_S:.0f}s", timeout=START_S + 10
        )
        yield Generator(cluster, namespace)
    finally:
        cluster.kubectl("delete", "namespace", namespace, "--wait=false", check=False)
