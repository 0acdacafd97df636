"""Which slices the current revision should have, and where: between the planner, which knows domains, and the rollout.

    spec, what exists, room -> demand -> placement.planner.place -> slices of the revision, each with a site and counts

Everything that it decides from is in the cluster: a slice's site stands on its workloads, where its pods are is seen, and which
domains are left alone for a while stands in status.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pd_operator.core.exclusions import EXCLUDED_NODE, Wedge, due, exclusions, recorded
from pd_operator.core.groups import whole
from pd_operator.core.ledger import Held, Room, domain_of_slice
from pd_operator.core.names import ROLE, ROLES, Role, slice_name, slice_number
from pd_operator.core.placement.capacity import HOSTNAME, NodeCapacity, ReplicaShape, Toleration, accelerators_of
from pd_operator.core.placement.demand import CROSSING, Demand, Exclusion, active
from pd_operator.core.placement.index import CapacityView
from pd_operator.core.placement.planner import EXPLAINED, at_rest, place
from pd_operator.core.placement.result import Placement, Share
from pd_operator.core.sites import Kind, Site, SliceTarget, decode
from pd_operator.core.snapshot import Snapshot

MAX_AVOIDED: Final = 256  # node names in one affinity; beyond that a floating slice keeps out of whole domains
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"  # Kueue then gates the pods (kueue.sigs.k8s.io, "Run Plain Pods")
Counts = tuple[int, int]  # prefill, decode
NONE: Final[Counts] = (0, 0)


@dataclass(frozen=True, slots=True)
class Existing:
    """A slice of the current revision that is there."""

    name: str
    site: Site
    wanted: Counts  # replicas of its workloads
    held: Counts  # bound and not ending, or room for what they lack is reserved
    bound: Counts  # replicas of which every pod has a node
    begun: bool  # some pod has a node
    domain: str  # where it is pinned or where most of its pods are; "" = not known, or it crosses domains

    @property
    def key(self) -> str | None:
        """The planner's name for where it is; None for a floating slice without a pod."""
        return CROSSING if self.site.kind is Kind.CROSSING else self.domain or None


@dataclass(frozen=True, slots=True)
class Placing:
    """The slices of the current revision, and what status says about them."""

    targets: tuple[SliceTarget, ...]
    placement: Placement | None = None  # the planner's answer; None where it was not asked
    unseen: str = ""  # why capacity could not be read; "" when it was, or when no domain is asked for
    domains: Mapping[str, str] = field(default_factory=dict)  # slice, of any revision -> domain; "" = not known
    excluded: tuple[Exclusion, ...] = ()
    wedged: tuple[Wedge, ...] = ()  # slices that are given up
    strays: tuple[str, ...] = ()  # what runs outside its slice's domain, in words
    usable: frozenset[str] = frozenset()  # domains with a node that the pods may use; filled in when no domain holds a pair
    due: float | None = None  # seconds until a slice may have to be given up
    lacking: str = ""  # "Insufficient nvidia.com/gpu", when no domain holds a pair

    @property
    def short(self) -> Counts:
        """(prefill, decode) wanted and not placed."""
        return self.placement.short if self.placement else NONE


def place_slices(snapshot: Snapshot, revision: str, totals: Mapping[Role, int]) -> Placing:
    """Decide over the slices of `revision` with pool totals `totals`."""
    wanted: Counts = (totals["prefill"], totals["decode"])
    if not snapshot.spec.placement.transfer_domain.topology_key:
        return Placing((SliceTarget(slice_name(snapshot.name, revision), _counts(wanted)),))
    existing = _existing(snapshot, revision)
    places = [(e.name, e.site, e.bound, e.domain) for e in existing]
    left, wedged = exclusions(snapshot, places)
    # First status says what is left alone, then a slice goes for it: a crash between the two forgets nothing (invariant I9).
    kept = {e.domain for e in left}
    said = [e for e in recorded(snapshot.status) if e.domain in kept]
    gone = tuple(w for w in wedged if set(w.places) <= set(active(said, snapshot.now)))
    stays = [e for e in existing if e.name not in {w.slice for w in gone}]
    room, unseen = snapshot.room, snapshot.unseen
    if wanted == NONE:
        targets, placement = [_target(e, NONE) for e in stays], None
    elif room is None or unseen:
        targets, placement = _unobserved(snapshot, revision, wanted, stays, said), None
    else:
        targets, placement = _observed(snapshot, revision, wanted, stays, said, room)
    shapes = snapshot.shapes
    lacks = accelerators_of(*shapes.values()) if placement and not placement.domains else ()
    return Placing(
        tuple(targets),
        placement,
        (unseen or "nodes cannot be read") if room is None or unseen else "",
        _domains(snapshot),
        left,
        wedged,
        _strays(snapshot),
        frozenset(n.labels[_key(snapshot)] for n in _takers(snapshot, room)) if lacks and room else frozenset(),
        due(snapshot, places),
        ", ".join(f"Insufficient {name}" for name in lacks),
    )


def _existing(snapshot: Snapshot, revision: str) -> list[Existing]:
    found = []
    for name, parts in snapshot.deployments().items():
        engines = {role: parts[role] for role in ROLES if role in parts and not parts[role].deleting}
        if snapshot.revision_of(name) != revision or not engines:
            continue
        site = next((s for s in (decode(d.site) for d in engines.values()) if s.kind is not Kind.ANYWHERE), Site(Kind.FLOATING))
        held = [_held(snapshot, name, role) for role in ROLES]
        wanted = [(d.workload.spec_replicas or 0) if (d := engines.get(role)) and d.workload else 0 for role in ROLES]
        bound = [h.bound for h in held]
        both = [h.bound + h.reserved for h in held]
        begun = any(h.places for h in held)
        found.append(Existing(name, site, _pair(wanted), _pair(both), _pair(bound), begun, _domain(snapshot, name, site)))
    for name, text in sorted(snapshot.unshown.items()):
        if name.rpartition("-")[0] == f"{snapshot.name}-{revision}" and name not in snapshot.deployments():
            site = decode(text)
            reserved = [_held(snapshot, name, role).reserved for role in ROLES]
            found.append(Existing(name, site, NONE, _pair(reserved), NONE, False, _domain(snapshot, name, site)))
    return found


def _held(snapshot: Snapshot, name: str, role: Role) -> Held:
    """Bound replicas: as the capacity view has them, so that both are of one instant; else as the pods say."""
    if snapshot.room is not None:
        return snapshot.room.held.get((name, role), Held())
    pods = [p for p in snapshot.engines_of(name, role) if p.node and not p.deleting]
    leaders, workers = ([p for p in pods if (ROLE in p.labels) is serves] for serves in (True, False))
    there = snapshot.deployments().get(name, {}).get(role)
    size = there.workload.size if there and there.workload else 1
    complete = whole((p.name for p in leaders), (p.name for p in workers), size) if size > 1 else None
    return Held(tuple(p.node for p in leaders), 0, tuple(p.node for p in workers), complete)


def _domain(snapshot: Snapshot, name: str, site: Site) -> str:
    if site.kind is Kind.PINNED:
        return site.domain
    if site.kind is not Kind.FLOATING or snapshot.room is None:
        return ""
    nodes = [n for role in ROLES for n in _held(snapshot, name, role).places]
    return domain_of_slice(nodes, snapshot.room.labels, _key(snapshot)) or ""


def _unobserved(
    snapshot: Snapshot, revision: str, wanted: Counts, stays: Sequence[Existing], left: Sequence[Exclusion]
) -> list[SliceTarget]:
    """The slices that are there share the totals as they do now; the first one floats."""
    kept = [e for e in stays if e.begun or not _outdated(snapshot, e, left)]
    if not kept:
        site = _site(snapshot, left)
        return [SliceTarget(_free_names(snapshot, revision, 1)[0], _counts(wanted), site)]
    shares = [split(total, [e.wanted[i] for e in kept]) for i, total in enumerate(wanted)]
    return [_target(e, (shares[0][n], shares[1][n])) for n, e in enumerate(kept)]


def _observed(
    snapshot: Snapshot, revision: str, wanted: Counts, stays: Sequence[Existing], left: Sequence[Exclusion], room: Room
) -> tuple[list[SliceTarget], Placement]:
    home: dict[str, Existing] = {}  # one slice a domain: the one that holds most
    for one in sorted(stays, key=lambda e: (-sum(e.bound), -sum(e.held), e.name)):
        if one.key is not None:
            home.setdefault(one.key, one)
    demand = _demand(snapshot, wanted, home, left)
    placement = place(demand, room.view, EXPLAINED if at_rest(demand) is None else 0)
    halves = {domain: e for domain, e in home.items() if e.site.kind is Kind.PINNED and any(e.held) and not all(e.held)}
    if not placement.domains and halves:
        kept = {domain: held for domain, held in demand.running.items() if domain not in halves}
        placement = place(replace(demand, running=kept), _without(snapshot, room, halves.values()))
    if not placement.domains:
        return _nowhere(snapshot, revision, wanted, stays, left, room), placement
    shares = _with_surplus(placement, home)
    fresh = [s for s in shares if s.domain not in home]
    names = dict(zip([s.domain for s in fresh], _free_names(snapshot, revision, len(fresh)), strict=True))
    room_for = {share.domain: _counts((share.prefill, share.decode)) for share in placement.domains}
    targets = []
    for share in shares:
        there = home.get(share.domain)
        name, site = (there.name, there.site) if there else (names[share.domain], _pin(snapshot, share, placement))
        targets.append(SliceTarget(name, _counts((share.prefill, share.decode)), site, room_for[share.domain]))
    return sorted(targets, key=lambda t: t.name), placement


def _without(snapshot: Snapshot, room: Room, halves: Iterable[Existing]) -> CapacityView:
    """Room as it would be without slices of which one role runs alone: it was faster, and the other finds nothing beside it.

    Such a slice serves nobody, so it may give up replicas for the role that it lacks.
    """
    view = room.view.fork()
    for one in halves:
        for role in ROLES:
            freed = {name: -amount for name, amount in snapshot.shapes[role].pods[0].needs().items()}
            for node in _held(snapshot, one.name, role).nodes:
                if room.labels.get(node):  # else the node is gone
                    view.take(node, freed)
    return view


def _demand(snapshot: Snapshot, wanted: Counts, home: Mapping[str, Existing], left: Sequence[Exclusion]) -> Demand:
    placement = snapshot.spec.placement
    return Demand(
        key=f"{snapshot.namespace}/{snapshot.name}",
        prefill=wanted[0],
        decode=wanted[1],
        prefill_shape=snapshot.shapes["prefill"],
        decode_shape=snapshot.shapes["decode"],
        topology_key=placement.transfer_domain.topology_key,
        mode=placement.transfer_domain.mode,
        max_domains=placement.max_domains,
        running={domain: one.held for domain, one in sorted(home.items()) if any(one.held)},
        excluded=active(left, snapshot.now),
    )


def _with_surplus(placement: Placement, home: Mapping[str, Existing]) -> list[Share]:
    """Replicas that fit nowhere wait in the largest slice: an autoscaler sees them, and they start as soon as there is room.

    Not before those that do fit have their nodes: the scheduler might give the room to one role alone.
    """
    shares = list(placement.domains)
    if any(placement.short):
        n = max(range(len(shares)), key=lambda i: (shares[i].prefill + shares[i].decode, -i))
        most = shares[n]
        there = home.get(most.domain)
        if there is not None and there.bound[0] >= most.prefill and there.bound[1] >= most.decode:
            shares[n] = most._replace(prefill=most.prefill + placement.short[0], decode=most.decode + placement.short[1])
    return shares


def _nowhere(
    snapshot: Snapshot, revision: str, wanted: Counts, stays: Sequence[Existing], left: Sequence[Exclusion], room: Room
) -> list[SliceTarget]:
    """No domain holds a pair. A slice of which something runs waits for the rest; else one floats, and waits for new nodes."""
    begun = sorted((e for e in stays if e.begun), key=lambda e: (-sum(e.bound), e.name))
    waits = [e for e in stays if e.site.kind is Kind.FLOATING and not _outdated(snapshot, e, left)]
    if begun or waits:
        return [_target((begun or waits)[0], wanted)]
    site = _site(snapshot, left, _takers(snapshot, room))
    return [SliceTarget(_free_names(snapshot, revision, 1)[0], _counts(wanted), site)]


def _pin(snapshot: Snapshot, share: Share, placement: Placement) -> Site:
    if share.crossing:
        return Site(Kind.CROSSING, _key(snapshot), placement.anchor)
    return Site(Kind.PINNED, _key(snapshot), share.domain)


def _site(snapshot: Snapshot, left: Sequence[Exclusion], takers: Sequence[NodeCapacity] = ()) -> Site:
    """Of a new slice whose domain is not known. With mode Preferred it may cross domains.

    Args:
        takers: nodes of today that could hold a pod of it, once something leaves them. The scheduler would bind the first pod to
            whatever room appears there, and the second might never follow; so room on those is for us to see and to pin a slice
            to, and a floating slice waits for nodes that are new.
    """
    away = sorted(active(left, snapshot.now))
    domains = {d for d in away if not d.startswith(EXCLUDED_NODE)}
    nodes = {d.removeprefix(EXCLUDED_NODE) for d in away if d.startswith(EXCLUDED_NODE)}
    key = _key(snapshot)
    if snapshot.spec.placement.transfer_domain.mode == "Preferred":
        return Site(Kind.CROSSING, key)
    if len(takers) > MAX_AVOIDED:
        domains |= {n.labels[key] for n in takers}
    else:
        nodes |= {n.labels.get(HOSTNAME, n.name) for n in takers}
    return Site(Kind.FLOATING, key, "", anchor(snapshot.shapes), tuple(sorted(domains)), tuple(sorted(nodes)))


def _takers(snapshot: Snapshot, room: Room) -> list[NodeCapacity]:
    """Nodes on which the first pod of a slice could be, if they had room and nothing repelled it."""
    first = snapshot.shapes[anchor(snapshot.shapes)].pods[0]
    welcome = replace(first, tolerations=(Toleration(operator="Exists"),))
    wanted, key = first.needs(), _key(snapshot)
    nodes = (n for domain in room.view.domains(key) for n in room.view.nodes(key, domain))
    return [n for n in nodes if welcome.admits(n) and all(n.allocatable.get(r, 0) >= a for r, a in wanted.items())]


def _outdated(snapshot: Snapshot, one: Existing, left: Sequence[Exclusion]) -> bool:
    """Whether an unbound slice may go where it must not: a domain was excluded after it was made."""
    away = set(active(left, snapshot.now))
    avoided = {*one.site.avoid_domains, *(EXCLUDED_NODE + n for n in one.site.avoid_nodes)}
    return one.site.kind is Kind.PINNED or (one.site.kind is Kind.FLOATING and not away <= avoided)


def uncounted(template: Mapping[str, Any]) -> str:
    """Why node capacity says nothing about the pods of a template; "" when it does."""
    pod, labels = template.get("spec") or {}, (template.get("metadata") or {}).get("labels") or {}
    if pod.get("resourceClaims"):
        return "its pods ask for devices by resourceClaims"
    if pod.get("schedulingGates") or QUEUE_LABEL in labels:
        return "a queue admits its pods"
    return ""


def anchor(shapes: Mapping[Role, ReplicaShape]) -> Role:
    """The role that binds first in a floating slice: the one whose pods are harder to place; decode when they are equal."""

    def size(role: Role) -> tuple[int, int, int]:
        pod = max(shapes[role].pods, key=lambda p: sum(a for name, a in p.requests.items() if "/" in name))
        devices = sum(a for name, a in pod.requests.items() if "/" in name)
        return devices, pod.requests.get("memory", 0), pod.requests.get("cpu", 0)

    return "prefill" if shapes and size("prefill") > size("decode") else "decode"


def split(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in proportion to `weights` by largest remainder, each part at least 1 where `total` allows."""
    if total < len(weights):
        return [1 if i < total else 0 for i in range(len(weights))]
    rest, mass = total - len(weights), sum(weights) or len(weights)
    exact = [rest * (w if sum(weights) else 1) / mass for w in weights]
    parts = [1 + int(e) for e in exact]
    order = sorted(range(len(weights)), key=lambda i: (int(exact[i]) - exact[i], i))
    for i in order[: total - sum(parts)]:
        parts[i] += 1
    return parts


def _domains(snapshot: Snapshot) -> dict[str, str]:
    return {name: _domain(snapshot, name, _site_of(parts)) for name, parts in snapshot.deployments().items()}


def _strays(snapshot: Snapshot) -> tuple[str, ...]:
    """Pods that run outside the domain of their slice: the label of a node changed under them."""
    room, key = snapshot.room, _key(snapshot)
    if room is None:
        return ()
    found = []
    for name, parts in snapshot.deployments().items():
        site = _site_of(parts)
        home = _domain(snapshot, name, site)
        if site.kind not in (Kind.PINNED, Kind.FLOATING) or not home:
            continue
        nodes = {n for role in ROLES for n in _held(snapshot, name, role).places}
        away = [
            f"{n} ({room.labels[n].get(key) or 'no label'})"
            for n in sorted(nodes)
            if room.labels[n] and room.labels[n].get(key) != home
        ]
        if away:
            found.append(f"{name} belongs to {home} and has pods on {', '.join(away)}")
    return tuple(found)


def _site_of(parts: Mapping[str, Any]) -> Site:
    sites = [decode(parts[role].site) for role in ROLES if role in parts]
    return next((s for s in sites if s.kind is not Kind.ANYWHERE), Site())


def _free_names(snapshot: Snapshot, revision: str, count: int) -> list[str]:
    """Names that no former slice had: a router must not find its engines (invariant I3).

    Nothing that we watch may carry a name any more, and its ReplicaSet still make pods for the domain that it had.
    """
    taken, first = snapshot.slices_seen(), int(snapshot.status.get("nextSlice", 0))
    names = (slice_name(snapshot.name, revision, first + i) for i in range(len(taken) + count))
    return [n for n in names if n not in taken][:count]


def next_slice(snapshot: Snapshot) -> int:
    """Number from which new slices are named: above all that were ever seen."""
    return max([int(snapshot.status.get("nextSlice", 0)), *(slice_number(s) + 1 for s in snapshot.slices_seen())])


def _target(one: Existing, counts: Counts) -> SliceTarget:
    return SliceTarget(one.name, _counts(counts), one.site)


def _counts(counts: Counts) -> dict[Role, int]:
    return {"prefill": counts[0], "decode": counts[1]}


def _pair(values: Iterable[int]) -> Counts:
    prefill, decode_ = values
    return prefill, decode_


def _key(snapshot: Snapshot) -> str:
    return snapshot.spec.placement.transfer_domain.topology_key
