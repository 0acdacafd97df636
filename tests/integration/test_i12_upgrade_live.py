"""Invariant I12: a version of the operator that renders engine pods differently ends none; `restartID` adopts the new ones.

Two versions are two Reconcilers, one of them with another renderer; each is a process that remembers nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.handle import Cluster
from opsrunner import state, waits
from opsrunner.api import Api
from opsrunner.inprocess import Crash, Fault, Rig, Tap
from pd_operator.core.names import FRONT, ROLE
from pd_operator.core.snapshot import Snapshot
from pd_operator.render import engine, router

pytest_plugins = ("opsrunner.fixtures",)

Template = dict[str, Any]


def next_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next version of the operator: another argument and another grace period in engines, another variable in routers."""
    pod_template: Callable[..., Template] = engine.pod_template
    container: Callable[..., Template] = router._container

    def changed(snapshot: Snapshot, role: Any, revision: str) -> Template:
        made = pod_template(snapshot, role, revision)
        made["spec"] |= {"terminationGracePeriodSeconds": 999}
        made["spec"]["containers"][0] |= {"args": [*made["spec"]["containers"][0]["args"], "--new-flag"]}
        return made

    def changed_router(*arguments: Any) -> Template:
        made = container(*arguments)
        return made | {"env": [*made["env"], {"name": "NEW", "value": "1"}]}

    monkeypatch.setattr(engine, "pod_template", changed)
    monkeypatch.setattr(router, "_container", changed_router)


def templates(api: Api, space: str, name: str) -> dict[str, Template]:
    """Pod templates of the engines' Deployments, by role."""
    found = state.children(api, space, name, ("Deployment",)).values()
    return {d["metadata"]["labels"][ROLE]: d["spec"]["template"] for d in found if ROLE in d["metadata"]["labels"]}


async def drive(rig: Rig, space: str, name: str) -> list[str]:
    """A new process brings the object to its end; what it wrote."""
    return (await rig.drive((space, name), Tap(rig.client))).writes


async def test_an_upgrade_ends_no_engine_pod(kwok_cluster: Cluster, api: Api, space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(kwok_cluster.kubeconfig) as rig:
        api.create(state.pdd(space, "chat", lmcache={}, decode={"replicas": 2}))
        await drive(rig, space, "chat")
        before, stored = templates(api, space, "chat"), state.versions(api, space, "chat")
        engines = state.uids(state.pods(api, space, "chat", component="engine"))

        next_version(monkeypatch)
        writes = await drive(rig, space, "chat")
        assert templates(api, space, "chat") == before
        assert state.uids(state.pods(api, space, "chat", component="engine")) == engines
        changed = {key for key, version in state.versions(api, space, "chat").items() if stored.get(key) != version}
        names = {f"{kind}/{name}" for kind, name in changed}
        assert all(name.endswith("-router") or name.startswith("PDPool/") for name in names), names  # routers are stateless
        assert not [write for write in writes if write.startswith("delete")]
        obj = waits.ready(api, space, "chat")
        assert waits.has(obj, "UpdateAvailable", "True", "RendererChanged")
        assert "restartID" in waits.conditions(obj)["UpdateAvailable"]["message"]

        # Edits of live fields, and of the other role, leave a role's pods as they were rendered.
        api.merge("PDDeployment", space, "chat", {"spec": {"decode": {"replicas": 3}}})
        await drive(rig, space, "chat")
        assert templates(api, space, "chat") == before
        assert engines < state.uids(state.pods(api, space, "chat", component="engine"))
        prefill = state.uids(state.pods(api, space, "chat", role="prefill"))
        api.merge("PDDeployment", space, "chat", {"spec": {"decode": {"resources": {"limits": {"cpu": "200m"}}}}})
        await drive(rig, space, "chat")
        assert templates(api, space, "chat")["prefill"] == before["prefill"]
        assert state.uids(state.pods(api, space, "chat", role="prefill")) == prefill
        decode = templates(api, space, "chat")["decode"]["spec"]
        assert decode["containers"][0]["resources"]["limits"]["cpu"] == "200m" and "--new-flag" in decode["containers"][0]["args"]

        api.merge("PDDeployment", space, "chat", {"spec": {"rollout": {"restartID": "adopt"}}})
        await drive(rig, space, "chat")
        adopted = templates(api, space, "chat")
        assert all("--new-flag" in t["spec"]["containers"][0]["args"] for t in adopted.values())
        assert waits.has(waits.ready(api, space, "chat"), "UpdateAvailable", "False")

        # Back to the version before: its renderer differs, and it ends no pod either.
        monkeypatch.undo()
        engines = state.uids(state.pods(api, space, "chat", component="engine"))
        await drive(rig, space, "chat")
        assert templates(api, space, "chat") == adopted
        assert state.uids(state.pods(api, space, "chat", component="engine")) == engines
        assert waits.has(waits.ready(api, space, "chat"), "UpdateAvailable", "True", "RendererChanged")


@pytest.mark.parametrize("part", ["prefill", "decode"])
async def test_an_upgrade_in_the_middle_of_a_rollout(
    kwok_cluster: Cluster, api: Api, space: str, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The old version dies right after the first Deployment of the new slice: the next one finishes what it began."""
    name = f"half-{part}"
    async with Rig(kwok_cluster.kubeconfig) as rig:
        api.create(state.pdd(space, name))
        await drive(rig, space, name)
        api.merge("PDDeployment", space, name, {"spec": {"engine": {"args": ["--max-num-seqs=8"]}}})
        dies = Tap(
            rig.client,
            lambda number, verb, what: (
                Fault(Crash(), performed=True) if what.startswith("Deployment/") and what.endswith(part) else None
            ),
        )
        with pytest.raises(Crash):
            await rig.reconciler(dies).reconcile((space, name))
        assert dies.writes[-1].startswith("apply Deployment/")
        next_version(monkeypatch)
        await drive(rig, space, name)
        found = templates(api, space, name)
        assert len(found) == 2
        assert not [t for t in found.values() if "--new-flag" in t["spec"]["containers"][0]["args"]]
        assert waits.has(waits.ready(api, space, name), "UpdateAvailable", "True", "RendererChanged")


async def test_another_image_table_ends_no_engine_pod(kwok_cluster: Cluster, api: Api, space: str) -> None:
    """A chart value that names another registry is no reason to end what serves."""
    async with Rig(kwok_cluster.kubeconfig) as rig:
        api.create(state.pdd(space, "moved"))
        await drive(rig, space, "moved")
        before = templates(api, space, "moved")
        images = {component: image.replace("example.org", "mirror.example.org") for component, image in rig.settings.images.items()}
        rig.settings = rig.settings.model_copy(update={"images": images})
        await drive(rig, space, "moved")
        assert templates(api, space, "moved") == before
        assert waits.has(waits.ready(api, space, "moved"), "UpdateAvailable", "True")


CRD = "pddeployments.pdserve.dev"
DEFAULT = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/verification/default"


@contextlib.contextmanager
def before_the_default(cluster: Cluster, api: Api, space: str) -> Iterator[None]:
    """The CRD of the version in which `verification` had no default; today's when the body ends."""

    def turn(operation: dict[str, Any], served: bool) -> None:
        cluster.kubectl("patch", "crd", CRD, "--type=json", "-p", json.dumps([operation]))
        probe = state.pdd(space, "probe")
        del probe["spec"]["verification"]

        def shown() -> bool:  # the server takes a changed CRD up after a moment
            made = api.create(probe)
            api.delete("PDDeployment", space, "probe")
            return ("verification" in made["spec"]) is served

        waits.until(f"the server to {'have' if served else 'forget'} the default", shown)

    turn({"op": "remove", "path": DEFAULT}, False)
    try:
        yield
    finally:
        turn({"op": "add", "path": DEFAULT, "value": "Required"}, True)


async def test_a_default_that_comes_with_an_upgrade_darkens_nothing(kwok_cluster: Cluster, api: Api, space: str) -> None:
    """An object of the version before has no `verification`: it reads as Required now, and what serves of it serves on."""
    async with Rig(kwok_cluster.kubeconfig) as rig:
        with before_the_default(kwok_cluster, api, space):
            api.create(state.pdd(space, "old"))
            await drive(rig, space, "old")
            stored = api.merge("PDDeployment", space, "old", {"spec": {"verification": None}})
            assert "verification" not in stored["spec"]
        found = api.must_get("PDDeployment", space, "old")
        assert found["spec"]["verification"] == "Required"
        for key in ("resourceVersion", "generation"):
            assert found["metadata"][key] == stored["metadata"][key], "nobody wrote it"

        before = state.versions(api, space, "old")
        pods = state.uids(state.pods(api, space, "old"))
        reconciler = rig.reconciler()  # the next version's process
        for _ in range(40):  # until its canary has failed for the first time: nothing runs on a fake node
            await reconciler.reconcile((space, "old"))
            slices = api.must_get("PDDeployment", space, "old")["status"]["slices"]
            if "canary" in slices[0]:
                break
            await asyncio.sleep(1)
        assert slices[0]["state"] == "Serving" and slices[0]["canary"]["failures"] == 1
        obj = api.must_get("PDDeployment", space, "old")
        assert waits.has(obj, "Ready", "False", "NotYetRun"), waits.describe(obj)
        assert waits.has(obj, "Progressing", "True", "Updated"), waits.describe(obj)
        after = state.versions(api, space, "old")
        changed = {key for key in before if after.get(key) != before[key] and key[0] != "PDPool"}  # of pools the status tells more
        assert changed == set(), "an upgrade changed what serves"
        assert {kind for kind, _ in after.keys() - before.keys()} == {"ServiceAccount", "Job"}
        assert pods <= state.uids(state.pods(api, space, "old")), "an upgrade ended a pod"
        assert [p for p in state.pods(api, space, "old", component="router") if FRONT in p["metadata"]["labels"]]
