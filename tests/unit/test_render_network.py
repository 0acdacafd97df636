"""Who reaches what: the rules of the NetworkPolicy are evaluated as a network plugin would, for each kind of peer and port."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from builders import by_name, pod_specs, rendered

from pd_operator.core.snapshot import Install
from pd_operator.upstream import lmcache, vllm

P2P = {"lmcache": {"p2p": {"enabled": True}}}
ENGINE = {"pdserve.dev/deployment": "chat", "app.kubernetes.io/component": "engine"}
# peer -> (its namespace, its labels)
PEERS: dict[str, tuple[str, dict[str, str]]] = {
    "engine": ("demo", ENGINE),
    "router": ("demo", {"pdserve.dev/deployment": "chat", "app.kubernetes.io/component": "router"}),
    "coordinator": ("demo", {"pdserve.dev/deployment": "chat", "app.kubernetes.io/component": "coordinator"}),
    "engine of another deployment": ("demo", {**ENGINE, "pdserve.dev/deployment": "other"}),
    "neighbour": ("demo", {"app": "x"}),
    "namesake elsewhere": ("elsewhere", ENGINE),
    "operator": ("pd-operator", {"app.kubernetes.io/name": "pd-operator"}),
    "impostor": ("elsewhere", {"app.kubernetes.io/name": "pd-operator"}),
    "neighbour of the operator": ("pd-operator", {"app": "x"}),
    "prometheus": ("monitoring", {"app": "prometheus"}),
}
READERS = {"operator", "prometheus"}
HTTP, CACHE = vllm.PORT, lmcache.HTTP_PORT


def reached(policy: Mapping[str, Any], port: int, protocol: str = "TCP") -> set[str]:
    """Peers that reach a port of an engine pod."""
    return {
        peer
        for peer, (namespace, labels) in PEERS.items()
        if any(
            _allows(rule, policy["metadata"]["namespace"], namespace, labels, port, protocol) for rule in policy["spec"]["ingress"]
        )
    }


def _allows(rule: Mapping[str, Any], here: str, namespace: str, labels: Mapping[str, str], port: int, protocol: str) -> bool:
    ports = any(p.get("protocol") == protocol and p["port"] <= port <= p.get("endPort", p["port"]) for p in rule["ports"])
    return ports and ("from" not in rule or any(_peer(p, here, namespace, labels) for p in rule["from"]))


def _peer(peer: Mapping[str, Any], here: str, namespace: str, labels: Mapping[str, str]) -> bool:
    if "namespaceSelector" in peer:
        if peer["namespaceSelector"]["matchLabels"].items() - {("kubernetes.io/metadata.name", namespace)}:
            return False
    elif namespace != here:
        return False
    return peer.get("podSelector", {}).get("matchLabels", {}).items() <= labels.items()


def policy(changes: dict[str, Any], **fields: Any) -> dict[str, Any]:
    _, _, bundle = rendered(changes, **fields)
    return by_name(bundle)["NetworkPolicy", "chat-engine"]


@pytest.mark.parametrize("changes", [{"lmcache": {}}, P2P])
def test_the_cache_servers_http_port_is_closed_to_all_but_its_readers(changes: dict[str, Any]) -> None:
    """It answers /env with all variables and runs what is posted to /run_script, to anybody who reaches it."""
    assert reached(policy(changes), CACHE) == READERS


def test_without_a_cache_nobody_reaches_that_port() -> None:
    assert reached(policy({}), CACHE) == set()


@pytest.mark.parametrize("changes", [{}, {"lmcache": {}}, P2P])
def test_engines_reach_each_other_on_every_port_but_that_one(changes: dict[str, Any]) -> None:
    """UCX picks the ports of the data plane, and the side channel of rank n listens on 5600 + n."""
    found = policy(changes)
    for port in (1, 1024, vllm.SIDE_CHANNEL_PORT, vllm.SIDE_CHANNEL_PORT + 9, 8079, 8081, 32768, 65535):
        assert {"engine"} <= reached(found, port), port
        assert not {"engine of another deployment", "neighbour", "namesake elsewhere"} & reached(found, port), port
    assert reached(found, 4791, "UDP") == {"engine"}  # RoCE v2


@pytest.mark.parametrize("changes", [{}, {"lmcache": {}}, P2P])
def test_requests_come_through_the_routers(changes: dict[str, Any]) -> None:
    """One request with made-up kv_transfer_params ends a decode engine, so engines are no address for clients."""
    assert reached(policy(changes), HTTP) == {"engine", "router", "coordinator", *READERS}


def test_ports_of_peer_to_peer_are_open_within_the_deployment_only() -> None:
    found = policy(P2P)
    for port in (lmcache.DATA_PORT, lmcache.P2P_PORT):
        assert reached(found, port) == {"engine", "router", "coordinator"}


def test_every_engine_pod_is_covered_and_no_other() -> None:
    _, _, bundle = rendered(P2P)
    selector = by_name(bundle)["NetworkPolicy", "chat-engine"]["spec"]["podSelector"]["matchLabels"]
    for name, pod in pod_specs(bundle).items():
        assert (selector.items() <= pod["metadata"]["labels"].items()) is name.endswith(("-prefill", "-decode")), name


def test_only_ingress_is_limited() -> None:
    assert policy({})["spec"]["policyTypes"] == ["Ingress"]


def test_the_installs_own_namespaces_count() -> None:
    install = Install(namespace="elsewhere", monitoring_namespace="observability")
    found = reached(policy({"lmcache": {}}, install=install), CACHE)
    assert found == {"impostor"}  # with this install it is the operator


def test_doors() -> None:
    _, _, bundle = rendered(P2P)
    found = by_name(bundle)
    (slice_,) = [
        name for kind, name in found if kind == "Service" and name.startswith("chat-") and not name.endswith("coordinator")
    ]
    for name in ("chat", slice_):
        assert found["Service", name]["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}]
        assert found["Service", name]["spec"]["type"] == "ClusterIP"
    coordinator = found["Service", f"{slice_}-coordinator"]
    assert coordinator["spec"]["ports"][0]["port"] == lmcache.COORDINATOR_PORT
