"""Names of kernel objects that belong to one cluster, all derived from its state folder, so that a crash loses none of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

POD_CIDR = "10.244.0.0/16"


@dataclass(frozen=True)
class Identity:
    """`tag` is short because an interface name has at most 15 characters and a socket path at most 107."""

    state: Path

    @property
    def tag(self) -> str:
        return "pdd" + hashlib.sha256(str(self.state).encode()).hexdigest()[:6]

    @property
    def run(self) -> Path:
        """Sockets, container state and mounts of the nodes."""
        return Path("/run/pdd") / self.tag

    def node_tag(self, index: int) -> str:
        """Bridge, cgroup and CNI network of node `index`."""
        return f"{self.tag}n{index}"

    def gateway(self, index: int) -> str:
        """The bridge's address, which is the node's address too."""
        return f"10.244.{index}.1"

    def subnet(self, index: int) -> str:
        return f"10.244.{index}.0/24"
