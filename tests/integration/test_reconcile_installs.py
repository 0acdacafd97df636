"""Two installs of the operator that see the same namespace: the first one to take an object keeps it, the other writes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.handle import Cluster
from opsrunner import chart, state, waits
from opsrunner.api import Api, Object
from opsrunner.calls import CallLog
from opsrunner.process import Operator
from opsrunner.recording import Recording
from opsrunner.spaces import namespaces

pytest_plugins = ("opsrunner.fixtures",)


@dataclass(frozen=True)
class Two:
    """Two installs with a ServiceAccount, a Lease and a name each."""

    first: Operator
    second: Operator
    names: tuple[str, str]
    calls: tuple[CallLog, CallLog]
    space: str


@pytest.fixture(scope="module")
def two(kwok_cluster: Cluster, crds: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """The second one starts first, and is stopped until a test starts it."""
    folder = Path(tmp_path_factory.mktemp("installs"))
    with (
        namespaces(kwok_cluster, "installs", 3) as (one, other, space),
        chart.install(kwok_cluster, one, folder, "namespaced", [space]) as left,
        chart.install(kwok_cluster, other, folder, "namespaced", [space]) as right,
        Operator(left.kubeconfig, [], home=one, folder=folder, settings=left.environment()) as first,
        Operator(right.kubeconfig, [], home=other, folder=folder, settings=right.environment()) as second,
    ):
        assert second.stop() == 0
        names = (left.environment()["INSTALL"], right.environment()["INSTALL"])
        yield Two(first, second, names, (CallLog(kwok_cluster, left.user), CallLog(kwok_cluster, right.user)), space)


def warnings(api: Api, space: str, name: str) -> list[Object]:
    """Events that say that another install owns an object."""
    return [e for e in api.list("Event", space) if e["reason"] == "ManagedByOther" and e["regarding"]["name"] == name]


def test_the_second_install_leaves_the_object_alone(two: Two, api: Api) -> None:
    api.create(state.pdd(two.space, "chat"))
    owned = waits.ready(api, two.space, "chat")
    assert owned["status"]["controller"] == two.names[0]
    before = state.versions(api, two.space, "chat"), owned["metadata"]["resourceVersion"]
    two.second.start()
    (event,) = waits.until("the warning", lambda: warnings(api, two.space, "chat"))
    assert event["type"] == "Warning" and two.names[0] in event["note"] and two.names[1] in event["note"]
    time.sleep(2)
    now = api.must_get("PDDeployment", two.space, "chat")
    assert (state.versions(api, two.space, "chat"), now["metadata"]["resourceVersion"]) == before


def test_no_fight_over_the_status(two: Two, api: Api) -> None:
    """The owner goes on; each of its writes is an event for the other one, who must not answer it."""
    mark = two.calls[1].mark()
    with Recording(api, two.space, "PDDeployment") as recording:
        api.merge("PDDeployment", two.space, "chat", {"spec": {"engine": {"args": ["--max-num-seqs=8"]}}})
        waits.ready(api, two.space, "chat")
        time.sleep(1)
    said = [event.object["status"]["controller"] for event in recording.events("PDDeployment", "chat")]
    assert len(said) > 3 and set(said) == {two.names[0]}
    writes = two.calls[1].writes(mark)
    print(f"\n{len(said)} changes of the object; the other install wrote {writes}")
    assert writes == {}
    assert len(warnings(api, two.space, "chat")) == 1


def test_both_at_once(two: Two, api: Api) -> None:
    """A new object that both see at the same moment: one of them owns it at the end, and its children are made once."""
    for number in range(4):
        api.create(state.pdd(two.space, f"race{number}"))
    owners = set()
    for number in range(4):
        obj = waits.ready(api, two.space, f"race{number}", timeout=90)
        owners.add(obj["status"]["controller"])
        assert len(state.children(api, two.space, f"race{number}")) == 16
    assert owners <= set(two.names)
    quiet = {f"race{n}": state.versions(api, two.space, f"race{n}") for n in range(4)}
    status = [api.must_get("PDDeployment", two.space, f"race{n}")["metadata"]["resourceVersion"] for n in range(4)]
    time.sleep(3)
    assert {f"race{n}": state.versions(api, two.space, f"race{n}") for n in range(4)} == quiet
    assert [api.must_get("PDDeployment", two.space, f"race{n}")["metadata"]["resourceVersion"] for n in range(4)] == status


def test_a_replica_that_does_not_lead_writes_nothing(two: Two, api: Api, tmp_path: Path) -> None:
    """A second process of the same install waits for the Lease, and takes over when the first one ends."""
    api.delete("PDDeployment", two.space, "chat")
    assert two.second.stop() == 0
    standby = Operator(two.first.kubeconfig, [], home=two.first.home, folder=tmp_path, settings=two.first.settings)
    standby.start(leading=False)
    try:
        assert standby.metric("pd_operator_leader") == 0
        api.create(state.pdd(two.space, "standby"))
        waits.ready(api, two.space, "standby")
        assert not [call for call in standby.calls() if call[0] in ("apply", "apply_status", "create", "delete", "merge", "scale")]
        assert two.first.stop() == 0
        begin = time.monotonic()
        waits.until("the other replica to lead", lambda: standby.metric("pd_operator_leader") == 1)
        api.merge("PDDeployment", two.space, "standby", {"spec": {"decode": {"replicas": 2}}})
        waits.until("its first work", lambda: len(state.pods(api, two.space, "standby", role="decode")) == 2)
        print(f"\ntook over and worked {time.monotonic() - begin:.1f} s after the other one had ended")
    finally:
        standby.stop()
        two.first.start()
