"""A Debian root filesystem with Python, made by debootstrap, kept in the cache as one tar file."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from cluster import packages, paths
from cluster.progress import say
from cluster.teardown import unmount_below

SUITE = "bookworm"
PACKAGES = ("python3", "python3-venv", "ca-certificates")
# Not needed to run anything, and more than a third of the size.
_LEFT_OUT = ("var/cache/apt/*", "var/lib/apt/lists/*", "usr/share/doc/*", "usr/share/man/*", "usr/share/locale/*", "debootstrap")


def path() -> Path:
    """Where the tar file is or will be; its name changes with what is in it."""
    key = hashlib.sha256(repr((SUITE, PACKAGES, _LEFT_OUT)).encode()).hexdigest()[:12]
    return paths.cache_root() / "rootfs" / f"{SUITE}-{key}.tar"


def archive() -> Path:
    """The tar file; made when missing (about 80 s). Raises RuntimeError when debootstrap fails."""
    target = path()
    if target.is_file():
        return target
    packages.ensure(packages.IMAGE_PROGRAMS)
    with paths.lock(target.parent / ".lock", timeout=900, what="the root filesystem"):
        if not target.is_file():
            _make(target)
    return target


def _make(target: Path) -> None:
    tree = target.with_suffix(".tree")
    _remove(tree)  # a run that was cut off leaves it, with /proc and /sys mounted in it
    say(f"making a Debian {SUITE} root filesystem (about 80 s)")
    argv = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(tree), *_mirror()]
    try:
        _run(argv, timeout=800)
        partial = target.with_suffix(".part")
        excludes = [f"--exclude=./{pattern}" for pattern in _LEFT_OUT]
        _run(["tar", "-C", str(tree), "--numeric-owner", *excludes, "-cf", str(partial), "."], timeout=300)
        partial.rename(target)
    finally:
        _remove(tree)


def _remove(tree: Path) -> None:
    unmount_below(tree)
    shutil.rmtree(tree, ignore_errors=True)


def _mirror() -> list[str]:
    """The mirror that this host's apt uses for the suite; without one debootstrap's own default."""
    argv = ["apt-get", "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(REPO_URI)", "Created-By: Packages"]
    try:
        lines = subprocess.run(argv, capture_output=True, text=True, timeout=30).stdout.splitlines()
    except FileNotFoundError:
        return []
    found = [line.split(maxsplit=2)[2] for line in lines if line.startswith(f"{SUITE} main ")]
    return found[:1]


def _run(argv: list[str], *, timeout: float) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        raise RuntimeError(f"{argv[0]} ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-3000:]}")
