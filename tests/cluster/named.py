"""Clusters with a name that outlive the command that made them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from cluster import kwok, nodes, paths
from cluster.controlplane import ControlPlane
from cluster.handle import Cluster, KubectlError, kubectl
from cluster.process import Processes
from cluster.progress import say
from cluster.teardown import SESSION_NAME, destroy, keep_logs, sweep

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,29}")
_LOCK_S = 600


def state_of(name: str) -> Path:
    """The state folder of a named cluster. Raises ValueError for a name that is not allowed."""
    if not _NAME.fullmatch(name) or SESSION_NAME.fullmatch(name):
        raise ValueError(f"a cluster's name is 1 to 30 of a-z, 0-9 and '-', not {name!r}")
    return paths.clusters_root() / name


def names() -> list[str]:
    """The names of the clusters that have a state folder, running or not."""
    root = paths.clusters_root()
    found = (folder.name for folder in root.iterdir() if folder.is_dir()) if root.is_dir() else ()
    return sorted(name for name in found if _NAME.fullmatch(name) and not SESSION_NAME.fullmatch(name))


def up(name: str, *, real: int = 2, fake: int = 0, gpus: int = 8) -> Cluster:
    """Start the cluster with `real` real and `fake` KWOK nodes; one that runs is left as it is, a broken one is made anew.

    Raises RuntimeError or TimeoutError when it cannot be started; nothing of it stays then.
    """
    state = state_of(name)
    with paths.lock(paths.clusters_root() / f".{name}.lock", timeout=_LOCK_S, what=f"the cluster {name}"):
        if state.is_dir():
            trouble = problem(name)
            if trouble is None:
                if len(get(name).nodes) != real:
                    raise RuntimeError(
                        f"the cluster {name} is up with {len(get(name).nodes)} real nodes, not {real}: take it down first"
                    )
                say(f"the cluster {name} is up")
                return _grow(name, fake)
            say(f"making the cluster {name} anew: {trouble}")
            destroy(state)
        sweep()
        state.mkdir(parents=True)
        try:
            begin = time.monotonic()
            if real:
                plane, _ = nodes.start(state, count=real, gpus=gpus, die_with_parent=False)
            else:
                plane = ControlPlane(Processes(state))
                plane.start()
            _record(state, {"nodes": [f"n{index}" for index in range(real)], "kwok": []})
            cluster = _grow(name, fake)
            say(f"the cluster {name} is up after {time.monotonic() - begin:.1f} s")
        except BaseException:
            keep_logs(state)
            destroy(state)
            raise
        return cluster


def down(name: str) -> None:
    """Take the cluster down with all that it left, whatever state it is in. Safe to repeat."""
    state = state_of(name)
    with paths.lock(paths.clusters_root() / f".{name}.lock", timeout=_LOCK_S, what=f"the cluster {name}"):
        destroy(state)
    say(f"the cluster {name} is down")


def get(name: str) -> Cluster:
    """The running cluster of that name. Raises RuntimeError when it is not up."""
    trouble = problem(name)
    if trouble is not None:
        raise RuntimeError(f"the cluster {name} is not up ({trouble}): python -m cluster up --name {name}")
    state = state_of(name)
    record = json.loads((state / "up.json").read_text())
    plane = ControlPlane(Processes(state))
    return Cluster(
        name=name,
        kubeconfig=plane.kubeconfig,
        audit_log=plane.audit_log,
        state=state,
        nodes=tuple(record["nodes"]),
        kwok_nodes=tuple(record["kwok"]),
    )


def problem(name: str) -> str | None:
    """What is wrong with the cluster, None when it is up."""
    state = state_of(name)
    if not (state / "up.json").is_file():
        return "it was not started, or its start was cut off"
    dead = [process for process, pid in Processes(state).recorded().items() if pid is None]
    if dead:
        return f"{', '.join(dead)} ended"
    try:
        kubectl(ControlPlane(Processes(state)).kubeconfig, "get", "--raw", "/readyz", timeout=10)
    except (KubectlError, TimeoutError) as error:
        return f"the API server does not answer: {error}"
    return None


def _grow(name: str, fake: int) -> Cluster:
    """Add KWOK nodes until there are `fake`."""
    cluster = get(name)
    if fake <= len(cluster.kwok_nodes) or cluster.state is None:
        return cluster
    plane = ControlPlane(Processes(cluster.state))
    if "kwok" not in plane.processes.recorded():
        kwok.start(plane)
    added = kwok.add_nodes(plane, kwok.FakeNodes(fake))
    _record(cluster.state, {"nodes": list(cluster.nodes), "kwok": list(added)})
    return get(name)


def _record(state: Path, content: dict[str, list[str]]) -> None:
    partial = state / "up.json.part"
    partial.write_text(json.dumps(content))
    partial.rename(state / "up.json")
