"""The steps of the demo. Each finds out what is there already, so that a second run only does what is missing."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from cluster import images, named, paths
from cluster.handle import Cluster
from cluster.progress import say
from cluster.tools import tool
from demo import chat, ready

Result = TypeVar("Result")
NAME = "demo"  # of the cluster
OBJECT = "chat"  # of the PDDeployment, in the namespace `default`
INSTALL_NAMESPACE = "pd-operator"
CHART = paths.CHECKOUT / "charts" / "pd-operator"
EXAMPLES = paths.CHECKOUT / "docs" / "examples"


@dataclass(frozen=True)
class Engine:
    """What differs between the engines: image, example, and the time until Ready (seconds)."""

    image: str  # key of cluster.images.ALL
    example: str
    limit: float


ENGINES = {
    "standin": Engine("standin", "chat.yaml", 300),
    # Two engines of some 40 CPU seconds each start at once on few cores.
    "vllm": Engine("real", "chat-vllm-cpu.yaml", 900),
}


def up(engine: Engine) -> None:
    """Everything from nothing to an answer.

    Raises RuntimeError, TimeoutError or subprocess.SubprocessError that says which step failed.
    """
    begin = time.monotonic()
    # Before the cluster: what takes long the first time should not keep a cluster waiting.
    document = _step("the example", lambda: example(engine))
    _step("helm, from source when it is not in the cache", lambda: tool("helm"))
    cluster = _step("a cluster: control plane and two nodes", lambda: named.up(NAME, real=2))
    _step("images, built and imported", lambda: images.load(cluster, "base", "router", "operator", engine.image))
    _step("the operator, from its Helm chart", lambda: install(cluster, engine.image))
    say(f"kubectl apply -f docs/examples/{engine.example}")
    cluster.apply(document, namespace="default")
    say(f"waiting until {OBJECT} is Ready, at most {engine.limit:.0f} s; what stands in the way:")
    ready.wait(cluster, "default", OBJECT, engine.limit)
    chat.show(cluster, "default", OBJECT)
    say(f"done in {time.monotonic() - begin:.0f} s; look around as docs/quickstart.md says, `make demo-down` removes it all")


def _step(what: str, do: Callable[[], Result]) -> Result:
    begin = time.monotonic()
    say(f"{what} ...")
    result = do()
    say(f"{what}: {time.monotonic() - begin:.1f} s")
    return result


def example(engine: Engine) -> dict[str, Any]:
    """The example's object; for real engines with the places of runtime and model on this machine, which are made when missing."""
    document: dict[str, Any] = yaml.safe_load((EXAMPLES / engine.example).read_text())
    if engine.image == "real":
        import real

        runtime = real.ensure()
        places = {"/opt/runtime": str(runtime.venv), "/opt/model": str(runtime.model)}
        for role in ("prefill", "decode"):
            for volume in document["spec"][role]["template"]["spec"]["volumes"]:
                if "hostPath" in volume:
                    volume["hostPath"]["path"] = places.get(volume["hostPath"]["path"], volume["hostPath"]["path"])
        say(f"hostPath volumes: {', '.join(f'{name} is {place}' for name, place in places.items())}")
    return document


def values(image: str, decisions: str = "") -> dict[str, Any]:
    """Chart values: images that lie on the nodes. The annotation rolls the operator when its image changed under the same name.

    `decisions`: file of the decision log in the operator's pod, none unless given.
    """
    repository, tag = images.OPERATOR.name.rsplit(":", 1)
    return {
        "image": {"repository": repository, "tag": tag},
        "images": {
            "engine": {"vllm": images.ALL[image].name},
            "router": {"smg": images.ROUTER.name, "vllm-router": images.ROUTER.name},
        },
        "podAnnotations": {"demo/image": images.OPERATOR.key},
        "log": {"decisions": decisions},
    }


def install(cluster: Cluster, image: str, decisions: str = "") -> None:
    """`helm upgrade --install` with `values`, into a namespace under Pod Security `restricted`.

    Raises RuntimeError with helm's words and the state of the operator's pods.
    """
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": INSTALL_NAMESPACE, "labels": labels}})
    arguments = ["upgrade", "--install", "pd-operator", str(CHART), "--namespace", INSTALL_NAMESPACE, "--wait", "--timeout", "180s"]
    done = helm(cluster, *arguments, "--values", "-", stdin=yaml.safe_dump(values(image, decisions)))
    if done.returncode != 0:
        pods = cluster.kubectl("get", "pods", "-n", INSTALL_NAMESPACE, "-o", "wide", check=False)
        log = cluster.kubectl("logs", "-n", INSTALL_NAMESPACE, "deployment/pd-operator", "--tail", "20", check=False)
        raise RuntimeError(f"helm {' '.join(arguments)}: {done.stderr.strip()}\n{pods}{log}")


def helm(cluster: Cluster, *arguments: str, stdin: str | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """helm on this cluster, with its own files beside the cluster's, not in the user's home. Raises subprocess.TimeoutExpired."""
    home = (cluster.state or Path(paths.cache_root())) / "helm"
    environment = {**os.environ, **{f"HELM_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}}
    argv = [str(tool("helm")), "--kubeconfig", str(cluster.kubeconfig), *arguments]
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout, env=environment)
