"""A plan's shares -> the Placement: what was chosen where, and why not more and not elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from pd_operator.core.names import ROLES
from pd_operator.core.placement import explain
from pd_operator.core.placement.candidates import Domains
from pd_operator.core.placement.capacity import NodeCapacity
from pd_operator.core.placement.demand import CROSSING
from pd_operator.core.placement.index import Capacity, CapacityIndex, CapacityView
from pd_operator.core.placement.result import Explanation, Objective, Outcome, Placement, Share


def placement(
    domains: Domains,
    view: CapacityIndex | CapacityView,
    shares: tuple[Share, ...],
    objective: Objective,
    exact: bool,
    explained: int,
) -> Placement:
    """All that the planner says about its shares, with sentences on at most `explained` domains."""
    demand = domains.demand
    placed = sum(s.prefill for s in shares), sum(s.decode for s in shares)
    short = demand.prefill - placed[0], demand.decode - placed[1]
    known = view.domains(demand.topology_key)
    reason = Outcome.PLACED
    if any(short):
        reason = Outcome.PARTLY_PLACED if shares else Outcome.NO_CAPACITY if known else Outcome.NO_DOMAIN_LABEL
    order = _order(domains, known, shares) if explained else list(known)
    told = tuple(_explain(domains, view, domain, shares, short) for domain in order[:explained])
    crossing = any(s.crossing for s in shares)
    anchor = min(((-domains.room(d), d) for d in known if demand.allows(d)), default=(0, ""))[1] if crossing else ""
    return Placement(
        domains=shares,
        floating=not shares,
        reason=reason,
        message=_message(domains, view, reason, shares, short, anchor, told),
        short=short,
        moved=_moved(domains, shares),
        anchor=anchor,
        avoid=() if shares else _avoid(domains, known),
        explanations=told,
        unexplained=len(order) - len(told),
        exact=exact,
        objective=objective,
    )


def _order(domains: Domains, known: Sequence[str], shares: Sequence[Share]) -> list[str]:
    """Used domains, those with running replicas, those that the demand rules out, then by how much they could hold."""
    demand = domains.demand
    used = {s.domain for s in shares if not s.crossing}

    def key(domain: str) -> tuple[bool, bool, bool, int, int, str]:
        bound = domains.bound(domain)
        return domain not in used, domain not in demand.running, demand.allows(domain), bound.negative, -bound.room, domain

    there = {d for d in demand.running if d != CROSSING or not demand.topology_key}
    return sorted({*known, *there}, key=key)


def _explain(
    domains: Domains, view: CapacityIndex | CapacityView, domain: str, shares: Sequence[Share], short: tuple[int, int]
) -> Explanation:
    demand = domains.demand
    nodes = domains.nodes(domain)
    rp, rd = domains.running(domain)
    fits = domains.fits(domain)
    mine = next((s for s in shares if s.domain == domain and not s.crossing), None)
    if mine is not None:
        text = f"{explain.counted(mine.prefill, mine.decode)} chosen"
        text += f", of which {explain.counted(min(rp, mine.prefill), min(rd, mine.decode))} run there" if rp or rd else ""
        if any(short):
            text += _no_more(domains, view, mine, short)
    elif not demand.allows(domain):
        why = demand.excluded.get(domain)
        text = f"excluded: {why}" if why else f"not used: only {', '.join(sorted(demand.pinned))} may be"
    else:
        text = _not_chosen(domains, nodes, domain, fits, shares, short)
    if not nodes:
        text += "; no node has this label value" + (f" any more, {explain.counted(rp, rd)} still run there" if rp or rd else "")
    return Explanation(domain, *fits, (mine.prefill, mine.decode) if mine else (0, 0), f"{domain or 'the cluster'}: {text}")


def _no_more(domains: Domains, view: CapacityIndex | CapacityView, mine: Share, short: tuple[int, int]) -> str:
    """What keeps one replica more out of a domain that is used."""
    rp, rd = domains.running(mine.domain)
    pods = domains.packer.pack(domains.nodes(mine.domain), max(0, mine.prefill - rp), max(0, mine.decode - rd))
    beside = view.fork()
    for pod in pods or ():
        beside.take(pod.node, pod.needs)
    nodes = beside.nodes(domains.demand.topology_key, mine.domain)
    said = []
    for at, role in enumerate(ROLES):
        alone = domains.packer.frontier(nodes, 1 - at, at)
        more = alone[0] if at else len(alone) - 1
        if short[at] and not more:
            said.append(f"; no room for one more {role}: {explain.lack(nodes, domains.packer.shapes[at])}")
        elif short[at]:
            said.append(f"; one more {role} would fit and find too little {ROLES[1 - at]} beside it")
    return "".join(said)


def _not_chosen(
    domains: Domains,
    nodes: Sequence[NodeCapacity],
    domain: str,
    fits: tuple[int, int],
    shares: Sequence[Share],
    short: tuple[int, int],
) -> str:
    demand, packer = domains.demand, domains.packer
    if not all(fits):
        return explain.one_role(fits, nodes, packer.shapes)
    candidate = domains.candidate(domain)
    if not candidate.options:
        both = f"{explain.replicas(fits[0], 'prefill')} or {explain.replicas(fits[1], 'decode')}"
        return f"{both} would fit alone, but not one of each: {explain.beside(packer, nodes)}"
    most = max(candidate.options, key=lambda o: (min(o.prefill * demand.decode, o.decode * demand.prefill), -o.prefill - o.decode))
    fit = f"{explain.counted(most.prefill, most.decode)} fit together"
    return f"{fit}; {_not_needed(domains, shares, short, candidate.best == domains.whole)}"


def _not_needed(domains: Domains, shares: Sequence[Share], short: tuple[int, int], whole: bool) -> str:
    """Why a domain that holds a pair gets none; `whole`: it could hold everything."""
    demand = domains.demand
    names = ", ".join(s.domain or "a slice that crosses domains" for s in shares)
    if any(short) and len(shares) >= demand.max_domains:
        return f"not used: placement.maxDomains is {demand.max_domains}, and {names} holds as much or more"
    if any(short):
        return f"not used: no {ROLES[0] if not short[0] else ROLES[1]} replica is left for it"
    if any(any(domains.running(s.domain)) for s in shares):
        return f"not needed: {names} holds everything, and fewer replicas move"
    return f"not used: {names} " + ("has less room to spare" if whole else "holds everything that is wanted")


def _message(
    domains: Domains,
    view: Capacity,
    reason: Outcome,
    shares: Sequence[Share],
    short: tuple[int, int],
    anchor: str,
    told: Sequence[Explanation],
) -> str:
    demand = domains.demand
    key = demand.topology_key
    lacking = view.unlabelled(key)
    without = f"; {lacking} node{'s lack' if lacking > 1 else ' lacks'} the label {key}" if key and lacking else ""
    where = " and ".join(_where(share, len(shares) > 1) for share in shares)
    across = f"; no single domain of {key} holds them, so handoffs cross domains (most room: {anchor})" if anchor else ""
    closest = next((e.text for e in told if e.chosen != (0, 0) or not shares), told[0].text if told else "")
    match reason:
        case Outcome.PLACED:
            return f"{explain.counted(demand.prefill, demand.decode)} in {where}{across}"
        case Outcome.PARTLY_PLACED:
            fit = (
                f"{demand.prefill - short[0]} of {demand.prefill} prefill and {demand.decode - short[1]} of {demand.decode} decode"
            )
            return f"{fit} in {where}{across}; {closest}{without}"
        case Outcome.NO_DOMAIN_LABEL:
            return f"placement.transferDomain.topologyKey: none of {lacking} nodes has the label {key}"
        case _:
            held = f"no domain of {key} holds" if key else "the cluster does not hold"
            return f"{held} one prefill and one decode replica{f'; closest is {closest}' if closest else ''}{without}"


def _where(share: Share, several: bool) -> str:
    name = "several domains" if share.crossing else share.domain or "the cluster"
    return f"{name} ({share.prefill}+{share.decode})" if several else name


def _moved(domains: Domains, shares: Sequence[Share]) -> tuple[int, int]:
    """Running replicas that end in one domain while their pool does not shrink by them."""
    given = {s.domain: (s.prefill, s.decode) for s in shares}
    running = domains.demand.running
    moved = []
    for role in (0, 1):
        ended = sum(max(0, counts[role] - given.get(domain, (0, 0))[role]) for domain, counts in running.items())
        shrink = sum(counts[role] for counts in running.values()) - sum(counts[role] for counts in given.values())
        moved.append(ended - max(0, shrink))
    return moved[0], moved[1]


def _avoid(domains: Domains, known: Sequence[str]) -> tuple[str, ...]:
    """Domains where a slice without node affinity would start one role, or part of a group, and never the rest."""
    found = []
    for domain in known:
        tempting = domains.may_hold(domain, 1, 0) or domains.may_hold(domain, 0, 1) or domains.packer.grouped
        if tempting and domains.demand.allows(domain):
            tempting = any(any(domains.packer.tops(node, (1, 1))) for node in domains.nodes(domain))
        if tempting or not domains.demand.allows(domain):
            found.append(domain)
    return tuple(found)
