"""What makes Services work on the nodes: kube-proxy and CoreDNS, both on the host."""

from __future__ import annotations

import urllib.request

import yaml

from cluster import tools
from cluster.controlplane import ControlPlane
from cluster.handle import kubectl
from cluster.identity import POD_CIDR, Identity
from cluster.network import command
from cluster.node import DNS_IP
from cluster.ports import free_ports
from cluster.progress import wait_for


def start_kube_proxy(plane: ControlPlane) -> None:
    """One kube-proxy for the host, which is the network stack of both nodes. Waits until its rules are there, at most 30 s."""
    metrics, health = free_ports(2)
    config = plane.state / "kube-proxy.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
                "kind": "KubeProxyConfiguration",
                "mode": "iptables",
                "clientConnection": {"kubeconfig": str(plane.kubeconfig_of("kube-proxy"))},
                "clusterCIDR": POD_CIDR,
                "hostnameOverride": "n0",
                "bindAddress": Identity(plane.state).gateway(0),
                "healthzBindAddress": f"127.0.0.1:{health}",
                "metricsBindAddress": f"127.0.0.1:{metrics}",
                # Zero leaves the host's conntrack limits as they are.
                "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
                "iptables": {"minSyncPeriod": "100ms", "syncPeriod": "30s"},
            }
        )
    )
    plane.processes.start("kube-proxy", [tools.tool("kube-proxy"), "--config", config])

    def ready() -> bool:
        plane.processes.check("kube-proxy")
        return ":KUBE-SERVICES " in command("iptables-save", "-t", "nat")

    wait_for("kube-proxy's rules", ready, timeout=30, interval=0.3)


def start_coredns(plane: ControlPlane) -> None:
    """CoreDNS on the first bridge, behind the Service kube-system/kube-dns. Waits until it is ready, at most 30 s."""
    address = Identity(plane.state).gateway(0)
    (port,) = free_ports(1)
    corefile = plane.state / "Corefile"
    corefile.write_text(
        f"""cluster.local:53 in-addr.arpa:53 ip6.arpa:53 {{
  bind {address}
  errors
  ready 127.0.0.1:{port}
  kubernetes cluster.local in-addr.arpa ip6.arpa {{
    kubeconfig {plane.kubeconfig_of("coredns")}
    ttl 5
  }}
}}
"""
    )
    plane.processes.start("coredns", [tools.tool("coredns"), "-conf", corefile])
    kubectl(plane.kubeconfig, "apply", "-f", "-", stdin=yaml.safe_dump_all(_dns_objects(address)))

    def ready() -> bool | str:
        plane.processes.check("coredns")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError as error:
            return f"wait: {error}"

    wait_for("CoreDNS", ready, timeout=30)


def _dns_objects(address: str) -> list[dict[str, object]]:
    ports = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
    metadata = {"name": "kube-dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"clusterIP": DNS_IP, "ports": ports}},
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**metadata, "labels": {"kubernetes.io/service-name": "kube-dns"}},
            "addressType": "IPv4",
            "ports": ports,
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
        },
    ]
