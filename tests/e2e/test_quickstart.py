"""Every command of docs/quickstart.md, in order, as a reader would type it.

The demo makes its own cluster with real nodes, and a machine holds one of those at a time: hence the marker `alone`.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from cluster import named
from cluster.progress import say
from demo.stack import NAME
from plugins.quickstart import PAGE, blocks

pytestmark = [pytest.mark.nodes, pytest.mark.alone, pytest.mark.timeout(3600)]
BLOCK_LIMIT_S = 2400.0  # the first `make demo` on a machine may have to build the cluster's programs


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """The demo's cluster goes even when a command in the middle fails."""
    yield
    if NAME in named.names():
        named.down(NAME)


def test_quickstart() -> None:
    outputs = [run(block) for block in blocks()]
    first = outputs[0]
    assert "Ready after" in first and "bytes pulled over NIXL" in first
    assert "prefill by chat-" in first and "decode by chat-" in first
    assert "objects on its LMCache server" in first
    assert "HandoffVerified=Unknown NotYetRun" in first and "HandoffVerified=True Verified" in first
    assert "OffloadVerified=True Verified" in first
    assert any("canary" in text and "handoff: Verified" in text for text in outputs), "the log of its canary"
    (answer,) = [text for block, text in zip(blocks(), outputs, strict=True) if "/v1/chat/completions" in block]
    assert '"finish_reason":"length"' in answer.replace(" ", "") and '"completion_tokens":16' in answer.replace(" ", "")
    assert NAME not in named.names()


def test_a_second_run_only_does_what_is_missing() -> None:
    run("make demo")
    begin = time.monotonic()
    again = run("make demo")
    say(f"second `make demo`: {time.monotonic() - begin:.0f} s")
    assert f"the cluster {NAME} is up" in again
    assert "bytes pulled over NIXL" in again, "a new prompt: the caches must not have the answer to it"
    run("make demo-down")
    run("make demo-down")


def run(block: str) -> str:
    """Run a block with bash in the checkout; returns what it printed. A failure shows the block and the output."""
    say(f"$ {block.strip()}")
    environment = {key: value for key, value in os.environ.items() if key not in ("KUBECONFIG", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=PAGE.parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BLOCK_LIMIT_S,
        env=environment,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}"
    return done.stdout
