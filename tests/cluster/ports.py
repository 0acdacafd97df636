"""Free TCP ports on loopback."""

from __future__ import annotations

import random
import socket

# Below the kernel's ephemeral range (32768 on) and Kubernetes' node ports (30000-32767): no client socket or NodePort can take one
# between the check here and the listen of the process that it is meant for.
_LOW, _HIGH = 20000, 29999


def free_ports(count: int) -> list[int]:
    """`count` different ports that nothing listens on. Raises RuntimeError after 1000 tries."""
    found: list[int] = []
    for _ in range(1000):
        port = random.SystemRandom().randint(_LOW, _HIGH)
        if port in found:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"found no {count} free ports between {_LOW} and {_HIGH} in 1000 tries")
