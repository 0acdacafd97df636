"""I7: names that somebody else uses are found with one list per kind, and what no list shows stops the write that makes ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.handle import Cluster
from faults.objects import install_crds
from opsrunner import state
from opsrunner.api import Api
from pd_operator.controller.applier import FEW, Applier
from pd_operator.core.names import APPLIED_HASH, DEPLOYMENT, MANAGED_BY, MANAGER
from pd_operator.core.observed import ChildFact
from pd_operator.kube import client as client_module
from pd_operator.kube.client import KubeClient
from pd_operator.kube.errors import Conflict
from pd_operator.kube.store import Store, owner_of

Manifest = dict[str, Any]
SERVICES = 6
PORTS = {"ports": [{"name": "http", "port": 80}], "selector": {"app": "ours"}}


class Names:
    """An applier that knows nothing, as in a new process, over a client that counts."""

    def __init__(self, client: KubeClient, owner: Manifest, calls: Counter[tuple[str, str]]) -> None:
        self.client, self.calls = client, calls
        self.namespace: str = owner["metadata"]["namespace"]
        self._owner = owner["metadata"]
        self.applier = Applier(client, Store[ChildFact](owner_of))

    def manifests(self) -> list[Manifest]:
        """Six Services and a ServiceAccount."""
        return [self._manifest("Service", f"s{n}", spec=PORTS) for n in range(SERVICES)] + [self._manifest("ServiceAccount", "a")]

    def _manifest(self, kind: str, name: str, **body: Any) -> Manifest:
        owner = {"apiVersion": "pdserve.dev/v1alpha1", "kind": "PDDeployment", "controller": True}
        metadata = {
            "name": name,
            "namespace": self.namespace,
            "labels": {MANAGED_BY: MANAGER, DEPLOYMENT: self._owner["name"]},
            "annotations": {APPLIED_HASH: "1"},
            "ownerReferences": [{**owner, "name": self._owner["name"], "uid": self._owner["uid"]}],
        }
        return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **body}

    async def foreign(self) -> list[str]:
        """Names that are taken."""
        return [name for _, name, _ in await self.applier.foreign(self.manifests())]


@pytest.fixture
async def names(control_plane: Cluster, namespace: str) -> AsyncIterator[Names]:
    install_crds(control_plane)
    calls: Counter[tuple[str, str]] = Counter()
    client = await KubeClient.connect(
        str(control_plane.kubeconfig), on_call=lambda verb, kind, code, seconds: calls.update([(verb, kind)])
    )
    owner = Api(control_plane.kubeconfig).create(state.pdd(namespace, "owner"))
    calls.clear()
    yield Names(client, owner, calls)
    await client.close()


def theirs(names: Names, name: str, kind: str = "Service", **labels: str) -> Manifest:
    """Somebody else's object."""
    body = {"spec": {"ports": [{"port": 1}], "selector": {"app": "theirs"}}} if kind == "Service" else {}
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": names.namespace, "labels": labels}, **body}


async def test_a_list_per_kind_serves_all_that_ask(names: Names) -> None:
    await names.client.create(theirs(names, "s3", app="theirs"))
    await names.client.create(theirs(names, "unrelated"))
    names.calls.clear()
    assert await names.foreign() == ["s3"]
    assert await names.foreign() == ["s3"]
    # "s3" is looked at each time: who its owner is decides what happens.
    assert names.calls == {("list", "Service"): 1, ("list", "ServiceAccount"): 1, ("get", "Service"): 2}


async def test_few_names_are_looked_up_one_by_one(names: Names) -> None:
    assert await names.applier.foreign(names.manifests()[-FEW:]) == []
    assert names.calls == {("get", "Service"): FEW - 1, ("get", "ServiceAccount"): 1}


async def test_a_crowded_namespace_is_not_listed(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PAGE", 2)
    for name in ("x", "y", "s3"):
        await names.client.create(theirs(names, name))
    names.calls.clear()
    for _ in range(2):
        assert await names.foreign() == ["s3"]
    assert names.calls == {("list", "Service"): 1, ("list", "ServiceAccount"): 1, ("get", "Service"): 2 * SERVICES}


@pytest.mark.parametrize("labels", [{"app": "theirs"}, {MANAGED_BY: MANAGER, DEPLOYMENT: "other"}], ids=["strange", "labelled"])
async def test_what_is_newer_than_the_list_is_not_taken(names: Names, labels: dict[str, str]) -> None:
    """Made between the look and the write, or labelled like ours and not yet shown by the watch."""
    assert await names.foreign() == []
    made = await names.client.create(theirs(names, "s3", **labels))
    with pytest.raises(Conflict, match="Service s3 exists and is not ours"):
        await names.applier.apply(names.manifests())
    now = await names.client.get("Service", names.namespace, "s3")
    assert now is not None and now["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    names.calls.clear()
    assert await names.foreign() == ["s3"]
    assert names.calls["list", "Service"] == 0  # it was not to be trusted


async def test_our_own_that_no_watch_has_shown_is_applied(names: Names) -> None:
    """Made before a crash, changed by somebody, and unknown to the new process: the next apply takes it back."""
    await names.applier.apply(names.manifests())
    changed = {"spec": {"selector": {"app": "changed"}}}
    await names.client.merge("Service", names.namespace, "s3", changed)
    fresh = Names(names.client, {"metadata": names._owner}, names.calls)
    assert await fresh.foreign() == []
    assert await fresh.applier.apply(fresh.manifests()) == SERVICES + 1
    now = await names.client.get("Service", names.namespace, "s3")
    assert now is not None and now["spec"]["selector"] == {"app": "ours"}
