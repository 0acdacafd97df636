"""The harness itself: fixtures give what they promise, and clusters leave nothing on the host, whatever was killed when."""

from __future__ import annotations

import json
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import audit, footprint, handle, named, paths
from cluster.handle import Cluster
from cluster.identity import Identity
from cluster.pause import NAME as PAUSE
from cluster.process import Processes, end, marked
from cluster.progress import wait_for
from cluster.teardown import sweep


def _cluster(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """python -m cluster ARGUMENTS, as a user types it."""
    return subprocess.run(
        [sys.executable, "-m", "cluster", *arguments], cwd=paths.HERE.parent, capture_output=True, text=True, timeout=timeout
    )


def _ok(*arguments: str) -> str:
    done = _cluster(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _run_pods(name: str) -> None:
    """A pod on each node, with a memory volume, a token volume and a Service in front: mounts, namespaces, rules."""
    cluster = named.get(name)
    labels = {"app": "left"}
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"left-{node}", "labels": labels},
            "spec": {
                "nodeName": node,
                "containers": [{"name": "c", "image": PAUSE, "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}],
                "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
            },
        }
        for node in cluster.nodes
    ]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "left"},
        "spec": {"selector": labels, "ports": [{"port": 80}]},
    }
    cluster.apply(*pods, service, namespace="default")
    cluster.kubectl("wait", "pod", "-l", "app=left", "-n", "default", "--for=condition=Ready", "--timeout=60s", timeout=70)


@pytest.fixture
def name() -> Iterator[str]:
    """A cluster name of this test alone, taken down at the end even when the test fails; the host must be as before then."""
    name = f"life-{secrets.token_hex(3)}"
    before = footprint.take(named.state_of(name))
    yield name
    named.down(name)
    _nothing_left(before, named.state_of(name))


def _nothing_left(before: footprint.Footprint, state: Path) -> None:
    # The kernel frees network namespaces a moment after their last process.
    last: list[dict[str, list[str]]] = []

    def clean() -> bool | str:
        last[:] = [footprint.take(state).more_than(before)]
        return not last[0] or f"wait: left over: {json.dumps(last[0])}"

    wait_for("a clean host", clean, timeout=10, interval=0.5)


def _until(what: str, condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    def reached() -> object:
        assert process.poll() is None, f"it ended with {process.returncode} before {what}"
        return condition()

    wait_for(what, reached, timeout=120, interval=0.05)


@pytest.mark.alone
def test_up_and_down_twice_leave_nothing(name: str) -> None:
    state = named.state_of(name)
    before = footprint.take(state)
    for _ in range(2):
        _ok("up", "--name", name)
        _run_pods(name)
        during = footprint.take(state).more_than(before)
        assert {"processes", "mounts", "links", "cgroups", "network_namespaces", "rules", "routes", "files"} <= during.keys()
        assert "up" in _ok("status", "--name", name)
        _ok("down", "--name", name)
        _nothing_left(before, state)
        assert _cluster("status", "--name", name).returncode == 1
        _ok("down", "--name", name)  # nothing to do is no error


@pytest.mark.alone
def test_up_again_changes_nothing_and_a_second_cluster_is_refused(name: str) -> None:
    _ok("up", "--name", name)
    pids = Processes(named.state_of(name)).recorded()
    begin = time.monotonic()
    printed = _ok("up", "--name", name, "--kwok", "3")
    assert time.monotonic() - begin < 20
    assert str(named.get(name).kubeconfig) in printed
    assert pids.items() <= Processes(named.state_of(name)).recorded().items()
    nodes = named.get(name).json("get", "nodes")["items"]
    gpus = {node["metadata"]["name"]: node["status"]["allocatable"].get("nvidia.com/gpu") for node in nodes}
    assert gpus == {f"{kind}{index}": "8" for kind, count in (("n", 2), ("kwok-", 3)) for index in range(count)}

    other = f"{name}-b"
    rules = footprint.take().rules
    refused = _cluster("up", "--name", other)
    assert refused.returncode == 1
    assert f"in use on {Identity(named.state_of(name)).node_tag(0)} by the cluster {name}" in refused.stderr
    assert not named.state_of(other).exists()
    assert named.problem(name) is None, "the refused start harmed the running cluster"
    assert footprint.take().rules == rules


@pytest.mark.alone
def test_down_after_everything_was_killed(name: str) -> None:
    _ok("up", "--name", name)
    _run_pods(name)
    state = named.state_of(name)
    end(marked(state), grace=0, what="every process of the cluster, shims included")
    assert "ended" in _cluster("status", "--name", name).stdout
    _ok("down", "--name", name)


@pytest.mark.alone
@pytest.mark.parametrize("moment", ["kube-apiserver", "kubelet-n0", "kubelet-n1"])
def test_crash_in_the_middle_of_up(name: str, moment: str) -> None:
    state = named.state_of(name)
    command = [sys.executable, "-m", "cluster", "up", "--name", name]
    with subprocess.Popen(command, cwd=paths.HERE.parent, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        _until(f"the start of {moment}", lambda: moment in Processes(state).recorded(), process)
        process.send_signal(signal.SIGKILL)
    assert marked(state), "the components outlive the command, as in a real crash"
    assert "cut off" in _cluster("status", "--name", name).stdout
    if moment == "kubelet-n1":
        _ok("up", "--name", name)
        _run_pods(name)


@pytest.mark.alone
def test_what_a_killed_session_leaves_is_swept_by_the_next() -> None:
    before = footprint.take()
    program = "from cluster import session\nwith session.nodes_cluster() as c:\n  print(c.state, flush=True)\n  input()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=paths.HERE.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        state = Path(process.stdout.readline().strip())
        assert state.is_dir()
        process.send_signal(signal.SIGKILL)
    wait_for("the components to end with the session", lambda: not marked(state) or f"wait: {marked(state)}", timeout=10)
    sweep()
    _nothing_left(before, state)


def test_control_plane_records_every_call(control_plane: Cluster, namespace: str, tmp_path: Path) -> None:
    limited = control_plane.service_account_kubeconfig(namespace, "bob", tmp_path / "kubeconfig")
    begin = audit.mark()
    with pytest.raises(handle.KubectlError, match="orbidden"):
        handle.kubectl(limited, "get", "pods")
    user = f"system:serviceaccount:{namespace}:bob"
    assert control_plane.audit_log is not None
    calls = [call for call in audit.events(control_plane.audit_log, user=user) if call["requestReceivedTimestamp"] >= begin]
    lists = [call for call in calls if call["verb"] == "list"]
    assert [(call["objectRef"]["resource"], call["responseStatus"]["code"]) for call in lists] == [("pods", 403)]
    assert lists[0]["userAgent"].startswith("kubectl/")


def test_restricted_pod_security_is_enforced(control_plane: Cluster, namespace: str) -> None:
    control_plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": PAUSE}]}}
    with pytest.raises(handle.KubectlError, match="violates PodSecurity"):
        control_plane.apply(pod, namespace=namespace)


def test_kwok_pods_become_ready_and_fill_the_gpus(kwok_cluster: Cluster, namespace: str) -> None:
    names = set(kwok_cluster.kwok_nodes)
    nodes = [node for node in kwok_cluster.json("get", "nodes")["items"] if node["metadata"]["name"] in names]
    domains = {node["metadata"]["labels"]["pdserve.dev/domain"] for node in nodes}
    assert len(domains) == (len(names) + 3) // 4
    fits = 2 * len(names)
    container = {"name": "c", "image": PAUSE, "resources": {"limits": {"nvidia.com/gpu": "4"}}}
    template = {"metadata": {"labels": {"app": "full"}}, "spec": {"nodeSelector": {"type": "kwok"}, "containers": [container]}}
    spec = {"replicas": fits + 1, "selector": {"matchLabels": {"app": "full"}}, "template": template}
    kwok_cluster.apply(
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "full"}, "spec": spec}, namespace=namespace
    )

    def full() -> bool | str:
        ready = kwok_cluster.json("get", "deployment", "full", "-n", namespace)["status"].get("readyReplicas", 0)
        return ready == fits or f"wait: {ready} of {fits} ready"

    wait_for("all pods but one to be Ready", full, timeout=60, interval=0.5)
    pods = kwok_cluster.json("get", "pods", "-n", namespace)["items"]
    pending = [pod for pod in pods if "nodeName" not in pod["spec"]]
    assert len(pending) == 1
    assert re.search("Insufficient nvidia.com/gpu", pending[0]["status"]["conditions"][0]["message"])
