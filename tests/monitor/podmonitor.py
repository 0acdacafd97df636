"""A PodMonitor as the scrape jobs that the Prometheus operator makes of it (generatePodMonitorConfig in pkg/prometheus)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SNAKE = {"sourceLabels": "source_labels", "targetLabel": "target_label"}


def jobs(monitor: Mapping[str, Any], kubeconfig: Path, namespaces: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One job an endpoint; `namespaces` narrow what is discovered."""
    return [_job(monitor, number, kubeconfig, namespaces) for number in range(len(monitor["spec"]["podMetricsEndpoints"]))]


def _job(monitor: Mapping[str, Any], number: int, kubeconfig: Path, namespaces: Sequence[str]) -> dict[str, Any]:
    spec, name = monitor["spec"], f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}"
    endpoint = spec["podMetricsEndpoints"][number]
    where = {"namespaces": {"names": list(namespaces)}} if namespaces else {}
    relabel: list[dict[str, Any]] = [
        {"source_labels": ["__meta_kubernetes_pod_phase"], "regex": "(Failed|Succeeded)", "action": "drop"}
    ]
    for label, value in spec["selector"]["matchLabels"].items():
        clean = re.sub(r"[^a-zA-Z0-9_]", "_", label)
        sources = [f"__meta_kubernetes_pod_label_{clean}", f"__meta_kubernetes_pod_labelpresent_{clean}"]
        relabel.append({"source_labels": sources, "regex": f"({re.escape(value)});true".replace("\\-", "-"), "action": "keep"})
    relabel += [
        {"source_labels": ["__meta_kubernetes_pod_container_port_name"], "regex": endpoint["port"], "action": "keep"},
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": ["__meta_kubernetes_pod_container_name"], "target_label": "container"},
        {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
        {"target_label": "job", "replacement": name},
        {"target_label": "endpoint", "replacement": endpoint["port"]},
        *({SNAKE.get(key, key): value for key, value in rule.items()} for rule in endpoint.get("relabelings", ())),
    ]
    return {
        "job_name": f"podMonitor/{name}/{number}",
        "honor_labels": endpoint.get("honorLabels", False),
        "scrape_interval": endpoint["interval"],
        "metrics_path": endpoint["path"],
        "kubernetes_sd_configs": [{"role": "pod", "kubeconfig_file": str(kubeconfig), **where}],
        "relabel_configs": relabel,
    }
