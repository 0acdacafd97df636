"""The runtime is made, is found again at once, and works where pods see it: at /opt/runtime, read-only, as uid 65532."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from real import Runtime, ensure, runtime

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]

# In a mount namespace of its own: the runtime and the model at their pod paths, read-only; the home of the builder is hidden.
POD_VIEW = """
set -e
venv=$1; model=$2; shift 2
mkdir -p /tmp/pod-view && mount -t tmpfs tmpfs /tmp/pod-view && cd /tmp/pod-view && mkdir venv model home
mount --bind "$venv" venv && mount --bind "$model" model
mount -t tmpfs tmpfs /opt && mkdir /opt/runtime /opt/model
mount --bind venv /opt/runtime && mount -o remount,ro,bind /opt/runtime
mount --bind model /opt/model && mount -o remount,ro,bind /opt/model
mount -t tmpfs tmpfs /root && mount -t tmpfs tmpfs /sys/devices/system/node
chown 65532:65532 home && cd home
exec setpriv --reuid 65532 --regid 65532 --clear-groups --bounding-set=-all --inh-caps=-all --no-new-privs \
  env -i PATH=/opt/runtime/bin:/usr/bin:/bin HOME=/tmp/pod-view/home LD_LIBRARY_PATH=/opt/runtime/lib-native \
  HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 LMCACHE_TRACK_USAGE=false LMCACHE_DISABLE_BANNER=1 "$@"
"""

IMPORTS = """
import json, sys
import lmcache, nixl, nixl_cu13._api, openai, torch, vllm
from vllm.platforms import current_platform
current_platform.import_kernels()
assert hasattr(torch.ops._C, "rms_norm"), "the CPU kernels did not load"
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl as connector
from lmcache.integration.vllm import lmcache_mp_connector
from transformers import AutoTokenizer
tokens = AutoTokenizer.from_pretrained("/opt/model").encode("the quick brown fox")
result = {"prefix": sys.prefix, "vllm": vllm.__version__, "device": current_platform.device_type, "tokens": tokens}
print("RESULT " + json.dumps(result))
"""


@pytest.fixture(scope="module")
def made() -> Runtime:
    return ensure()


def in_pod_view(made: Runtime, command: Sequence[str]) -> str:
    """Run a command as a pod would see the runtime; returns its standard output, fails with its error output."""
    view = ["unshare", "--mount", "--propagation", "private", "bash", "-c", POD_VIEW, "bash", str(made.venv), str(made.model)]
    done = subprocess.run([*view, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_a_finished_runtime_is_found_and_not_made_again(made: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)  # every step of the build starts a program
    again = ensure()
    assert again == made == runtime.find()
    assert not list(made.root.glob("*.partial"))


def test_a_runtime_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDD_CACHE", str(tmp_path))
    with pytest.raises(runtime.BuildError, match="python -m real build"):
        runtime.find()


def test_everything_imports_at_the_path_of_the_pods(made: Runtime) -> None:
    printed = in_pod_view(made, ["python", "-c", IMPORTS])
    [line] = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert result["prefix"] == "/opt/runtime"
    assert (result["vllm"], result["device"]) == ("0.32.0", "cpu")
    assert 4 <= len(result["tokens"]) <= 8


@pytest.mark.parametrize(("command", "expected"), [("vllm", "0.32.0"), ("lmcache", "coordinator")])
def test_console_scripts_work_at_the_path_of_the_pods(made: Runtime, command: str, expected: str) -> None:
    flag = "--version" if command == "vllm" else "--help"
    assert expected in in_pod_view(made, [command, flag])


def test_all_is_readable_for_others(made: Runtime) -> None:
    """Pods read as uid 65532: no file without the read bit for others, no folder without read and search."""
    hidden = ["find", str(made.venv), str(made.model), "(", "-type", "f", "!", "-perm", "-o=r", ")"]
    hidden += ["-o", "(", "-type", "d", "!", "-perm", "-o=rx", ")"]
    assert subprocess.run(hidden, capture_output=True, text=True, timeout=120, check=True).stdout == ""


def test_the_progress_thread_of_nixl_can_be_slowed(made: Runtime) -> None:
    text = (made.venv / runtime.PATCHED_FILE).read_text()
    assert text.count("NIXL_PTHR_DELAY_US") == 1
