"""AIPerf under the cache, installed once from its lock with hashes, with a tokenizer that needs no network.

No image: 500 MB would be imported on every node. Pods see the folder through hostPath, read-only, and run it with the Python of
their base image, which is 3.11 as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from cluster import paths
from cluster.progress import say

HERE = Path(__file__).parent
LOCK = HERE / "requirements.lock"
PYTHON = "3.11"  # of the base image (Debian bookworm)
TOKENIZER = "standin/bytes"  # a name as on the model hub; it lies in a hub cache beside the packages
LIMIT_S = 900.0


def folder() -> Path:
    """Where it is or will be; the name changes with the lock."""
    digest = hashlib.sha256(LOCK.read_bytes() + PYTHON.encode()).hexdigest()[:12]
    return paths.cache_root() / "loadgen" / digest


def ensure() -> Path:
    """The folder, made when missing (about a minute): packages/, hub/. Raises RuntimeError with what pip said."""
    target = folder()
    if target.is_dir():
        return target
    with paths.lock(target.with_suffix(".lock"), timeout=LIMIT_S, what="an installation of the load generator"):
        if not target.is_dir():
            partial = target.with_suffix(".part")
            shutil.rmtree(partial, ignore_errors=True)
            say("installing the load generator (about a minute)")
            _packages(partial / "packages")
            _tokenizer(partial / "hub")
            subprocess.run(["chmod", "-R", "a+rX", str(partial)], check=True, timeout=60)
            partial.rename(target)
    return target


def _packages(target: Path) -> None:
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(target)]
    argv += ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--python-version", PYTHON, "--no-compile", "-r", str(LOCK)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        told = (done.stdout + done.stderr).strip()[-3000:]
        raise RuntimeError(f"AIPerf cannot be installed from pip's package index ({LOCK.name}); {' '.join(argv)} says: {told}")
    # The mount is read-only: what is not compiled now would be compiled by each of its ten processes. Files that are for another
    # Python do not compile, and nothing imports them.
    compiling = [sys.executable, "-m", "compileall", "-q", "-j", str(os.cpu_count() or 1), str(target)]
    subprocess.run(compiling, capture_output=True, timeout=LIMIT_S)


def _tokenizer(hub: Path) -> None:
    """A token for each byte. AIPerf wants one; what it reports are the engine's own counts."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves in byte-level BPE (GPT-2)
    signs = [chr(b) for b in plain] + [chr(256 + n) for n in range(256 - len(plain))]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {sign: n for n, sign in enumerate(sorted(signs))}, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}
    snapshot = hub / f"models--{TOKENIZER.replace('/', '--')}" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_text(json.dumps(tokenizer))
    (snapshot / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    references = snapshot.parents[1] / "refs"
    references.mkdir()
    (references / "main").write_text("0")
