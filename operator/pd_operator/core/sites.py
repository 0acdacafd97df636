"""Where a slice may run. Decided when the slice is made, written on its workloads, and read back from there.

ANYWHERE  no transfer domain is asked for: no affinity of ours
PINNED    room for it was seen in a domain: required node affinity to that domain
FLOATING  no room was seen, or none can be seen: required pod affinity of the slice to itself, so that the scheduler, an
          autoscaler or a queue chooses a domain, and the same one for both roles
CROSSING  mode Preferred and no domain holds a pair: pod affinity to itself, only preferred
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pd_operator.core.names import ROLES, Role


class Kind(StrEnum):
    """See the module's text."""

    ANYWHERE = "Anywhere"
    PINNED = "Pinned"
    FLOATING = "Floating"
    CROSSING = "Crossing"


@dataclass(frozen=True, slots=True)
class Site:
    """Where one slice may run. It never changes while the slice lives: a change would roll its pods."""

    kind: Kind = Kind.ANYWHERE
    key: str = ""  # topology key; "" for ANYWHERE
    domain: str = ""  # PINNED; CROSSING: the one to be preferred
    anchor: Role = "decode"  # FLOATING: the role that binds first, the one with the larger pods
    avoid_domains: tuple[str, ...] = ()  # FLOATING: a slice of this deployment was stuck there, or another one is there
    avoid_nodes: tuple[str, ...] = ()  # FLOATING: kubernetes.io/hostname of nodes that must not take a part of it

    def encode(self) -> str:
        """Text of the annotation; "" for ANYWHERE. Fields at their defaults are left out."""
        if self.kind is Kind.ANYWHERE:
            return ""
        value: dict[str, Any] = {"kind": self.kind.value, "key": self.key}
        if self.domain:
            value["domain"] = self.domain
        if self.kind is Kind.FLOATING:
            value["anchor"] = self.anchor
        for name, items in (("avoidDomains", self.avoid_domains), ("avoidNodes", self.avoid_nodes)):
            if items:
                value[name] = list(items)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))


def decode(text: str) -> Site:
    """The site that `encode` wrote; ANYWHERE for what it never writes (somebody else edited the annotation)."""
    try:
        value = json.loads(text) if text else {}
        return Site(
            Kind(value["kind"]),
            str(value["key"]),
            str(value.get("domain", "")),
            "prefill" if value.get("anchor") == ROLES[0] else "decode",
            tuple(str(d) for d in value.get("avoidDomains", ())),
            tuple(str(n) for n in value.get("avoidNodes", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return Site()


@dataclass(frozen=True, slots=True)
class SliceTarget:
    """A slice that the current revision should have."""

    name: str
    replicas: Mapping[Role, int]
    site: Site = field(default_factory=Site)
    placed: Mapping[Role, int] | None = None  # those of them for which there is room; None: all
