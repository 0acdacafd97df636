"""One-time reads for the command line: no watch, no cache, nothing written."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from kubernetes.aio import config as kube_config

from pd_operator.kube.auth import NoCluster
from pd_operator.kube.client import KubeClient, Objects
from pd_operator.kube.errors import ApiError


class Unreadable(Exception):
    """The cluster cannot be read; the message says why."""


OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")  # of a pod


def context_namespace(kubeconfig: str | None) -> str:
    """The namespace that kubectl would use: of the current context, of the pod, else `default`. A file that cannot be read is
    for `connected` to complain about."""
    path = kubeconfig or os.environ.get("KUBECONFIG", "") or str(Path.home() / ".kube" / "config")
    try:
        _, active = kube_config.list_kube_config_contexts(path)  # type: ignore[no-untyped-call]
        return str(active["context"].get("namespace") or "default")
    except (kube_config.ConfigException, OSError, ValueError, KeyError, TypeError):
        pass
    try:
        return OWN_NAMESPACE.read_text().strip() or "default"
    except OSError:
        return "default"


@asynccontextmanager
async def connected(kubeconfig: str | None, what: str) -> AsyncIterator[KubeClient]:
    """A client for a few reads; `what` is to be read, for the message.

    Raises:
        Unreadable: no usable credentials, no answer, or no right to read it.
    """
    try:
        client = await KubeClient.connect(kubeconfig)
    except NoCluster as exc:
        raise Unreadable(str(exc)) from exc
    try:
        yield client
    except (ApiError, aiohttp.ClientError, OSError, TimeoutError) as exc:
        raise Unreadable(f"{what} cannot be read at {client.host}: {exc or type(exc).__name__}") from exc
    finally:
        await client.close()


async def capacity_objects(kubeconfig: str | None = None) -> tuple[Objects, Objects]:
    """(nodes, pods) of the whole cluster.

    Raises:
        Unreadable: no usable credentials, no answer, or no right to list nodes and pods.
    """
    async with connected(kubeconfig, "nodes and pods") as client:
        return await client.list("Node", None), await client.list("Pod", None)
