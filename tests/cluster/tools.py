"""Go tools (Kubernetes, etcd, kwok, LWS, CoreDNS, Helm, Prometheus, kstatus), built from pinned modules into the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from cluster import paths
from cluster.progress import say

KUBERNETES_VERSION = "v1.37.2"
_BUILD_LIMIT_S = 1800

# Without these the server calls itself v0.0.0 (k8s.io/component-base/version/base.go).
_VERSION_FLAGS = (
    f"-X k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION} "
    "-X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=37"
)

# binary -> (tool set = folder with a go.mod, Go package)
TOOLS: dict[str, tuple[str, str]] = {
    **{
        name: ("kubernetes", f"k8s.io/kubernetes/cmd/{name}")
        for name in ("kubectl", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
    },
    "etcd": ("etcd", "go.etcd.io/etcd/server/v3"),
    "kwok": ("kwok", "sigs.k8s.io/kwok/cmd/kwok"),
    "lws": ("lws", "sigs.k8s.io/lws/cmd"),
    "coredns": ("coredns", "github.com/coredns/coredns"),
    "helm": ("helm", "helm.sh/helm/v4/cmd/helm"),
    "prometheus": ("prometheus", "github.com/prometheus/prometheus/cmd/prometheus"),
    "promtool": ("prometheus", "github.com/prometheus/prometheus/cmd/promtool"),
    "kstatus": ("kstatus", "."),
}
# Of Prometheus' service discoveries only Kubernetes' is built in (plugins/ of its source): the cloud SDKs are most of its code.
_TAGS = {"prometheus": "remove_all_sd,enable_kubernetes_sd"}
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODES = ("kubelet", "kube-proxy", "coredns")


def set_folder(tool_set: str) -> Path:
    """The cache folder of one tool set; its name changes with go.mod, go.sum and sources of ours beside them."""
    source = paths.HERE / "tools" / tool_set
    files = [source / "go.mod", source / "go.sum", *sorted(source.glob("*.go"))]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    return paths.cache_root() / "tools" / f"{tool_set}-{digest}"


def tool(name: str) -> Path:
    """The path of one tool; builds it first when the cache lacks it (minutes, with progress lines).

    Raises KeyError for an unknown name, RuntimeError when Go is missing or the build fails, TimeoutError after 30 minutes.
    """
    tool_set, package = TOOLS[name]
    binary = set_folder(tool_set) / name
    if binary.is_file():
        return binary
    with paths.lock(binary.parent / ".lock", timeout=_BUILD_LIMIT_S, what=f"the build of {name}"):
        if not binary.is_file():
            _build(name, paths.HERE / "tools" / tool_set, package, binary)
    return binary


def tools(*names: str) -> None:
    """Make sure that all these tools are in the cache."""
    for name in names:
        tool(name)


def module_files(tool_set: str, module: str, files: tuple[str, ...]) -> list[Path]:
    """Files of a Go module that belongs to a tool set, copied into the cache beside the tool, in the order asked.

    Raises RuntimeError when Go cannot provide the module.
    """
    target = set_folder(tool_set) / "files" / module.replace("/", "_")
    wanted = [target / file for file in files]
    if not all(path.is_file() for path in wanted):
        source = paths.HERE / "tools" / tool_set
        _go(["mod", "download", module], source)
        folder = Path(_go(["list", "-m", "-f", "{{.Dir}}", module], source).strip())
        for file, path in zip(files, wanted, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as handle:
                handle.write((folder / file).read_bytes())
            Path(handle.name).replace(path)
    return wanted


def _go(arguments: list[str], folder: Path) -> str:
    go = shutil.which("go")
    if go is None:
        raise RuntimeError(
            "Go >= 1.26 is needed to build the test cluster's tools, and `go` is not on PATH (or set PDD_KUBECONFIG)"
        )
    done = subprocess.run([go, *arguments], cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"go {' '.join(arguments)} in {folder}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _build(name: str, source: Path, package: str, binary: Path) -> None:
    _go(["version"], source)
    say(f"building {name} from {package} (the first build of a set takes minutes)")
    # Built beside the final file and renamed: a build that is cut off never leaves half a binary under the final name.
    partial = binary.with_name(f".{name}.{os.getpid()}")
    tags = ["-tags", _TAGS[source.name]] if source.name in _TAGS else []
    argv = ["go", "build", "-trimpath", *tags, "-ldflags", f"-s -w {_VERSION_FLAGS}", "-o", str(partial), package]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(argv, cwd=source, stdout=output, stderr=subprocess.STDOUT)
        try:
            _follow(process, name, start)
            if process.returncode != 0:
                output.seek(0)
                raise RuntimeError(f"the build of {name} failed: {output.read()[-4000:]}")
            partial.rename(binary)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=10)
            partial.unlink(missing_ok=True)
    say(f"built {name} in {time.monotonic() - start:.0f} s")


def _follow(process: subprocess.Popen[bytes], name: str, start: float) -> None:
    while True:
        try:
            process.wait(timeout=15)
            return
        except subprocess.TimeoutExpired:
            spent = time.monotonic() - start
            if spent > _BUILD_LIMIT_S:
                raise TimeoutError(f"waited {_BUILD_LIMIT_S} s for the build of {name}") from None
            say(f"still building {name}, {spent:.0f} s")
