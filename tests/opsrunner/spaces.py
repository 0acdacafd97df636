"""Namespaces of a test, apart from all others."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.handle import Cluster


@contextmanager
def namespaces(cluster: Cluster, stem: str, count: int, **labels: str) -> Iterator[list[str]]:
    """Fresh namespaces, deleted at the end without waiting."""
    mark = secrets.token_hex(3)
    names = [f"{re.sub(r'[^a-z0-9]+', '-', stem.lower()).strip('-')[:40]}-{mark}-{index}" for index in range(count)]
    cluster.apply(*({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}} for name in names))
    try:
        yield names
    finally:
        cluster.kubectl("delete", "namespace", *names, "--wait=false", "--ignore-not-found", timeout=60)
