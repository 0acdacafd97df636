"""Invariant I5 on real pods and the real router: a slice serves once its handoff was seen; each way of breaking it has its name.

What breaks is an engine stand-in that lies as real ones do: every pod is Ready, most answers are 200 and right.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demo import chat
from pd_operator.core.canary_case import REQUESTS
from pd_operator.core.verification import TRIES
from served import Served
from served.light import CPU, cached, faulty

pytestmark = pytest.mark.timeout(900)
PAGE = Path(__file__).parents[2] / "docs" / "verification.md"
LIMIT_S = 420.0  # three canaries of some ten seconds each, with their pauses, for all broken objects at once on two cores
SUCCESS = "vllm:request_success_total"
ANNOTATION = "smg.ai/kv-connector"


def handoffs(served: Served) -> float:
    """Requests that the router counts as handed over: what it decided, not what happened."""
    return sum(
        chat.total(served.metrics(pod, 29000), 'smg_pd_kv_connector_mode_total{mode="nixl"}') for pod in served.pods("router")
    )


def commands() -> list[list[str]]:
    """The kubectl commands of docs/verification.md, in order: what was proven, the log, and another run."""
    found = [shlex.split(line) for line in re.findall(r"^kubectl (.*)$", PAGE.read_text(), flags=re.MULTILINE)]
    assert [words[0] for words in found] == ["get", "logs", "delete"]
    return found


def fronted(served: Served) -> bool:
    return any("pdserve.dev/front" in pod["metadata"]["labels"] for pod in served.pods("router"))


def slice_of(served: Served) -> dict[str, Any]:
    slices = served.object().get("status", {}).get("slices") or [{}]
    return dict(slices[0])


def jobs(served: Served) -> list[str]:
    labels = f"pdserve.dev/deployment={served.name},app.kubernetes.io/component=canary"
    items = served.cluster.json("get", "jobs", "-n", served.namespace, "-l", labels)["items"]
    return sorted(item["metadata"]["name"] for item in items)


async def test_a_slice_serves_once_its_handoff_was_seen(served: Served) -> None:
    spec: dict[str, Any] = {"verification": "Required", "lmcache": {"l1Size": "1Gi"}, "router": {"replicas": 1}}
    served.apply(**spec)
    served.until("a router pod", lambda: served.pods("router"))
    assert not fronted(served), "no request may reach a slice that nothing is proven of"
    served.until("a proof", lambda: "verified" in slice_of(served) or fronted(served), 240)
    proof = slice_of(served)["verified"]
    served.ready()
    handoff, offload = served.condition("HandoffVerified"), served.condition("OffloadVerified")
    assert (handoff["status"], offload["status"]) == ("True", "True"), (handoff, offload)
    # A canary before the one that proved it may have failed on a busy machine, and sent less.
    assert REQUESTS <= served.total("decode", SUCCESS) <= REQUESTS * proof["canary"], "the canary's requests, and nobody else's"
    (first,) = jobs(served)
    shown, log = (served.cluster.kubectl(*command, "-n", served.namespace) for command in commands()[:2])
    assert json.loads(shown)["evidence"] == proof["evidence"]
    assert "handoff: Verified" in log and "offload: Verified" in log
    load = served.load()
    await load.burst(20, concurrency=4)
    assert not load.failed, load.summary()

    assert first in served.cluster.kubectl(*commands()[2], "-n", served.namespace)
    again = served.until("another proof", lambda: (p := slice_of(served)["verified"])["canary"] > proof["canary"] and p, 240)
    assert again["evidence"] != proof["evidence"]
    assert served.condition("Ready")["status"] == "True" and fronted(served)

    # A revision that hands nothing over leaves the one that does alone.
    before = served.object()["status"]["currentRevision"]
    served.apply(**spec, prefill=faulty(no_transfer=True))
    served.until("VerificationFailed", lambda: served.condition("Progressing").get("reason") == "VerificationFailed", LIMIT_S)
    status = served.object()["status"]
    assert status["currentRevision"] == before and served.condition("Ready")["status"] == "True"
    await load.burst(20, concurrency=4)
    assert not load.failed, load.summary()


# name -> (spec, condition, reason, words of its message)
BROKEN: dict[str, tuple[dict[str, Any], str, str, list[str]]] = {
    "nobyte": ({"prefill": faulty(no_transfer=True)}, "HandoffVerified", "NoTransfer", ["no byte came to decode", "itself"]),
    "refuses": ({"prefill": faulty(refuse_transfer=True)}, "HandoffVerified", "TransferFailed", ["transfers to decode failed"]),
    "bytes": ({"prefill": faulty(wrong_blob=True)}, "HandoffVerified", "OutputDiffers", ["3 of 3 answers differ"]),
    "errors": ({"decode": faulty(error_status=500)}, "HandoffVerified", "RequestFailed", ["answered 5"]),
    "stale": (
        {"prefill": {**CPU, "env": [{"name": "STANDIN_VERSION", "value": "0.31.0"}]}},
        "HandoffVerified",
        "VersionMismatch",
        ["0.31.0 and 0.32.0"],
    ),
    "unstored": (
        cached(prefill=faulty(no_store=True)),
        "OffloadVerified",
        "NotSubmitting",
        ["3 lookups", "0 of"],
    ),
    "address": (
        {"prefill": faulty(wrong_address=True)},
        "HandoffVerified",
        "TransferFailed",
        ["transfers to decode failed", "itself"],
    ),
    "computes": ({"decode": faulty(no_transfer=True)}, "HandoffVerified", "NoTransfer", ["no byte came to decode", "itself"]),
    "lazy": (
        cached(prefill=faulty(lazy_offload=100)),
        "OffloadVerified",
        "NotSubmitting",
        ["3 lookups", "0 of"],
    ),
    "lonely": (
        cached(server_faults={"unregistered": True}, lmcache={"p2p": {"enabled": True}}),
        "OffloadVerified",
        "PeersMissing",
        ["is unregistered and sees 0 of 1 others", "2 of 2 servers likewise"],
    ),
    # The annotation goes while the engine starts: the router never sees a connector, and answers 200.
    "passed": (
        {"prefill": {**CPU, "env": [{"name": "STANDIN_START_DELAY_S", "value": "15"}]}},
        "HandoffVerified",
        "SilentFallback",
        ["router passed 3 requests", "itself"],
    ),
}


def test_what_is_broken_stays_dark_and_says_why(served: Served) -> None:
    all_of_them = {name: replace(served, name=name) for name in BROKEN}
    for name, one in all_of_them.items():
        one.apply(**{"prefill": CPU, "decode": CPU, "verification": "Required", "router": {"replicas": 1}} | BROKEN[name][0])
    passed = all_of_them["passed"]
    pod = passed.until("its prefill pod", lambda: passed.pods("prefill"))[0]["metadata"]["name"]
    served.cluster.kubectl("annotate", "pod", pod, f"{ANNOTATION}-", "-n", served.namespace)
    # One role is missing: the router is never Ready, so no request is sent at all.
    lame = replace(served, name="lame")
    lame.apply(prefill=CPU, decode=faulty(unhealthy=True), verification="Required", router={"replicas": 1})
    # LMCache is looked for where it is not: the engine does not come up.
    astray = replace(served, name="astray")
    astray.apply(**cached(prefill=faulty(cache_port=5999), decode=CPU), verification="Required", router={"replicas": 1})

    for name, one in all_of_them.items():
        _, type_, reason, words = BROKEN[name]
        found = one.until(
            f"{name}: {type_}=False {reason}",
            lambda o=one, t=type_, r=reason: (c := o.condition(t)).get("status") == "False" and c["reason"] == r and c,
            LIMIT_S,
        )
        assert all(word in found["message"] for word in [*words, "failures in a row). Next: "]), (name, found)
        ready, progress = one.condition("Ready"), one.condition("Progressing")
        assert (ready["status"], ready["reason"]) == ("False", reason), (name, ready)
        assert (progress["status"], progress["reason"]) == ("False", "VerificationFailed"), (name, progress)
        assert not fronted(one), f"{name} was let to the front door"
        assert slice_of(one)["canary"]["failures"] >= TRIES and "verified" not in slice_of(one), name
        assert jobs(one) == [f"{slice_of(one)['name']}-canary-{slice_of(one)['canary']['number']}"], "older ones are gone"
    assert handoffs(all_of_them["nobyte"]) >= REQUESTS, "the router says of every request that it was handed over"
    assert not handoffs(passed)
    assert not jobs(lame) and not fronted(lame)
    found = astray.until("CrashLoop", lambda: (c := astray.condition("PrefillReady")).get("reason") == "CrashLoop" and c, LIMIT_S)
    assert "LMCache server 127.0.0.1:5999 not reachable" in found["message"] and "logs" in found["message"], found
    assert astray.condition("Ready")["reason"] == "CrashLoop" and not jobs(astray) and not fronted(astray)
    assert lame.condition("Ready")["reason"] in ("Starting", "NotDiscovered"), lame.condition("Ready")


def test_what_forbids_a_canary_is_named(served: Served) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "no-jobs"},
        "spec": {"hard": {"count/jobs.batch": "0"}},
    }
    served.cluster.apply(quota, namespace=served.namespace)
    served.apply(prefill=CPU, decode=CPU, verification="Required", router={"replicas": 1})
    found = served.until("CanaryForbidden", lambda: (c := served.condition("HandoffVerified")).get("status") == "False" and c, 180)
    assert found["reason"] == "CanaryForbidden" and "exceeded quota: no-jobs" in found["message"], found
    assert not fronted(served)
    served.cluster.kubectl("delete", "resourcequota", "no-jobs", "-n", served.namespace)
    served.ready()
