"""buildah without a daemon, a registry or user namespaces; its storage lies in the cache."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from cluster import paths

_MOST_IMAGES = 150
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


def storage() -> Path:
    return paths.cache_root() / "containers"


def run(*arguments: str, timeout: float = 900) -> str:
    """Run buildah on our own storage. Raises RuntimeError with the end of what it said when it fails."""
    driver = _driver()
    argv = [
        "buildah",
        "--root",
        str(storage() / driver),
        "--runroot",
        str(storage() / "run"),
        "--storage-driver",
        driver,
        *arguments,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        raise RuntimeError(f"buildah {' '.join(arguments)}: {(done.stdout + done.stderr).strip()[-4000:]}")
    return done.stdout


def _driver() -> str:
    """overlay where the kernel has it and the cache does not lie on an overlay itself, else vfs, which copies every layer."""
    storage().mkdir(parents=True, exist_ok=True)
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(storage())], capture_output=True, text=True, timeout=10).stdout.strip()
    return "overlay" if kind != "overlayfs" and "\toverlay\n" in Path("/proc/filesystems").read_text() else "vfs"


def _policy() -> str:
    """A signature policy file, as the host need not have one and nothing is pulled."""
    policy = storage() / "policy.json"
    if not policy.is_file():
        policy.parent.mkdir(parents=True, exist_ok=True)
        policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
    return str(policy)


def clean() -> None:
    """Remove what builds that were cut off have left, and all layers when there are very many (they are a cache)."""
    for folder in paths.cache_root().glob("build-*"):
        shutil.rmtree(folder, ignore_errors=True)
    run("rm", "--all")
    if len(run("images", "--all", "--quiet").split()) > _MOST_IMAGES:
        run("rmi", "--all", "--force")


def push(tag: str, archive: Path) -> None:
    """Write the image as an archive (docker-archive format), which `ctr images import` and `kind load image-archive` read."""
    run("push", "--signature-policy", _policy(), tag, f"docker-archive:{archive}:{tag}")


def build(tag: str, containerfile: Path, context: Path, arguments: dict[str, str], scratch: Path) -> None:
    """Build an image with the host's network and pip configuration. `scratch`: a folder for files that live during the build."""
    run(
        *(
            "build",
            "--signature-policy",
            _policy(),
            "--isolation",
            "chroot",
            "--pull-never",
            "--network",
            "host",
            "--layers",
            "--tag",
            tag,
        ),
        *(f"--volume={source}:{target}:ro" for source, target in pip_mounts(scratch)),
        *(f"--build-arg={name}={value}" for name, value in arguments.items()),
        *("--file", str(containerfile), str(context)),
    )


def pip_mounts(scratch: Path) -> list[tuple[Path, str]]:
    """Read-only mounts that let pip in a build reach what pip on this host reaches: its settings, certificates, local wheels.

    What `pip config list` prints (files and environment together) is written into one file under `scratch`, and mounted as
    /etc/pip.conf: it is in no layer and in no environment of the image.
    """
    settings = _pip_settings()
    mounts: list[tuple[Path, str]] = []
    certificates = Path(settings.get("cert", _CERTIFICATES))
    if certificates.is_file():
        settings["cert"] = _CERTIFICATES
        mounts.append((certificates.resolve(), _CERTIFICATES))
    for place in settings.get("find-links", "").split():
        if Path(place).is_dir():
            mounts.append((Path(place).resolve(), place))
    parser = configparser.RawConfigParser()
    parser["global"] = settings
    file = scratch / "pip.conf"
    file.touch(mode=0o600)
    with file.open("w") as handle:
        parser.write(handle)
    return [*mounts, (file, "/etc/pip.conf")]


def _pip_settings() -> dict[str, str]:
    """The host's pip settings; the environment's win, as they do for pip (https://pip.pypa.io/en/stable/topics/configuration/)."""
    for python in (sys.executable, shutil.which("python3") or ""):
        done = (
            subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60) if python else None
        )
        if done is not None and done.returncode == 0:
            break
    else:
        return {}
    by_section: dict[str, dict[str, str]] = {}
    for line in done.stdout.splitlines():
        match = re.fullmatch(r"([^=]+?)\.([\w-]+)='(.*)'", line)
        if match:
            by_section.setdefault(match[1], {})[match[2]] = match[3].replace("\\n", "\n    ")
    merged: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        merged |= by_section.get(section, {})
    return merged
