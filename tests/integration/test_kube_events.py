"""The event recorder against a real API server."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cluster.handle import Cluster
from faults.objects import service
from pd_operator.kube import events as events_module
from pd_operator.kube.client import KubeClient
from pd_operator.kube.events import BURST, EventRecorder


async def recorded(client: KubeClient, namespace: str) -> list[dict[str, Any]]:
    found = await client.list("Event", namespace)
    return [event for event in found if event.get("reportingController") == events_module.CONTROLLER]


async def test_an_event_is_written_and_kubectl_shows_it(client: KubeClient, control_plane: Cluster, namespace: str) -> None:
    obj = await client.apply(service(namespace, "chat"))
    recorder = EventRecorder(client, "pd-operator-0")
    await recorder.event(obj, "Warning", "ImageError", "engine image cannot be pulled")
    (event,) = await recorded(client, namespace)
    assert (event["type"], event["reason"], event["note"]) == ("Warning", "ImageError", "engine image cannot be pulled")
    assert event["regarding"]["uid"] == obj["metadata"]["uid"]
    assert event["reportingInstance"] == "pd-operator-0"
    described = control_plane.kubectl("describe", "service", "chat", "-n", namespace)
    assert "ImageError" in described


async def test_a_repeated_event_becomes_a_series_and_another_note_a_new_event(client: KubeClient, namespace: str) -> None:
    obj = await client.apply(service(namespace, "chat"))
    recorder = EventRecorder(client, "pd-operator-0")
    for _ in range(3):
        await recorder.event(obj, "Normal", "Ready", "serves")
    (event,) = await recorded(client, namespace)
    assert event["series"]["count"] == 3
    await recorder.event(obj, "Normal", "Ready", "serves again")
    await recorder.event(obj, "Normal", "Other", "serves")
    assert len(await recorded(client, namespace)) == 3


async def test_a_series_whose_event_expired_starts_anew(client: KubeClient, namespace: str) -> None:
    obj = await client.apply(service(namespace, "chat"))
    recorder = EventRecorder(client, "pd-operator-0")
    await recorder.event(obj, "Normal", "Ready", "serves")
    (event,) = await recorded(client, namespace)
    await client.delete("Event", namespace, event["metadata"]["name"], uid=event["metadata"]["uid"])
    await recorder.event(obj, "Normal", "Ready", "serves")
    assert len(await recorded(client, namespace)) == 1


async def test_an_object_that_flaps_is_limited(client: KubeClient, namespace: str) -> None:
    obj = await client.apply(service(namespace, "chat"))
    recorder = EventRecorder(client, "pd-operator-0")
    for number in range(BURST + 10):
        await recorder.event(obj, "Normal", "Flaps", f"note {number}")
    assert len(await recorded(client, namespace)) == BURST
    other = await client.apply(service(namespace, "other"))
    await recorder.event(other, "Normal", "Ready", "has a budget of its own")
    assert len(await recorded(client, namespace)) == BURST + 1


async def test_a_long_note_is_cut(client: KubeClient, namespace: str) -> None:
    obj = await client.apply(service(namespace, "chat"))
    await EventRecorder(client, "pd-operator-0").event(obj, "Normal", "Long", "x" * 5000)
    (event,) = await recorded(client, namespace)
    assert len(event["note"]) == 1024


async def test_a_refused_event_is_logged_and_does_not_raise(
    client: KubeClient, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    obj = await client.apply(service(namespace, "chat"))
    with caplog.at_level(logging.WARNING):
        await EventRecorder(client, "pd-operator-0").event(obj, "Normal", "not a reason" * 50, "too long a reason")
    assert "cannot record event" in caplog.text
    assert await recorded(client, namespace) == []
