"""Take a cluster down from its state folder alone, whatever was killed before."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from cluster import cgroups, network, paths
from cluster.identity import Identity
from cluster.process import Processes, start_ticks
from cluster.progress import say

_MAX_NODES = 2
# The state folders of pytest sessions: sPID-START-RANDOM. No other cluster may be called like that.
SESSION_NAME = re.compile(r"s(\d+)-(\d+)-[0-9a-f]+")


def sweep() -> None:
    """Destroy the clusters of pytest sessions that are no longer alive (killed before they could clean up)."""
    root = paths.clusters_root()
    for folder in root.iterdir() if root.is_dir() else ():
        match = SESSION_NAME.fullmatch(folder.name)
        if match and start_ticks(int(match[1])) != int(match[2]):
            say(f"removing the cluster of a dead session: {folder.name}")
            with paths.lock(root / ".sweep.lock", timeout=120, what="the removal of a dead session's cluster"):
                destroy(folder)


def destroy(state: Path) -> None:
    """End every process of the cluster and remove mounts, interfaces, rules, cgroups and its state folder. Safe to repeat.

    PDD_KEEP=1 keeps the folder (logs). Raises TimeoutError or RuntimeError when something resists.
    """
    Processes(state).stop_all()
    if (state / "nodes").is_dir() or Identity(state).run.is_dir():  # both are made before anything of a node
        _destroy_nodes(state)
    if os.environ.get("PDD_KEEP") == "1":
        say(f"kept {state}")
        return
    shutil.rmtree(state, ignore_errors=True)


def keep_logs(state: Path) -> None:
    """Copy the logs of a cluster that failed to start to CACHE/last-failure, where the next failure overwrites them."""
    if (state / "logs").is_dir():
        target = paths.cache_root() / "last-failure"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(state / "logs", target)
        say(f"the logs are in {target}")


def _destroy_nodes(state: Path) -> None:
    identity = Identity(state)
    leftovers = _shim_sockets(identity.run) + _network_results(identity)
    for index in range(_MAX_NODES):
        cgroups.remove(identity.node_tag(index))
    unmount_below(state)
    unmount_below(identity.run)
    if network.holds_claim(identity):
        network.remove_rules(identity)
        network.remove_bridges(identity)
        network.forget_connections()
        network.restore_sysctls(state)
    for file in leftovers:
        file.unlink(missing_ok=True)
    shutil.rmtree(identity.run, ignore_errors=True)
    for folder in (identity.run.parent, Path("/run/containerd/s"), Path("/run/containerd")):
        _remove_if_empty(folder)


def _shim_sockets(run: Path) -> list[Path]:
    # containerd puts the shims' sockets into /run/containerd/s whatever its state folder is, and notes each in the bundle.
    found = []
    for note in run.glob("n*/containerd/io.containerd.runtime.v2.task/k8s.io/*/address"):
        path = note.read_text().strip().removeprefix("unix://")
        if path.startswith("/run/containerd/s/"):
            found.append(Path(path))
    return found


def _network_results(identity: Identity) -> list[Path]:
    # The CNI library notes each pod's network in one folder of the host; the loopback's notes bear the sandbox's name alone.
    notes = Path("/var/lib/cni/results")
    sandboxes = identity.run.glob("n*/containerd/io.containerd.grpc.v1.cri/sandboxes/*")
    loopbacks = [note for sandbox in sandboxes for note in notes.glob(f"cni-loopback-{sandbox.name}-*")]
    return [*loopbacks, *notes.glob(f"{identity.tag}n*")]


def unmount_below(folder: Path) -> None:
    """Unmount everything at and below `folder`, the newest mounts first. Raises RuntimeError when a mount stays."""
    for _ in range(5):
        points = mounts_below(folder)
        if not points:
            return
        for point in reversed(points):
            network.command("umount", "--", point, check=False)
    for point in reversed(mounts_below(folder)):
        network.command("umount", "--lazy", "--", point, check=False)
    if left := mounts_below(folder):
        raise RuntimeError(f"cannot unmount {left}")


def mounts_below(folder: Path) -> list[str]:
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4].encode().decode("unicode_escape")
        if point == str(folder) or point.startswith(f"{folder}/"):
            points.append(point)
    return points


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
