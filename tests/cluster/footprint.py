"""What clusters leave on a host: kernel objects and processes, as plain sets that a test can compare."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from cluster import cgroups, paths
from cluster.identity import Identity
from cluster.network import SYSCTLS, command
from cluster.process import MARK
from cluster.teardown import mounts_below

_FOLDERS = (Path("/run/pdd"), Path("/run/netns"), Path("/run/containerd/s"), Path("/var/lib/cni/results"))


@dataclass(frozen=True)
class Footprint:
    """What real nodes make on a host, and what given clusters have besides; other programs may come and go meanwhile."""

    processes: frozenset[str]
    mounts: frozenset[str]
    links: frozenset[str]
    cgroups: frozenset[str]
    network_namespaces: frozenset[str]
    rules: frozenset[str]
    routes: frozenset[str]
    sysctls: frozenset[str]
    files: frozenset[str]

    def more_than(self, before: Footprint) -> dict[str, list[str]]:
        """What is here and was not there before, by kind; empty when nothing is left."""
        kinds = {kind: sorted(getattr(self, kind) - getattr(before, kind)) for kind in self.__dataclass_fields__}
        return {kind: extra for kind, extra in kinds.items() if extra}


def take(*states: Path) -> Footprint:
    """The host as it is now; processes and state folders only of these clusters, as sessions without nodes may run beside."""
    groups = frozenset(folder for folder in cgroups.below(Path("/sys/fs/cgroup")) if "/pdd" in folder)
    saved = [line for family in ("iptables", "ip6tables") for line in command(f"{family}-save", check=False).splitlines()]
    return Footprint(
        processes=frozenset(line for state in states for line in _processes(state)),
        mounts=frozenset(mounts_below(Path("/run")) + mounts_below(paths.clusters_root())),
        links=frozenset(link["ifname"] for link in json.loads(command("ip", "-j", "link", "show"))),
        cgroups=groups,
        network_namespaces=frozenset(_namespaces()),
        rules=frozenset(line.split(" [")[0] for line in saved if "KUBE-" in line or "pdd" in line),
        routes=frozenset(command("ip", "route").splitlines()),
        sysctls=frozenset(f"{name}={Path('/proc/sys', name).read_text().strip()}" for name in SYSCTLS),
        files=frozenset(str(path) for folder in _FOLDERS for path in folder.glob("*")) | {str(s) for s in states if s.exists()},
    )


def _processes(state: Path) -> list[str]:
    mark, tag = f"{MARK}={state}\0".encode(), f"/{Identity(state).tag}"
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            group = (entry / "cgroup").read_text()
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        if mark in environment + b"\0" or tag in group:
            found.append(f"{entry.name} {line[:120]}")
    return found


def _namespaces() -> set[str]:
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(link))
        except OSError:
            continue
    return found
