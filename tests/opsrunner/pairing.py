"""Invariant I3 read off a recording: what a router could ever have paired, and when the front door led where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from opsrunner.api import Object
from opsrunner.recording import Recording
from opsrunner.state import router_selectors, selects
from pd_operator.core.names import COMPONENT, DEPLOYMENT, FRONT, REVISION, ROLE, SLICE

World = Mapping[tuple[str, str], Object]


def labels(obj: Object) -> dict[str, str]:
    """Labels of an object."""
    return dict(obj["metadata"].get("labels") or {})


def is_ready(pod: Object) -> bool:
    """Ready, and not being deleted: what an EndpointSlice would list as ready."""
    conditions = {c["type"]: c["status"] for c in pod.get("status", {}).get("conditions", [])}
    return conditions.get("Ready") == "True" and not pod["metadata"].get("deletionTimestamp")


def assert_never_paired(recording: Recording, name: str) -> int:
    """No router pod ever selected an engine of another revision, nor would have, whatever lived at the same time.

    Also each engine that a role's selector takes is of that role. Returns the number of (router, engine) pairs looked at.
    """
    seen = [e.object for e in recording.events("Pod") if e.labels.get(DEPLOYMENT) == name]
    routers = {p["metadata"]["uid"]: p for p in seen if labels(p).get(COMPONENT) == "router"}
    engines = {(p["metadata"]["uid"], str(labels(p))): p for p in seen if labels(p).get(COMPONENT) == "engine"}
    assert routers and engines
    for router in routers.values():
        for flag, selector in router_selectors(router).items():
            for engine in engines.values():
                if selects(selector, labels(engine)):
                    assert labels(engine)[REVISION] == labels(router)[REVISION], (
                        router["metadata"]["name"],
                        engine["metadata"]["name"],
                    )
                    assert labels(engine)[SLICE] == labels(router)[SLICE]
                    assert f"--{labels(engine)[ROLE]}-selector" == flag
    return len(routers) * len(engines)


def worlds(recording: Recording, name: str) -> Iterator[tuple[Any, World]]:
    """All pods and Deployments of a PDDeployment, and itself, after each event."""
    return recording.states("Pod", "Deployment", "PDDeployment", name=name)


def routers(world: World, name: str, *, front: bool | None = None) -> list[Object]:
    """Router pods, those with the front label only when asked."""
    found = [o for (kind, _), o in world.items() if kind == "Pod" and labels(o).get(COMPONENT) == "router"]
    return [o for o in found if front is None or (labels(o).get(FRONT) == name) == front]


def engines(world: World, slice_: str, role: str) -> list[Object]:
    """Engine pods of a role of a slice."""
    return [o for (kind, _), o in world.items() if kind == "Pod" and labels(o).get(SLICE) == slice_ and labels(o).get(ROLE) == role]


def assert_door_leads_to_whole_pairs(recording: Recording, name: str) -> None:
    """Each router pod that exists with the front label has a ready prefill and a ready decode of its own slice beside it.

    A router that is being deleted still finishes its streams, so it counts.
    """
    for event, world in worlds(recording, name):
        for router in routers(world, name, front=True):
            slice_ = labels(router)[SLICE]
            for role in ("prefill", "decode"):
                found = engines(world, slice_, role)
                assert any(is_ready(p) for p in found), (
                    f"at {event.version}: {router['metadata']['name']} has no {role}: {len(found)}"
                )


def assert_door_never_closed(recording: Recording, name: str) -> None:
    """From the first ready router pod with the front label on, there is always one."""
    opened = False
    for event, world in worlds(recording, name):
        ready = [p for p in routers(world, name, front=True) if is_ready(p)]
        assert ready or not opened, f"no ready router pod after event {event.version}: {event.type} {event.kind} {event.name}"
        opened = opened or bool(ready)
    assert opened


def first(recording: Recording, name: str, what: str, revision: str) -> int:
    """Version of the first event at which something of a revision holds.

    `what`: dark (a pod exists), complete (P, D and routers of it all ready), front (a router pod with the front label exists),
    routers-gone / engines-gone (the last pod of these has gone), engines-going (an engine pod is deleted or being deleted).
    """
    had_router = had_engine = False
    before = 0
    for event, world in worlds(recording, name):
        pods = [o for (kind, _), o in world.items() if kind == "Pod" and labels(o).get(REVISION) == revision]
        mine = {
            part: [p for p in pods if (labels(p).get(ROLE) or labels(p).get(COMPONENT)) == part]
            for part in ("prefill", "decode", "router")
        }
        answer = {
            "dark": bool(pods),
            "complete": all(group and all(is_ready(p) for p in group) for group in mine.values()),
            "front": any(labels(p).get(FRONT) for p in mine["router"]),
            "routers-gone": had_router and not mine["router"],
            "engines-gone": had_engine and not mine["prefill"] + mine["decode"],
            "engines-going": had_engine
            and (
                any(p["metadata"].get("deletionTimestamp") for p in mine["prefill"] + mine["decode"])
                or len(mine["prefill"] + mine["decode"]) < before
            ),
        }[what]
        if answer:
            return int(event.version)
        had_router, had_engine = had_router or bool(mine["router"]), had_engine or bool(mine["prefill"] + mine["decode"])
        before = len(mine["prefill"] + mine["decode"])
    raise AssertionError(f"{name}: never {what} at revision {revision}")
