"""What exists for a PDDeployment, and forms of it that two runs can be compared by."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import manifests
from opsrunner.api import Api, Object
from pd_operator.controller.watch import CHILD_KINDS, OPTIONAL_KINDS
from pd_operator.core.names import DEPLOYMENT, REVISION, ROLE, SLICE

Key = tuple[str, str]  # (kind, name)
CPU = {"limits": {"cpu": "100m"}}  # engines that any number of fake nodes can hold
VOLATILE = ("uid", "resourceVersion", "creationTimestamp", "managedFields", "generation", "selfLink")
ADDRESSES = ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy")


def pdd(namespace: str, name: str = "chat", **spec: Any) -> Object:
    """The minimal PDDeployment, engines without GPUs, with a merge patch (RFC 7396) over its spec.

    Without a canary, unless the patch says otherwise: no container of a fake node runs, so none could prove anything.
    """
    base = manifests.minimal()
    base["spec"] |= {"prefill": {"resources": CPU}, "decode": {"resources": CPU}, "verification": "Disabled"}
    base["metadata"] = {"name": name, "namespace": namespace}
    base["spec"] = manifests.merge(base["spec"], spec)
    return base


def children(api: Api, namespace: str, name: str, kinds: Iterable[str] = (*CHILD_KINDS, *OPTIONAL_KINDS)) -> dict[Key, Object]:
    """Everything that carries the label of this PDDeployment, but pods."""
    found: dict[Key, Object] = {}
    for kind in kinds:
        for item in api.list(kind, namespace, f"{DEPLOYMENT}={name}"):
            found[kind, item["metadata"]["name"]] = {"kind": kind, **item}
    return found


def pods(api: Api, namespace: str, name: str, **labels: str) -> list[Object]:
    """Pods of a PDDeployment that are not being deleted, by name; `role`, `component`, `slice` and `revision` narrow."""
    keys = {"role": ROLE, "slice": SLICE, "revision": REVISION, "component": "app.kubernetes.io/component"}
    selector = ",".join([f"{DEPLOYMENT}={name}", *(f"{keys[key]}={value}" for key, value in labels.items())])
    alive = [p for p in api.list("Pod", namespace, selector) if not p["metadata"].get("deletionTimestamp")]
    return sorted(alive, key=lambda p: p["metadata"]["name"])


def uids(objects: Iterable[Object]) -> set[str]:
    """Their uids."""
    return {obj["metadata"]["uid"] for obj in objects}


def versions(api: Api, namespace: str, name: str) -> dict[Key, str]:
    """What every child is: equal ones mean that nobody wrote.

    For a pool its resourceVersion. Of other kinds all but status: Kubernetes' controllers write that, also a while after
    everything is ready (terminating replicas, disruptions that are allowed), and nobody else may. Each write that changes
    anything leaves its time in managedFields.
    """
    return {key: _version(key[0], obj) for key, obj in children(api, namespace, name).items()}


def _version(kind: str, obj: Object) -> str:
    metadata: dict[str, Any] = obj["metadata"]
    if kind == "PDPool":
        return str(metadata["resourceVersion"])
    fields = [entry for entry in metadata.get("managedFields", []) if entry.get("subresource") != "status"]
    shown = {key: value for key, value in metadata.items() if key != "resourceVersion"} | {"managedFields": fields}
    return json.dumps({key: value for key, value in obj.items() if key != "status"} | {"metadata": shown}, sort_keys=True)


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether an equality selector matches labels."""
    return all(labels.get(key) == value for key, value in selector.items())


def router_selectors(pod: Object) -> dict[str, dict[str, str]]:
    """What a router pod (smg, vllm-router) looks for: --prefill-selector and --decode-selector from its arguments."""
    args = pod["spec"]["containers"][0]["args"]
    found: dict[str, dict[str, str]] = {}
    for flag in ("--prefill-selector", "--decode-selector"):
        words: list[str] = []
        for word in args[args.index(flag) + 1 :]:
            if word.startswith("--"):
                break
            words.append(word)
        found[flag] = dict(word.split("=", 1) for word in words)
    return found


def normalised(found: Mapping[Key, Object], owner: Object) -> dict[str, Any]:
    """Children without what differs between two runs of the same: ids, times, addresses, counters, the owner's names and uid.

    Field managers stay: who owns what is part of the end state.
    """
    result: dict[str, Any] = {}
    for (kind, name), obj in sorted(found.items()):
        body = {key: value for key, value in obj.items() if key not in {"status", "apiVersion", "kind"}}
        body["metadata"] = {key: value for key, value in obj["metadata"].items() if key not in VOLATILE}
        if kind != "PDPool":  # created once, and applied only when a process does not remember that: the owner is the same
            body["metadata"]["managers"] = _managers(obj)
        annotations = dict(body["metadata"].get("annotations", {}))
        annotations.pop("deployment.kubernetes.io/revision", None)
        annotations.pop("pdserve.dev/applied-hash", None)  # it hashes the names and the owner's uid
        body["metadata"]["annotations"] = annotations
        if kind == "Service":
            body["spec"] = {key: value for key, value in obj["spec"].items() if key not in ADDRESSES}
        if kind == "PDPool":
            body["status"] = {k: v for k, v in obj.get("status", {}).items() if k not in {"conditions", "observedGeneration"}}
        result[f"{kind}/{name}"] = body
    return _anonymous(result, owner)


def settled_status(obj: Object) -> dict[str, Any]:
    """Status of a PDDeployment without times, generations, nodes and names."""
    status = dict(obj.get("status") or {})
    status.pop("observedGeneration", None)
    status["conditions"] = {
        c["type"]: (c["status"], c["reason"], re.sub(r"on \d+ nodes", "on N nodes", c["message"]))
        for c in status.get("conditions", [])
    }
    return _anonymous(status, obj)


def _anonymous(value: Any, owner: Object) -> dict[str, Any]:
    text = json.dumps(value, sort_keys=True)
    for key in ("uid", "namespace", "name"):
        text = text.replace(str(owner["metadata"][key]), f"OWNER-{key.upper()}")
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def _managers(obj: Object) -> list[str]:
    """Field managers but those of Kubernetes' own controllers, which write status."""
    entries = obj["metadata"].get("managedFields", [])
    ours = {f"{e['manager']} {e['operation']} {e.get('subresource', '')}".strip() for e in entries if not e.get("subresource")}
    return sorted(entry for entry in ours if not entry.startswith("kube-"))


def difference(left: Mapping[str, Any], right: Mapping[str, Any]) -> str:
    """Where two normalised states differ; "" when they do not."""
    lines = [f"only left: {key}" for key in left if key not in right] + [f"only right: {key}" for key in right if key not in left]
    for key in left:
        if key in right and left[key] != right[key]:
            lines += _paths(key, left[key], right[key])
    return "\n".join(lines[:40])


def _paths(path: str, left: Any, right: Any) -> list[str]:
    if isinstance(left, dict) and isinstance(right, dict):
        keys = sorted({*left, *right})
        return [
            line
            for key in keys
            if left.get(key) != right.get(key)
            for line in _paths(f"{path}.{key}", left.get(key), right.get(key))
        ]
    return [f"{path}: {str(left)[:200]} != {str(right)[:200]}"]
