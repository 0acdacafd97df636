"""What goes wrong with pods on real nodes is named, with what to do about it."""

from __future__ import annotations

from typing import Any

import pytest

from served import Served

CASES: dict[str, tuple[dict[str, Any], str, str, list[str]]] = {
    "crash": (
        {"prefill": {"args": ["--no-such-flag"]}},
        "PrefillReady",
        "CrashLoop",
        ["engine", "exit code 2", "logs", "--previous"],
    ),
    "image": (
        {"engine": {"image": "localhost/nobody/has-this:1"}},
        "DecodeReady",
        "ImageError",
        ["engine", "cannot be pulled", "correct the image"],
    ),
    "capacity": (
        {"decode": {"resources": {"limits": {"nvidia.com/gpu": 64}}}},
        "DecodeReady",
        "Unschedulable",
        ["Insufficient nvidia.com/gpu"],
    ),
    "secret": (
        {"engine": {"env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "token"}}}]}},
        "Accepted",
        "MissingReference",
        ["Secret absent", "spec.engine.env[HF_TOKEN]", "create it"],
    ),
    "claim": (
        {"model": {"uri": "pvc://absent/llama"}},
        "Accepted",
        "MissingReference",
        ["PersistentVolumeClaim absent", "spec.model.uri"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_cause_is_named(served: Served, case: str) -> None:
    spec, type_, reason, words = CASES[case]
    served.apply(**spec)
    condition = served.until(
        f"{type_} with {reason}", lambda: (c := served.condition(type_)).get("reason") == reason and c, limit=180
    )
    assert condition["status"] == "False"
    for word in words:
        assert word in condition["message"], condition["message"]
    ready = served.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", reason), ready


def test_a_key_that_a_secret_lacks_is_named(served: Served) -> None:
    served.cluster.kubectl("create", "secret", "generic", "hub", "--from-literal=other=x", "-n", served.namespace)
    served.apply(engine={"env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}]})
    condition = served.until("ConfigError", lambda: (c := served.condition("PrefillReady")).get("reason") == "ConfigError" and c)
    assert "token" in condition["message"]
    assert "hub" in condition["message"]


async def test_a_corrected_spec_serves(served: Served) -> None:
    served.apply(prefill={"args": ["--no-such-flag"]})
    served.until("CrashLoop", lambda: served.condition("PrefillReady").get("reason") == "CrashLoop", limit=180)
    served.apply()
    served.ready()
    load = served.load()
    await load.burst(10, concurrency=2)
    assert not load.failed, load.summary()
