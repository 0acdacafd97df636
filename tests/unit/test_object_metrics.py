"""Metrics of what status says: one series for each condition of an object, and none of an object that is gone."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from pd_operator.controller.object_metrics import ObjectMetrics, Shown

KEY = ("team", "chat")


def condition(type_: str, status: str, reason: str) -> dict[str, str]:
    return {"type": type_, "status": status, "reason": reason, "message": "never a label"}


def status(**changes: Any) -> dict[str, Any]:
    role = {"desiredReplicas": 3, "replicas": 2, "readyReplicas": 1, "updatedReplicas": 2, "gpus": 4}
    return {
        "servingSlices": 1,
        "slices": [{"state": "Serving"}, {"state": "Dark"}],
        "roles": [{"name": "prefill", **role}, {"name": "decode", **role}],
        "conditions": [condition("Ready", "True", "Ready"), condition("Accepted", "True", "Accepted")],
        **changes,
    }


def series(shown: Shown) -> set[str]:
    """Lines of the page without help and type."""
    registry = CollectorRegistry()
    registry.register(ObjectMetrics(shown))
    return {line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")}


def test_what_status_says() -> None:
    shown = Shown()
    shown.put(KEY, status(excludedDomains=[{"name": "rack-1"}]))
    found = series(shown)
    own = 'name="chat",namespace="team"'
    assert f'pd_operator_pddeployment_condition{{{own},reason="Ready",status="True",type="Ready"}} 1.0' in found
    assert f"pd_operator_pddeployment_serving_slices{{{own}}} 1.0" in found
    assert f'pd_operator_pddeployment_slices{{{own},state="Dark"}} 1.0' in found
    assert f"pd_operator_pddeployment_excluded_domains{{{own}}} 1.0" in found
    counts = {"desired": 3, "existing": 2, "ready": 1, "updated": 2}
    for state, count in counts.items():
        assert f'pd_operator_pddeployment_replicas{{{own},role="decode",state="{state}"}} {count}.0' in found
    assert f'pd_operator_pddeployment_gpus{{{own},role="prefill"}} 4.0' in found
    assert not [line for line in found if "never a label" in line]


def test_a_condition_that_turns_is_one_series() -> None:
    shown = Shown()
    shown.put(KEY, status())
    count = len(series(shown))
    shown.put(KEY, status(conditions=[condition("Ready", "False", "CrashLoop"), condition("Accepted", "True", "Accepted")]))
    found = series(shown)
    assert len(found) == count
    assert [line for line in found if 'type="Ready"' in line] == [
        'pd_operator_pddeployment_condition{name="chat",namespace="team",reason="CrashLoop",status="False",type="Ready"} 1.0'
    ]


def test_a_spec_that_cannot_be_read_leaves_the_counts() -> None:
    shown = Shown()
    refused = {"conditions": [condition("Ready", "False", "InvalidSpec")]}
    shown.put(("team", "new"), refused)
    assert len(series(shown)) == 1, "nothing but the condition is known of one that was never accepted"
    shown.put(KEY, status())
    shown.put(KEY, refused)
    found = series(shown)
    assert 'pd_operator_pddeployment_serving_slices{name="chat",namespace="team"} 1.0' in found
    assert not [line for line in found if 'type="Accepted"' in line]


def test_pools_and_an_object_that_goes() -> None:
    shown = Shown()
    shown.put(KEY, status())
    shown.put_pool(KEY, "decode", {"conditions": [condition("ScalingLimited", "True", "MaxGPUs")]})
    own = 'name="chat",namespace="team",reason="MaxGPUs",role="decode",status="True",type="ScalingLimited"'
    assert f"pd_operator_pdpool_condition{{{own}}} 1.0" in series(shown)
    shown.forget(KEY)
    assert series(shown) == set()
