"""An HTTPRoute as decisions read it: where it leads, and what gateway controllers say of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pd_operator.core.observed import ParentFact, RouteFact

JUDGED = ("Accepted", "ResolvedRefs")  # conditions of a parent whose False means that traffic does not come through


def route(obj: Mapping[str, Any]) -> RouteFact:
    """The fact of one HTTPRoute."""
    rules = (obj.get("spec") or {}).get("rules") or ()
    backends = {(str(b.get("name", "")), int(b.get("weight", 1))) for rule in rules for b in rule.get("backendRefs") or ()}
    generation = int(obj["metadata"].get("generation", 0))
    parents = (obj.get("status") or {}).get("parents") or ()
    return RouteFact(tuple(sorted(backends)), tuple(p for raw in parents if (p := _parent(raw, generation)) is not None))


def _parent(raw: Mapping[str, Any], generation: int) -> ParentFact | None:
    """None while its controller has not looked at this generation of the route."""
    conditions = [c for c in raw.get("conditions") or () if c.get("type") in JUDGED]
    seen = [c for c in conditions if int(c.get("observedGeneration") or generation) >= generation]
    if not any(c.get("type") == JUDGED[0] for c in seen):
        return None
    bad = next((c for kind in JUDGED for c in seen if c.get("type") == kind and c.get("status") == "False"), None)
    refusal = f"{bad['type']} is False, {bad.get('reason', '')}: {bad.get('message', '')}" if bad else ""
    reference = raw.get("parentRef") or {}
    namespace = f"{reference['namespace']}/" if reference.get("namespace") else ""
    section = f", {reference['sectionName']}" if reference.get("sectionName") else ""
    name = f"{reference.get('kind', 'Gateway')} {namespace}{reference.get('name', '')}{section}"
    return ParentFact(name, str(raw.get("controllerName", "")), refusal)
