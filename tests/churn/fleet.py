"""PDDeployments of random shapes on the nodes of one test, and whether any of them could have more than it has."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from churn.packing import Counts, Wanted, most_effective, places
from cluster.kwok import DOMAIN_LABEL
from opsrunner import state, waits
from opsrunner.api import Api, Object
from opsrunner.domains import GPU
from pd_operator.core.names import DEPLOYMENT, MANAGED_BY, MANAGER, ROLE, ROLES, SLICE

WIDEST = 12  # replicas of one role, before all are made to fit the total


def wishes(count: int, gpus: int, seed: int, domain: int) -> list[Wanted]:
    """PDDeployments that want about `gpus` accelerators together, none more than three quarters of its domains of `domain` each."""
    rng = random.Random(seed)
    each, domains = (1, 1, 2, 4), (1, 1, 2, 4)
    drawn = [
        Wanted(
            f"f{number:02d}",
            (rng.randint(1, WIDEST), rng.randint(1, WIDEST)),
            (rng.choice(each), rng.choice(each)),
            rng.choice(domains),
        )
        for number in range(count)
    ]
    scale = gpus / sum(w.total for w in drawn)
    return [_scaled(w, min(scale, 0.75 * domain * w.max_domains / w.total)) for w in drawn]


def _scaled(wanted: Wanted, factor: float) -> Wanted:
    p, d = (max(1, round(n * factor)) for n in wanted.replicas)
    return replace(wanted, replicas=(p, d))


class Fleet:
    """Their objects in one namespace, and the nodes."""

    def __init__(self, api: Api, namespace: str, wanted: Sequence[Wanted]) -> None:
        self.api, self.namespace, self.wanted = api, namespace, wanted
        nodes = api.list("Node", None)
        self.domains = {n["metadata"]["name"]: n["metadata"]["labels"].get(DOMAIN_LABEL, "") for n in nodes}
        self.gpus = {n["metadata"]["name"]: int(n["status"]["allocatable"].get(GPU, 0)) for n in nodes}

    def create(self, wanted: Wanted) -> None:
        """One of them."""
        roles = {
            role: {"replicas": wanted.replicas[n], "resources": {"limits": {GPU: wanted.gpus[n]}}} for n, role in enumerate(ROLES)
        }
        placement = {"transferDomain": {"topologyKey": DOMAIN_LABEL}, "maxDomains": wanted.max_domains}
        self.api.create(
            state.pdd(self.namespace, wanted.name, **roles, router={"replicas": 1}, placement=placement, verification="Disabled")
        )

    def pods(self) -> list[Object]:
        """All pods of the cluster."""
        return self.api.list("Pod", None)

    def free(self, pods: Sequence[Object]) -> dict[str, list[int]]:
        """Domain -> free accelerators of each of its nodes."""
        taken: Counter[str] = Counter()
        for pod in pods:
            if (node := pod["spec"].get("nodeName")) and pod["status"].get("phase") not in ("Succeeded", "Failed"):
                taken[node] += _gpus(pod)
        found: dict[str, list[int]] = {}
        for node, domain in self.domains.items():
            found.setdefault(domain, []).append(self.gpus[node] - taken[node])
        return found

    def running(self, pods: Sequence[Object]) -> dict[str, dict[str, Counts]]:
        """PDDeployment -> domain -> replicas that have a node and do not end."""
        found: dict[str, dict[str, Counts]] = {w.name: {} for w in self.wanted}
        for pod in self._engines(pods):
            if (node := pod["spec"].get("nodeName")) and not pod["metadata"].get("deletionTimestamp"):
                mine = found[pod["metadata"]["labels"][DEPLOYMENT]]
                p, d = mine.get(self.domains[node], (0, 0))
                prefill = pod["metadata"]["labels"][ROLE] == "prefill"
                mine[self.domains[node]] = (p + prefill, d + (not prefill))
        return found

    def placed(self, pods: Sequence[Object]) -> int:
        """Accelerators that engines hold."""
        running = self.running(pods)
        return sum(p * w.gpus[0] + d * w.gpus[1] for w in self.wanted for p, d in running[w.name].values())

    def rest(self) -> list[Object]:
        """All pods when nothing is under way: the same before and after all else was looked at. Empty until then."""
        before = self.pods()
        if self.unrest(before):
            return []
        after = self.pods()
        return after if _places(before) == _places(after) else []

    def unrest(self, pods: Sequence[Object]) -> list[str]:
        """What is not at its end: a pod that ends, a slice that goes, one that could have more, a pod that could run."""
        free, running = self.free(pods), self.running(pods)
        engines = self._engines(pods)
        objects = {o["metadata"]["name"]: o for o in self.api.list("PDDeployment", self.namespace)}
        found = [f"{p['metadata']['name']} ends" for p in engines if p["metadata"].get("deletionTimestamp")]
        for wanted in self.wanted:
            found += self._own(wanted, running[wanted.name], free, objects.get(wanted.name))
        for pod in engines:
            homes = self._homes(pod, engines)
            if not pod["spec"].get("nodeName") and homes and any(places(free[d], _gpus(pod)) for d in homes):
                found.append(f"{pod['metadata']['name']} waits, and {sorted(homes)} has a node for it")
        return found

    def _own(
        self, wanted: Wanted, running: Mapping[str, Counts], free: Mapping[str, Sequence[int]], obj: Object | None
    ) -> list[str]:
        """One PDDeployment."""
        p, d = wanted.replicas
        slices = ((obj or {}).get("status") or {}).get("slices", [])
        small = _small(wanted, slices)
        going = [s["name"] for s in slices if s["state"] != "Serving" and s["name"] not in small and any(running)]
        found = [f"{wanted.name}: {name} is not serving: {waits.describe(obj)}" for name in going]
        if any(sum(counts) and not all(counts) for counts in running.values()):
            found.append(f"{wanted.name} has half a slice: {dict(running)}")
        more = any(sum(c[role] for c in running.values()) > wanted.replicas[role] for role in (0, 1))
        if more or len(running) > wanted.max_domains:
            found.append(f"{wanted} has more than it wants: {dict(running)}: {waits.describe(obj)}")
        if all(sum(c[role] for c in running.values()) >= wanted.replicas[role] for role in (0, 1)):
            told = waits.has(obj, "Placed", "True", "Bound") and waits.has(obj, "Ready", "True")
            if not told or (small and not waits.has(obj, "Progressing", "False", "WeightsNotEnforceable")):
                found.append(f"{wanted.name} is complete and does not say so: {waits.describe(obj)}")
            return found
        now = sum(min(x * d, y * p) for x, y in running.values())
        best = most_effective(wanted, running, free)
        if best > now:
            found.append(f"{wanted} has {dict(running)}, effective {now} of {p * d}; {best} would fit: {waits.describe(obj)}")
        elif not waits.has(obj, "Placed", "False"):
            found.append(f"{wanted.name} is short and does not say so: {waits.describe(obj)}")
        return found

    def _homes(self, pod: Object, engines: Sequence[Object]) -> set[str]:
        """Domains in which a waiting pod may run: that of its slice, if its affinity or the slice's pods name one."""
        affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
        terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or []
        for term in terms:
            for e in term.get("matchExpressions") or []:
                if e["key"] == DOMAIN_LABEL and e["operator"] == "In":
                    return set(e["values"]) & set(self.domains.values())
        mine = pod["metadata"]["labels"][SLICE]
        nodes = {p["spec"].get("nodeName") for p in engines if p["metadata"]["labels"][SLICE] == mine} - {None}
        return {self.domains[n] for n in nodes}

    def _engines(self, pods: Sequence[Object]) -> list[Object]:
        mine = [p for p in pods if p["metadata"]["namespace"] == self.namespace]
        labels = [(p, p["metadata"].get("labels") or {}) for p in mine]
        return [p for p, found in labels if found.get(MANAGED_BY) == MANAGER and ROLE in found]


def _small(wanted: Wanted, slices: Sequence[Object]) -> set[str]:
    """Dark slices that may stay so: behind a plain Service all together would serve less with any of them than without.

    Each then gets as much as the smallest can serve. Replicas that fit nowhere wait in the largest, and count there.
    """
    counts = {s["name"]: (s.get("prefill", 0), s.get("decode", 0)) for s in slices if s["state"] != "Removing"}
    if not counts:
        return set()
    most = max(counts, key=lambda name: sum(counts[name]))
    lack = [total - sum(c[role] for c in counts.values()) for role, total in enumerate(wanted.replicas)]
    counts[most] = (counts[most][0] + lack[0], counts[most][1] + lack[1])
    able = {name: min(p * wanted.replicas[1], d * wanted.replicas[0]) for name, (p, d) in counts.items()}
    serving = [able[s["name"]] for s in slices if s["state"] == "Serving"]
    if not serving:
        return set()
    alone = len(serving) * min(serving)
    return {s["name"] for s in slices if s["state"] == "Dark" and (len(serving) + 1) * min(*serving, able[s["name"]]) < alone}


def _places(pods: Sequence[Object]) -> set[tuple[str, str, bool]]:
    """Which pods there are, where, and whether they end."""
    return {(p["metadata"]["uid"], p["spec"].get("nodeName", ""), "deletionTimestamp" in p["metadata"]) for p in pods}


def _gpus(pod: Object) -> int:
    return sum(int(c.get("resources", {}).get("limits", {}).get(GPU, 0)) for c in pod["spec"]["containers"])
