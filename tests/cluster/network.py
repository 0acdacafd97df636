"""Bridges, routes and kernel settings that real nodes need, and their removal."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from cluster import paths
from cluster.controlplane import SERVICE_CIDR
from cluster.identity import POD_CIDR, Identity
from cluster.progress import say

# What pods, bridges and kubelets need. The kubelet itself sets the last three (pkg/kubelet/cm/container_manager_linux.go,
# setupKernelTunables); they are listed so that `down` puts them back.
SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    "net/bridge/bridge-nf-call-iptables": "1",
    "fs/inotify/max_user_instances": "8192",
    "vm/overcommit_memory": "1",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
}


def command(*arguments: str, check: bool = True, timeout: float = 30, stdin: str | None = None) -> str:
    """Run a host command; returns its standard output. Raises RuntimeError with what it said when it fails."""
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout, input=stdin)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def claim(identity: Identity, count: int) -> None:
    """Make the bridges of `count` nodes, which claim the addresses for this cluster.

    PDD_NODES_WAIT (seconds, default 0) is how long to wait while another cluster has them. Raises RuntimeError that names it then.
    """
    limit = float(os.environ.get("PDD_NODES_WAIT", "0"))
    deadline = time.monotonic() + limit
    while True:
        try:
            with paths.lock(Path("/run/lock/pdd-nodes.lock"), timeout=60, what="another start of real nodes"):
                _refuse_clash(identity)
                _claimed(identity).parent.mkdir(parents=True, exist_ok=True)
                _claimed(identity).touch()
                _make_bridges(identity, count)
                return
        except RuntimeError as error:
            if time.monotonic() > deadline:
                raise
            say(f"waiting up to {limit:.0f} s: {error}")
        time.sleep(5)


def _claimed(identity: Identity) -> Path:
    return identity.state / "nodes" / ".claimed"


def holds_claim(identity: Identity) -> bool:
    """Whether kube-proxy's chains on this host, whose names are the same for every cluster, are this cluster's."""
    links = json.loads(command("ip", "-j", "link", "show"))
    return _claimed(identity).exists() or any(link["ifname"].startswith(identity.tag) for link in links)


def _refuse_clash(identity: Identity) -> None:
    """Raises RuntimeError when another cluster or another program on this host holds the addresses or kube-proxy's chains."""
    for link in json.loads(command("ip", "-j", "address", "show")):
        if link["ifname"].startswith(identity.tag):
            continue
        for address in link.get("addr_info", []):
            if address.get("local", "").startswith("10.244."):
                owner = json.loads(command("ip", "-j", "link", "show", "dev", link["ifname"]))[0].get("ifalias", "another program")
                raise RuntimeError(
                    f"the address {address['local']} is in use on {link['ifname']} by {owner}; two clusters with real nodes "
                    "cannot run at once on one host: take the other down (python -m cluster down --name NAME), or use it "
                    "(PDD_CLUSTER=NAME)"
                )
    if ":KUBE-SERVICES " in command("iptables-save", "-t", "nat"):
        raise RuntimeError("this host has kube-proxy's iptables chains (KUBE-SERVICES): another Kubernetes node runs on it")


def set_sysctls(state: Path) -> None:
    """Set what nodes need and remember what it was. Raises RuntimeError when the kernel lacks one."""
    for module in ("overlay", "br_netfilter"):
        if shutil.which("modprobe"):  # built into some kernels, then modprobe fails and the files below exist all the same
            command("modprobe", module, check=False)
    record = state / "sysctls.json"
    before = json.loads(record.read_text()) if record.is_file() else {}
    for name, value in SYSCTLS.items():
        path = Path("/proc/sys") / name
        if not path.exists():
            raise RuntimeError(f"the kernel has no {path}: real nodes need it (for net/bridge: the module br_netfilter)")
        now = path.read_text().strip()
        before.setdefault(name, now)
        record.write_text(json.dumps(before))
        if not (now.isdigit() and name.startswith("fs/") and int(now) >= int(value)):
            path.write_text(value)


def restore_sysctls(state: Path) -> None:
    record = state / "sysctls.json"
    if record.is_file():
        for name, value in json.loads(record.read_text()).items():
            (Path("/proc/sys") / name).write_text(value)
        record.unlink()


def _make_bridges(identity: Identity, count: int) -> None:
    """One bridge a node. The alias tells a person, and another cluster's error message, whose it is."""
    for index in range(count):
        name = identity.node_tag(index)
        command("ip", "link", "add", name, "type", "bridge")
        command("ip", "link", "set", name, "alias", f"the cluster {identity.state.name} ({identity.state})")
        command("ip", "address", "add", f"{identity.gateway(index)}/24", "dev", name)
        command("ip", "link", "set", name, "up")
    # Service addresses are rewritten on output, but only after a route was found: on a host without a default route there is none.
    command("ip", "route", "replace", SERVICE_CIDR, "dev", identity.node_tag(0))
    for direction in ("-s", "-d"):  # Docker and firewalls set the policy of FORWARD to DROP
        command(
            "iptables", "-w", "10", "-I", "FORWARD", direction, POD_CIDR, "-m", "comment", "--comment", identity.tag, "-j", "ACCEPT"
        )


def remove_bridges(identity: Identity) -> None:
    """Remove the cluster's bridges with everything plugged into them."""
    for link in json.loads(command("ip", "-j", "link", "show")):
        mine = re.fullmatch(rf"{identity.tag}n\d+", link.get("master", "")) or re.fullmatch(rf"{identity.tag}n\d+", link["ifname"])
        if mine:
            command("ip", "link", "delete", link["ifname"], check=False)  # a veth may go with its namespace meanwhile


def remove_rules(identity: Identity) -> None:
    """Remove kube-proxy's and the kubelet's chains, the rules that jump there, and our own rules."""
    for family in ("iptables", "ip6tables"):
        if shutil.which(f"{family}-save") is None:
            continue
        script: list[str] = []
        table = ""
        drop: list[str] = []
        for line in command(f"{family}-save", check=False).splitlines():
            if line.startswith("*"):
                table = line[1:]
                script.append(line)
                drop = []
            elif line.startswith(":KUBE-"):
                drop.append(line[1:].split()[0])
            elif line.startswith("-A ") and not line.startswith("-A KUBE-") and ("KUBE-" in line or identity.tag in line):
                script.append("-D " + line[3:])
            elif line == "COMMIT" and table:
                script += [f"-F {chain}" for chain in drop] + [f"-X {chain}" for chain in drop] + ["COMMIT"]
        if any(line[:2] in {"-D", "-F"} for line in script):
            command(f"{family}-restore", "-w", "10", "--noflush", stdin="\n".join(script) + "\n")


def forget_connections() -> None:
    """Remove the kernel's memory of connections to pods and Services that are gone."""
    if shutil.which("conntrack"):
        command("conntrack", "-D", "-s", POD_CIDR, check=False)
        command("conntrack", "-D", "-d", SERVICE_CIDR, check=False)
