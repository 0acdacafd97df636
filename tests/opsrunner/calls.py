"""What one user asked the API server for since a moment, from the audit log. Reads only what was written since, and parses
only that user's lines: the log of a busy cluster has a hundred thousand others.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.handle import Cluster

WRITES = ("create", "update", "patch", "delete", "deletecollection")
LEASES = "leases"


class CallLog:
    """The finished requests of a user, oldest first.

    Args:
        user: exact name, such as system:serviceaccount:NAMESPACE:NAME.

    Raises:
        RuntimeError: the cluster has no audit log that a test can read (PDD_KUBECONFIG).
    """

    def __init__(self, cluster: Cluster, user: str) -> None:
        if cluster.audit_log is None:
            raise RuntimeError("this test reads the API server's audit log: let it make its own cluster (unset PDD_KUBECONFIG)")
        self._log: Path = cluster.audit_log
        self._user = user
        self._from = self._log.stat().st_size

    def mark(self) -> int:
        """The present end of the log."""
        return self._log.stat().st_size

    def events(self, since: int = 0, upto: int | None = None) -> Iterator[dict[str, Any]]:
        """Audit events between two marks, each request once; a watch counts when it begins."""
        needle = f'"username":"{self._user}"'.encode()
        seen: set[str] = set()
        with self._log.open("rb") as log:
            log.seek(max(self._from, since))
            for line in log:
                if (upto is not None and log.tell() > upto) or not line.endswith(b"\n"):
                    return
                if needle in line:
                    event = json.loads(line)
                    if event["user"]["username"] == self._user and event["auditID"] not in seen:
                        seen.add(event["auditID"])
                        yield event

    def count(self, since: int = 0, upto: int | None = None) -> Counter[tuple[str, str]]:
        """(verb, resource/subresource) -> requests, without those on Leases and looks for an optional kind that is not there."""
        found = Counter((event["verb"], resource_of(event)) for event in self.events(since, upto) if not _absent(event))
        return Counter({call: number for call, number in found.items() if call[1] != LEASES})

    def leases(self, since: int, upto: int) -> int:
        """Renewals of a Lease."""
        return sum(event["verb"] == "update" and resource_of(event) == LEASES for event in self.events(since, upto))

    def writes(self, since: int, upto: int | None = None) -> dict[tuple[str, str], int]:
        """Those of `count` that write."""
        return {call: number for call, number in self.count(since, upto).items() if call[0] in WRITES}

    def denied(self) -> list[str]:
        """What RBAC refused. A 403 of admission (a namespace that ends) is something else."""
        return [
            f"{event['verb']} {event['requestURI']}"
            for event in self.events()
            if event.get("annotations", {}).get("authorization.k8s.io/decision") == "forbid"
        ]


def _absent(event: dict[str, Any]) -> bool:
    """Whether it asked for a kind whose CRD is not installed: only then a list is answered 404."""
    return event["verb"] == "list" and event.get("responseStatus", {}).get("code") == 404


def resource_of(event: dict[str, Any]) -> str:
    """resource or resource/subresource; the path for requests that are about none."""
    where = event.get("objectRef") or {}
    return "/".join(filter(None, (where.get("resource"), where.get("subresource")))) or str(event["requestURI"])
