"""Labels by which a series in Prometheus is known to be of one of our pods: the contract between our PodMonitors and our queries.

A PodMonitor for pods of ours names `POD_TARGET_LABELS` under `podTargetLabels`; the Prometheus operator copies these labels of
the pod onto every series as target labels, with what is not allowed in a label name replaced by `_`, and adds `namespace`, `pod`
and `container`. Target labels win over labels in the page (`honorLabels` stays false), so a page cannot pretend to be another
pod's. A model's name is in no query: two tenants may serve models of one name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from pd_operator.core import names


def sanitized(label: str) -> str:
    """A Kubernetes label as a Prometheus label name, as the Prometheus operator and relabelling write it."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", label)


POD_TARGET_LABELS: Final = (names.DEPLOYMENT, names.SLICE, names.ROLE)
NAMESPACE: Final = "namespace"
POD: Final = "pod"
CONTAINER: Final = "container"
DEPLOYMENT: Final = sanitized(names.DEPLOYMENT)
SLICE: Final = sanitized(names.SLICE)
ROLE: Final = sanitized(names.ROLE)  # absent on routers
GROUP: Final = (NAMESPACE, DEPLOYMENT, SLICE, ROLE)

# Two scrapes of one pod, and ranks that repeat their replica's number, give series that differ in these labels only: one counts.
# Ranks of a data parallel engine (`engine`, `dp_rank`) are not among them: each has requests of its own.
COPIES: Final = (
    CONTAINER, "endpoint", "instance", "job", "moe_ep_rank", "pp_rank", "prometheus", "prometheus_replica", "tp_rank",
)  # fmt: skip
RANKS: Final = ("engine", "dp_rank")


def matchers(namespaces: tuple[str, ...], extra: Mapping[str, str]) -> dict[str, str]:
    """Matchers, as `name` -> `operator "value"`, of every query: our pods, in these namespaces (all when empty), plus `extra`.

    `extra` are external labels such as `cluster` that a Prometheus of several clusters needs. Raises ValueError for a name that
    is no label's or that the contract owns.
    """
    found = {DEPLOYMENT: '!=""'}
    if namespaces:
        found[NAMESPACE] = "=~" + quoted("|".join(re.escape(name).replace(r"\-", "-") for name in sorted(namespaces)))
    for name, value in sorted(extra.items()):
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or name in (*GROUP, POD, CONTAINER):
            raise ValueError(
                f"signals.prometheus.matchers: {name!r} is given: accepted is a label name other than {', '.join(GROUP)}"
            )
        found[name] = "=" + quoted(value)
    return found


def quoted(value: str) -> str:
    """A string of PromQL."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
