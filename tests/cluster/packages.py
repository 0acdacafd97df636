"""Debian packages that the harness needs, installed when they are missing and we may."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from cluster.progress import say

# program (or file) -> Debian package
NODE_PROGRAMS = {
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "cc": "gcc libc6-dev",
}
IMAGE_PROGRAMS = {"buildah": "buildah", "debootstrap": "debootstrap"}


def ensure(programs: dict[str, str]) -> None:
    """Install what is missing with apt-get. Raises RuntimeError that names the packages where that is not possible."""
    missing = [name for name in programs if not _present(name)]
    if not missing:
        return
    wanted = sorted({package for name in missing for package in programs[name].split()})
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise RuntimeError(f"missing {', '.join(missing)}; as root on Debian: apt-get install {' '.join(wanted)}")
    say(f"installing {' '.join(wanted)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *wanted]):
        done = subprocess.run(["apt-get", "-qq", *arguments], capture_output=True, text=True, timeout=600, env=environment)
        if done.returncode != 0:
            raise RuntimeError(f"apt-get {' '.join(arguments)}: {done.stderr.strip()[-2000:]}")
    if still := [name for name in missing if not _present(name)]:
        raise RuntimeError(f"installed {' '.join(wanted)}, and still missing: {', '.join(still)}")


def _present(name: str) -> bool:
    return Path(name).exists() if name.startswith("/") else shutil.which(name) is not None
