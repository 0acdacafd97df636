"""Metrics of what the status of each object says, made when they are scraped: a series goes with its object.

Only the leader reconciles, so one pod of an install has them. Their number is bounded: an object has each condition once, with the
reason of the moment as a label; the messages are in status.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pd_operator.core.names import Role

PREFIX: Final = "pd_operator_pddeployment"
POOL: Final = "pd_operator_pdpool"
OBJECT: Final = ["namespace", "name"]
COUNTS: Final = {
    "desired": "desiredReplicas",
    "existing": "replicas",
    "ready": "readyReplicas",
    "updated": "updatedReplicas",
}
Key = tuple[str, str]  # namespace and name of a PDDeployment


class Shown:
    """The status of each object as its last reconcile made it."""

    def __init__(self) -> None:
        self._objects: dict[Key, Mapping[str, Any]] = {}
        self._pools: dict[Key, dict[Role, Mapping[str, Any]]] = {}

    def put(self, key: Key, status: Mapping[str, Any]) -> None:
        """A PDDeployment's. A status of conditions only (its spec cannot be read) leaves the rest as it was."""
        self._objects[key] = {**self._objects.get(key, {}), **status}

    def put_pool(self, key: Key, role: Role, status: Mapping[str, Any]) -> None:
        """A PDPool's."""
        self._pools.setdefault(key, {})[role] = status

    def forget(self, key: Key) -> None:
        """The object is gone, or another install's."""
        self._objects.pop(key, None)
        self._pools.pop(key, None)

    def objects(self) -> list[tuple[Key, Mapping[str, Any]]]:
        """By key."""
        return sorted(self._objects.items(), key=lambda item: item[0])

    def pools(self) -> list[tuple[Key, Role, Mapping[str, Any]]]:
        """By key and role."""
        return [(key, role, status) for key in sorted(self._pools) for role, status in sorted(self._pools[key].items())]


class ObjectMetrics(Collector):
    """Gauges of every PDDeployment and PDPool."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown

    def describe(self) -> Iterable[Metric]:
        """Nothing is collected at registration."""
        return []

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        found = _families()
        for key, status in self._shown.objects():
            _add(found, key, status)
        for key, role, status in self._shown.pools():
            for condition in status.get("conditions", ()):
                told = [condition["type"], condition["status"], condition["reason"]]
                found["pool"].add_metric([*key, role, *told], 1)
        yield from found.values()


def _families() -> dict[str, GaugeMetricFamily]:
    def family(name: str, help_: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, help_, labels=[*OBJECT, *labels])

    told = ("type", "status", "reason")
    return {
        "condition": family(f"{PREFIX}_condition", "1 for the status and reason that each condition has now.", *told),
        "serving": family(f"{PREFIX}_serving_slices", "Slices that take traffic."),
        "slices": family(f"{PREFIX}_slices", "Slices by state: Dark, Serving, Removing.", "state"),
        "excluded": family(f"{PREFIX}_excluded_domains", "Transfer domains that are left alone since a slice was wedged there."),
        "replicas": family(f"{PREFIX}_replicas", f"Replicas by state: {', '.join(COUNTS)}.", "role", "state"),
        "gpus": family(f"{PREFIX}_gpus", "Accelerators that the existing replicas hold.", "role"),
        "pool": family(f"{POOL}_condition", "The same of the PDPool of a role; name is the PDDeployment's.", "role", *told),
    }


def _add(found: Mapping[str, GaugeMetricFamily], key: Key, status: Mapping[str, Any]) -> None:
    for condition in status.get("conditions", ()):
        found["condition"].add_metric([*key, condition["type"], condition["status"], condition["reason"]], 1)
    if "servingSlices" not in status:
        return  # nothing but conditions was ever told of it
    found["serving"].add_metric([*key], status["servingSlices"])
    states = [slice_["state"] for slice_ in status["slices"]]
    for state in ("Dark", "Serving", "Removing"):
        found["slices"].add_metric([*key, state], states.count(state))
    found["excluded"].add_metric([*key], len(status.get("excludedDomains") or ()))
    for role in status["roles"]:
        for state, field in COUNTS.items():
            found["replicas"].add_metric([*key, role["name"], state], role[field])
        found["gpus"].add_metric([*key, role["name"]], role["gpus"])
