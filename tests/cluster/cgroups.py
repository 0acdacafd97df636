"""Control groups of a node, on cgroup v1 hosts (one tree a controller) and on v2 hosts."""

from __future__ import annotations

import os
from pathlib import Path

from cluster.process import end
from cluster.progress import wait_for

_ROOT = Path("/sys/fs/cgroup")


def _trees() -> list[Path]:
    if (_ROOT / "cgroup.controllers").exists():
        return [_ROOT]
    return [tree for tree in _ROOT.iterdir() if tree.is_dir() and (tree / "cgroup.procs").exists() and not tree.is_symlink()]


def make(name: str) -> None:
    """Create the group `name` in every tree, as the kubelet's cgroupRoot must exist."""
    if (_ROOT / "cgroup.controllers").exists():
        wanted = " ".join(f"+{controller}" for controller in (_ROOT / "cgroup.controllers").read_text().split())
        (_ROOT / "cgroup.subtree_control").write_text(wanted)
    for tree in _trees():
        group = tree / name
        group.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):  # v1: empty in a new group, and then no process can enter it
            if (group / file).exists() and not (group / file).read_text().strip() and (tree / file).exists():
                (group / file).write_text((tree / file).read_text().strip())


def _groups(name: str) -> list[Path]:
    """The group and all below it, deepest first."""
    found = [Path(folder) for tree in _trees() for folder in below(tree / name)]
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def below(top: Path) -> list[str]:
    """`top` and all folders below it; groups may come and go meanwhile (os.walk passes over those, Path.rglob raises)."""
    return [folder for folder, _, _ in os.walk(top)]


def members(name: str) -> list[int]:
    """The pids of all processes in the group and below it."""
    pids: set[int] = set()
    for group in _groups(name):
        try:
            pids.update(int(pid) for pid in (group / "cgroup.procs").read_text().split())
        except OSError:  # removed meanwhile
            continue
    pids.discard(0)  # a process of another pid namespace
    return sorted(pids)


def remove(name: str) -> None:
    """Kill what runs in the group and remove it with all groups below. Raises TimeoutError when it resists for 20 s."""
    for _ in range(10):
        pids = members(name)
        if not pids:
            break
        end(pids, grace=0, what=f"the processes in cgroup {name}")

    def gone() -> bool | str:
        for group in _groups(name):
            try:
                group.rmdir()
            except OSError:  # busy until the kernel has let go of the last process
                continue
        left = _groups(name)
        return not left or f"wait: {left[0]}"

    wait_for(f"the removal of cgroup {name}", gone, timeout=20, interval=0.1)
