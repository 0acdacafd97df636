"""Services, and the NetworkPolicies that close LMCache's HTTP port: it serves /env and /run_script to anybody who reaches it."""

from __future__ import annotations

from typing import Any, Final

from pd_operator.api.types import GatewaySpec
from pd_operator.core.front import ROUTE, Front
from pd_operator.core.names import COMPONENT, DEPLOYMENT, FRONT, SLICE, base_labels, slice_labels
from pd_operator.core.rollout import SlicePlan
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.core.verification import mode_of
from pd_operator.render import objects
from pd_operator.upstream import lmcache, vllm

NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"  # set by the API server on every namespace
LAST_PORT: Final = 65535
PORT: Final = 80  # of our Services


def front_service(snapshot: Snapshot) -> objects.Manifest:
    """The front door: router pods of serving slices, ready ones only."""
    labels = base_labels(snapshot.name, "front")
    return objects.manifest("v1", "Service", snapshot, snapshot.name, labels, spec=_service({FRONT: snapshot.name}))


def slice_service(snapshot: Snapshot, slice_: SlicePlan) -> objects.Manifest:
    """The slice's own door, dark or not."""
    labels = slice_labels(snapshot.name, ROUTER, slice_.name, slice_.revision)
    selector = {DEPLOYMENT: snapshot.name, SLICE: slice_.name, COMPONENT: ROUTER}
    return objects.manifest("v1", "Service", snapshot, slice_.name, labels, spec=_service(selector))


def route(snapshot: Snapshot, front: Front, gateway: GatewaySpec) -> objects.Manifest:
    """The HTTPRoute: one backend a serving slice, or the front Service while none serves.

    No timeouts are set: an answer may stream for minutes, and what a gateway allows is its own policy.
    """
    backends = [
        {"group": "", "kind": "Service", "name": name, "port": PORT, "weight": weight}
        for name, weight in front.backends(snapshot.name)
    ]
    spec: dict[str, Any] = {"parentRefs": [dict(parent) for parent in gateway.parent_refs]}
    if gateway.hostnames:
        spec["hostnames"] = list(gateway.hostnames)
    spec["rules"] = [{"matches": [{"path": {"type": "PathPrefix", "value": "/"}}], "backendRefs": backends}]
    labels = base_labels(snapshot.name, "front")
    return objects.manifest("gateway.networking.k8s.io/v1", ROUTE, snapshot, snapshot.name, labels, spec=spec)


def _service(selector: dict[str, str]) -> dict[str, Any]:
    port = {"name": "http", "port": PORT, "targetPort": "http", "protocol": "TCP"}
    return {"type": "ClusterIP", "selector": selector, "ports": [port]}


def engine_policy(snapshot: Snapshot) -> objects.Manifest:
    """Ingress of the engine pods.

    Peers reach every port but LMCache's HTTP one (NIXL's data ports are chosen by UCX), the routers reach the engine's HTTP
    port, and the operator, the canary and the monitoring namespace reach both HTTP ports. Nobody else does: one request
    with made-up kv_transfer_params ends a decode engine (measured, vLLM 0.32.0). The kubelet's probes are not subject to
    policies, nor is a pod's traffic to itself.
    """
    engines = {"podSelector": {"matchLabels": {DEPLOYMENT: snapshot.name, COMPONENT: "engine"}}}
    ours = {"podSelector": {"matchLabels": {DEPLOYMENT: snapshot.name}}}
    below, above = lmcache.HTTP_PORT - 1, lmcache.HTTP_PORT + 1
    ingress = [
        {"from": [engines], "ports": [_ports(1, below), _ports(above, LAST_PORT)]},
        {"from": [engines], "ports": [_ports(1, LAST_PORT, "UDP")]},
        {"from": [ours, *_readers(snapshot)], "ports": [{"port": vllm.PORT, "protocol": "TCP"}]},
    ]
    if snapshot.spec.lmcache is not None:
        readers = _readers(snapshot)
        if mode_of(snapshot) != "Disabled":
            readers.append({"podSelector": {"matchLabels": {DEPLOYMENT: snapshot.name, COMPONENT: "canary"}}})
        ingress.append({"from": readers, "ports": [{"port": lmcache.HTTP_PORT, "protocol": "TCP"}]})
        if snapshot.spec.lmcache.p2p.enabled:
            ingress.append(
                {"from": [ours], "ports": [{"port": port, "protocol": "TCP"} for port in (lmcache.DATA_PORT, lmcache.P2P_PORT)]}
            )
    spec = {"podSelector": engines["podSelector"], "policyTypes": ["Ingress"], "ingress": ingress}
    labels = base_labels(snapshot.name, "engine")
    return objects.manifest("networking.k8s.io/v1", "NetworkPolicy", snapshot, f"{snapshot.name}-engine", labels, spec=spec)


def _readers(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Who may read the metrics of engines and LMCache: this install of the operator, and Prometheus."""
    install = snapshot.install
    operator = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_NAME: install.namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "pd-operator"}},
    }
    monitoring = {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: install.monitoring_namespace}}}
    return [operator, monitoring]


def _ports(first: int, last: int, protocol: str = "TCP") -> dict[str, Any]:
    return {"port": first, "endPort": last, "protocol": protocol}
