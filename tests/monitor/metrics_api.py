"""A metrics adapter of fixed numbers, as an HPA reads it: custom.metrics.k8s.io and external.metrics.k8s.io, through the API
server's aggregation layer.

The APIServices lead through a Service of type ExternalName to this process, so no pod network is needed. Both are taken away at the
end: with an API that does not answer, no namespace can be deleted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cluster.handle import Cluster
from monitor.listening import Handler, Listening, tls
from opsrunner.waits import until

EXTERNAL, CUSTOM = "external.metrics.k8s.io/v1beta1", "custom.metrics.k8s.io/v1beta2"


class MetricsApi:
    """As a context. `external`: metric -> number; `pods`: metric -> pod -> number. A metric that is not in them answers 404."""

    def __init__(self, cluster: Cluster, namespace: str, pem: Path) -> None:
        self._cluster, self._namespace = cluster, namespace
        self.external: dict[str, float] = {}
        self.pods: dict[str, Mapping[str, float]] = {}
        self.asked: list[tuple[str, str]] = []  # metric, label selector of the metric (external) or of the pods
        outer = self

        class Asked(Handler):
            def do_GET(self) -> None:
                status, body = outer._answer(urlsplit(self.path).path, parse_qs(urlsplit(self.path).query))
                self.answer(status, json.dumps(body).encode())

        self._server = Listening(Asked, tls(pem))

    def __enter__(self) -> MetricsApi:
        self._server.start()
        self._cluster.apply(*self._objects())
        names = [f"apiservice/{self._name(api)}" for api in (EXTERNAL, CUSTOM)]
        self._cluster.kubectl("wait", "--for=condition=Available", *names, "--timeout=60s", timeout=70)
        until(
            "the metrics API", lambda: "externalmetrics" in self._cluster.kubectl("get", "--raw", f"/apis/{EXTERNAL}", check=False)
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.kubectl("delete", "apiservice", *(self._name(api) for api in (EXTERNAL, CUSTOM)), "--ignore-not-found")
        self._server.stop()

    def _objects(self) -> list[dict[str, Any]]:
        port = self._server.port
        name = "metrics-adapter"
        service = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
        metadata = {"name": name, "namespace": self._namespace}
        found: list[dict[str, Any]] = [{"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service}]
        for api in (EXTERNAL, CUSTOM):
            group, version = api.split("/")
            spec = {
                "group": group, "version": version, "groupPriorityMinimum": 100, "versionPriority": 100,
                "insecureSkipTLSVerify": True, "service": {**metadata, "port": port},
            }  # fmt: skip
            kind = {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService"}
            found.append({**kind, "metadata": {"name": self._name(api)}, "spec": spec})
        return found

    @staticmethod
    def _name(api: str) -> str:
        group, version = api.split("/")
        return f"{version}.{group}"

    def _answer(self, path: str, query: Mapping[str, list[str]]) -> tuple[int, dict[str, Any]]:
        parts = path.strip("/").split("/")
        api = "/".join(parts[1:3])
        if api not in (EXTERNAL, CUSTOM):
            return 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        if len(parts) == 3:
            return 200, self._resources(api)
        metric = parts[-1]
        selector = (query.get("labelSelector") or [""])[0]
        self.asked.append((metric, selector))
        known: Any = self.external.get(metric) if api == EXTERNAL else self.pods.get(metric)
        if known is None or parts[4] != self._namespace:
            return 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if api == EXTERNAL:
            labels = dict(pair.split("=", 1) for pair in selector.split(",") if pair)
            items = [{"metricName": metric, "metricLabels": labels, "timestamp": now, "value": _quantity(known)}]
            return 200, {"kind": "ExternalMetricValueList", "apiVersion": api, "metadata": {}, "items": items}
        items = [
            {
                "describedObject": {"kind": "Pod", "namespace": self._namespace, "name": pod, "apiVersion": "v1"},
                "metric": {"name": metric}, "timestamp": now, "value": _quantity(value),
            }
            for pod, value in known.items()
        ]  # fmt: skip
        return 200, {"kind": "MetricValueList", "apiVersion": api, "metadata": {}, "items": items}

    @staticmethod
    def _resources(api: str) -> dict[str, Any]:
        name, kind = ("externalmetrics", "ExternalMetricValueList") if api == EXTERNAL else ("pods/any", "MetricValueList")
        entry = {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get"]}
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": [entry]}


def _quantity(value: float) -> str:
    return f"{round(value * 1000)}m"
