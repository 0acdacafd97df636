"""The pause image: one static program that sleeps and reaps, in a one-layer archive that `ctr images import` reads."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

from cluster import paths

NAME = "localhost/pause:1"

# The infrastructure container of a pod holds its namespaces and, as pid 1 of a shared pid namespace, reaps orphans.
_SOURCE = """
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void down(int sig) { (void)sig; _exit(0); }
static void reap(int sig) { (void)sig; while (waitpid(-1, 0, WNOHANG) > 0) {} }
int main(void) {
  struct sigaction end = {.sa_handler = down}, child = {.sa_handler = reap, .sa_flags = SA_NOCLDSTOP};
  sigaction(SIGINT, &end, 0);
  sigaction(SIGTERM, &end, 0);
  sigaction(SIGCHLD, &child, 0);
  for (;;) pause();
}
"""


def archive() -> Path:
    """The image archive (docker-archive format), built into the cache when missing. Raises RuntimeError without a C compiler."""
    target = paths.cache_root() / "images" / f"pause-{hashlib.sha256(_SOURCE.encode()).hexdigest()[:12]}.tar"
    if target.is_file():
        return target
    with paths.lock(target.parent / ".pause.lock", timeout=60, what="the build of the pause image"):
        if not target.is_file():
            _build(target)
    return target


def _build(target: Path) -> None:
    program = target.with_suffix(".bin")
    compiler = ["cc", "-static", "-Os", "-s", "-x", "c", "-o", str(program), "-"]
    try:
        done = subprocess.run(compiler, input=_SOURCE, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise RuntimeError(
            "the pause image needs a C compiler: `cc` is not on PATH (Debian: apt-get install gcc libc6-dev)"
        ) from None
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(compiler)}: {done.stderr}")
    layer = _tar({"pause": (program.read_bytes(), 0o755)})
    program.unlink()
    digest = hashlib.sha256(layer).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/pause"], "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [NAME], "Layers": ["layer.tar"]}]
    entries = {"layer.tar": layer, "config.json": json.dumps(config).encode(), "manifest.json": json.dumps(manifest).encode()}
    partial = target.with_suffix(".part")
    partial.write_bytes(_tar({name: (data, 0o644) for name, data in entries.items()}))
    partial.rename(target)


def _tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, (data, mode) in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), mode
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
