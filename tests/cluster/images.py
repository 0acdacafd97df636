"""The images of tests and demo: built from a Containerfile when their content changed, imported into every node's containerd."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from cluster import buildah, nodes, packages, paths, rootfs
from cluster.handle import Cluster
from cluster.progress import say
from cluster.teardown import unmount_below

BASE = "localhost/pdd-base:bookworm"
_FOLDER = paths.HERE / "images"
_IGNORED = ("__pycache__", ".git", ".venv", "*.egg-info", ".mypy_cache", ".ruff_cache", ".pytest_cache")
_KEPT = 2


@dataclass(frozen=True)
class Image:
    """An image that can be built: name, Containerfile, the folder its COPY lines mean, build arguments, the image it stands on."""

    name: str
    containerfile: Path
    context: Path
    arguments: Mapping[str, str] = field(default_factory=lambda: {"BASE_IMAGE": BASE})
    base: Image | None = None

    @property
    def sources(self) -> list[Path]:
        """The files and folders that the Containerfile copies from its context, relative to it. Raises FileNotFoundError."""
        if self.name == BASE:
            return []
        found: list[Path] = []
        for line in re.findall(r"^\s*(?:COPY|ADD)\s+(.*)$", self.containerfile.read_text().replace("\\\n", " "), flags=re.M | re.I):
            words = [word for word in line.split() if not word.startswith("--chown") and not word.startswith("--chmod")]
            if words[0].startswith("--from"):
                continue
            for pattern in words[:-1]:
                matches = sorted(self.context.glob(pattern.rstrip("/")))
                if not matches:
                    raise FileNotFoundError(f"{self.containerfile} copies {pattern}, and {self.context} has no such file")
                found += [match.relative_to(self.context) for match in matches]
        return found

    @property
    def key(self) -> str:
        """Hash of everything that the image is made from."""
        digest = hashlib.sha256(self.containerfile.read_bytes())
        digest.update(repr(sorted(self.arguments.items())).encode())
        digest.update((self.base.key if self.base else rootfs.path().name).encode())
        for source in self.sources:
            for file in sorted(_files(self.context / source)):
                digest.update(f"{file.relative_to(self.context)} {file.stat().st_mode & 0o111}\n".encode())
                digest.update(hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()[:12]

    @property
    def archive(self) -> Path:
        short = self.name.removeprefix("localhost/").replace(":", "_").replace("/", "_")
        return paths.cache_root() / "images" / f"{short}-{self.key}.tar"

    def build(self) -> Path:
        """Build it unless this content was built before; returns the archive. Raises RuntimeError when the build fails."""
        target = self.archive
        if target.is_file():
            target.touch()  # for the order of _prune
            return target
        packages.ensure(packages.IMAGE_PROGRAMS)
        with paths.lock(buildah.storage() / ".lock", timeout=1200, what="another image build"):
            try:
                buildah.clean()
                if not target.is_file():
                    if self.base is not None:
                        self.base.ensure_in_storage()
                    self._build(target)
            finally:
                unmount_below(buildah.storage())  # the overlay driver keeps its root mounted
        return target

    def ensure_in_storage(self) -> None:
        """Make sure that buildah has this content under this name (called with the lock held)."""
        try:
            key = buildah.run(
                "inspect", "--type", "image", "--format", '{{index .OCIv1.Config.Labels "pdd.key"}}', self.name
            ).strip()
        except RuntimeError:
            key = ""
        if key != self.key:
            self._build(None)

    def _build(self, target: Path | None) -> None:
        say(f"building {self.name}")
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(dir=paths.cache_root(), prefix="build-") as folder:
            scratch = Path(folder)
            context = scratch / "context"
            context.mkdir()
            # A copy of exactly what was hashed: the build can see nothing else, and no edit can slip in between.
            for source in self.sources:
                _copy(self.context / source, context / source)
            if self.name == BASE:
                (context / "rootfs.tar").hardlink_to(rootfs.archive())
            containerfile = scratch / "Containerfile"
            containerfile.write_text(f"{self.containerfile.read_text()}\nLABEL pdd.key={self.key}\n")
            buildah.build(self.name, containerfile, context, dict(self.arguments), scratch)
            if target is not None:
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_suffix(".part")
                partial.unlink(missing_ok=True)
                buildah.push(self.name, partial)
                partial.rename(target)
                _prune(target)
        say(f"built {self.name} in {time.monotonic() - begin:.0f} s")


BASE_IMAGE = Image(BASE, _FOLDER / "pdd-base" / "Containerfile", _FOLDER / "pdd-base", arguments={})
ROUTER = Image("localhost/pdd-router:dev", _FOLDER / "pdd-router" / "Containerfile", _FOLDER / "pdd-router", base=BASE_IMAGE)
STANDIN = Image("localhost/pdd-standin:dev", _FOLDER / "pdd-standin" / "Containerfile", paths.HERE.parent, base=BASE_IMAGE)
REAL = Image("localhost/pdd-real:dev", _FOLDER / "pdd-real" / "Containerfile", _FOLDER / "pdd-real", base=BASE_IMAGE)
OPERATOR = Image("localhost/pd-operator:dev", paths.CHECKOUT / "Dockerfile", paths.CHECKOUT, base=BASE_IMAGE)
ALL = {"base": BASE_IMAGE, "router": ROUTER, "standin": STANDIN, "real": REAL, "operator": OPERATOR}


def build_operator_image() -> Path:
    """Build the operator's image from the Dockerfile of the checkout, on the harness's base. Returns the archive."""
    return OPERATOR.build()


def _files(path: Path) -> Iterable[Path]:
    if path.is_file():
        return [path]
    return [file for file in path.rglob("*") if file.is_file() and not any(_ignored(part) for part in file.relative_to(path).parts)]


def _ignored(name: str) -> bool:
    return any(Path(name).match(pattern) for pattern in _IGNORED)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_IGNORED), dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


def _prune(newest: Path) -> None:
    """Keep the newest archives of this image only."""
    stem = newest.name.rpartition("-")[0]
    archives = sorted(newest.parent.glob(f"{stem}-*.tar"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in archives[_KEPT:]:
        old.unlink()


def load(cluster: Cluster, *names: str) -> None:
    """Build images (keys of ALL) and import them into the nodes of a cluster; what is there already costs nothing.

    A cluster that the user brought cannot be loaded from here: unless PDD_IMAGES_LOADED=1 says that it is done, raises RuntimeError
    that names the archives (kind: `kind load image-archive FILE`).
    """
    archives = {ALL[name].name: ALL[name].build() for name in names}
    if cluster.state is None:
        if os.environ.get("PDD_IMAGES_LOADED") != "1":
            files = " ".join(str(archive) for archive in archives.values())
            raise RuntimeError(f"load these image archives into your cluster and set PDD_IMAGES_LOADED=1: {files}")
        return
    members = nodes.of(cluster.state)
    for name, archive in archives.items():
        with ThreadPoolExecutor(max_workers=2) as pool:
            for done in [pool.submit(node.import_image, name, archive) for node in members]:
                done.result()
