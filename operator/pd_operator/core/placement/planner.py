"""place(demand, view): how many prefill and decode replicas each transfer domain gets, and why. Pure and deterministic.

With P and D replicas wanted, r_i = (rp_i, rd_i) running in domain i and F_i what fits beside them node by node (`fit`), choose
(p_i, d_i) for at most `max_domains` domains such that

    (p_i - rp_i, d_i - rd_i), cut at 0, is in F_i;  p_i >= 1 and d_i >= 1, or both 0;  sum p_i <= P;  sum d_i <= D
    balance: a replica is started only where it adds effective capacity, or the domain stays nearest the pool's ratio P:D:
        p_i <= max(1, rp_i)  or  p_i D - d_i P <= max(D - 1, max(P, D) / 2)          and the same with the roles exchanged

and minimise, level by level (`Objective`):

    lost        P D - sum min(p_i D, d_i P)                                     most effective capacity
    disruption  sum (rp_i - p_i)+ + (rd_i - d_i)+  +  CONSOLIDATION * number of domains used      fewest moved, fewest domains
    unplaced    P + D - sum (p_i + d_i)                                         as much of what is wanted as balance allows
    room        sum over domains used of the accelerators free in them          best fit

Running replicas need no room, so what runs and fits is never given up but for something better. New replicas must fit beside
everything that runs: a move never counts on room that it frees itself. Between equal plans the one that splits decode by
largest remainder on capacity is taken (`split`), then the order of the domains decides: most effective capacity, least room,
name.

`Placement.exact` says that this is proven: the search ended within its steps, with every domain in it that could matter. In a
large cluster only the CANDIDATES with most effective capacity are searched, and a domain that is chosen is exchanged for one
with less free room where the same fits.

Mode Preferred does the same first. Where that has less effective capacity than wanted, one slice may cross domains and take
all, or take what is left when one slice more is allowed: if there is more effective capacity then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pd_operator.core.placement import report
from pd_operator.core.placement.candidates import CONSOLIDATION, Domains
from pd_operator.core.placement.demand import CROSSING, Demand
from pd_operator.core.placement.fit import Packer
from pd_operator.core.placement.index import Capacity, CapacityIndex, CapacityView
from pd_operator.core.placement.result import Objective, Outcome, Placement, Share
from pd_operator.core.placement.search import Candidate, Found, Search, emptied
from pd_operator.core.placement.split import split_pools

CANDIDATES: Final = 24  # domains searched together, those with running replicas apart
EXPLAINED: Final = 8  # domains that a placement explains unless it is asked for more
_SWAPS: Final = 16  # domains looked at to find a tighter one


def place(demand: Demand, view: CapacityIndex | CapacityView, explained: int = EXPLAINED) -> Placement:
    """Decide over one demand and explain at most so many domains. Nothing is reserved: `reserve` does that."""
    if not demand.prefill:
        return Placement((), False, Outcome.SUSPENDED, "no replicas are wanted")
    packer = Packer(demand.prefill_shape, demand.decode_shape)
    domains = Domains(demand, view, packer)
    shares, exact = _solve(domains, view)
    if demand.mode == "Preferred" and demand.topology_key:
        shares = _crossing(domains, view, shares)
    return report.placement(domains, view, shares, objective(domains, shares), exact and packer.exact, explained)


def reserve(demand: Demand, view: CapacityView, shares: Sequence[Share]) -> bool:
    """Take in the view what shares add to what runs, so that the next demand is planned beside it.

    False, with nothing taken for that share, where a share no longer fits node by node.
    """
    packer = Packer(demand.prefill_shape, demand.decode_shape)
    complete = True
    for share in sorted(shares, key=lambda s: s.crossing):  # one that crosses domains takes what the others leave
        domains = Domains(demand, view, packer, "" if share.crossing else None)
        rp, rd = domains.running(share.domain)
        pods = packer.pack(domains.nodes(share.domain), max(0, share.prefill - rp), max(0, share.decode - rd))
        for pod in pods or ():
            view.take(pod.node, pod.needs)
        complete &= pods is not None
    return complete


def objective(domains: Domains, shares: Sequence[Share]) -> Objective:
    """The value of a plan, as the module's docstring states it."""
    demand = domains.demand
    given = {s.domain: s for s in shares}
    nothing = Share(CROSSING, 0, 0)
    ended = sum(
        max(0, rp - given.get(domain, nothing).prefill) + max(0, rd - given.get(domain, nothing).decode)
        for domain, (rp, rd) in demand.running.items()
    )
    return Objective(
        lost=domains.whole - sum(min(s.prefill * demand.decode, s.decode * demand.prefill) for s in shares),
        disruption=ended + CONSOLIDATION * len(shares),
        unplaced=demand.prefill + demand.decode - sum(s.prefill + s.decode for s in shares),
        room=sum(domains.room(s.domain) for s in shares if not s.crossing),
    )


def _solve(domains: Domains, view: Capacity) -> tuple[tuple[Share, ...], bool]:
    """The best shares without crossing, by domain name, and whether they are proven best."""
    demand = domains.demand
    rests = at_rest(demand)
    if rests is not None:
        return (Share(rests, demand.prefill, demand.decode),), True
    candidates, complete = _candidates(domains, view)
    found = Search(candidates, (demand.prefill, demand.decode), demand.max_domains, CONSOLIDATION, fit=complete).run()
    shares = _resplit(demand, candidates, found)
    if not complete:
        used = {s.domain for s in shares}
        shares = [_tighter(domains, view, share, used) for share in shares]
    alone = len(shares) == 1 and not any(map(sum, demand.running.values()))
    full = sum(min(s.prefill * demand.decode, s.decode * demand.prefill) for s in shares) == domains.whole
    return tuple(sorted(shares)), found.exact and (complete or (alone and full))


def at_rest(demand: Demand) -> str | None:
    """The domain in which everything runs, if it may stay there: nothing is lost, nothing moves, and no plan uses fewer domains."""
    running = [(d, r) for d, r in demand.running.items() if any(r)]
    if len(running) != 1 or running[0][1] != (demand.prefill, demand.decode):
        return None
    domain = running[0][0]
    return domain if demand.allows(domain) and (domain != CROSSING or not demand.topology_key) else None


def _candidates(domains: Domains, view: Capacity) -> tuple[list[Candidate], bool]:
    """Domains to be searched, most effective capacity first, and whether no other can matter."""
    demand = domains.demand
    running = {d for d, r in demand.running.items() if any(r) and demand.allows(d) and (d != CROSSING or not demand.topology_key)}
    bounds = sorted(domains.bound(d) for d in view.domains(demand.topology_key) if d not in running and demand.allows(d))
    best: dict[str, int] = {}
    complete = True
    for bound in bounds:
        if not bound.negative:
            break
        if len(best) >= CANDIDATES and _enough(best, -bound.negative, domains.whole, demand.max_domains):
            complete = False
            break
        best[bound.domain] = domains.best(bound.domain)

    def order(domain: str) -> tuple[int, int, str]:
        return -domains.best(domain), domains.bound(domain).room, domain

    fresh = sorted((d for d, value in best.items() if value), key=order)
    if len(fresh) > CANDIDATES and demand.max_domains > 1:
        fresh, complete = fresh[:CANDIDATES], False
    return [domains.candidate(d) for d in sorted([*running, *fresh], key=order)], complete


def _enough(best: Mapping[str, int], bound: int, whole: int, limit: int) -> bool:
    """Whether domains with at most `bound` of effective capacity, and more room than those, can hardly matter."""
    values = sorted(best.values(), reverse=True)
    return values[0] == whole or values[min(CANDIDATES, len(values), limit + 1) - 1] >= bound


def _resplit(demand: Demand, candidates: Sequence[Candidate], found: Found) -> list[Share]:
    """The same totals over the same domains, split by largest remainder, if that is as good."""
    chosen = [candidates[c.domain] for c in found.choices]
    shares = [Share(c.name, pick.prefill, pick.decode) for c, pick in zip(chosen, found.choices, strict=True)]
    if len(shares) < 2:
        return shares
    split = split_pools(sum(s.prefill for s in shares), sum(s.decode for s in shares), [c.best for c in chosen])
    costs = [o.cost for c, pair in zip(chosen, split, strict=True) for o in c.options if (o.prefill, o.decode) == pair]
    used = {c.name for c in chosen}
    idle = emptied(sum(c.running for c in candidates if c.name not in used))
    if len(costs) < len(chosen) or sum(costs) + idle > found.cost:
        return shares
    return [Share(c.name, p, d) for c, (p, d) in zip(chosen, split, strict=True)]


def _tighter(domains: Domains, view: Capacity, share: Share, used: set[str]) -> Share:
    """The share in a domain with less free room, if one of the _SWAPS with least room holds it too."""
    demand = domains.demand
    if any(domains.running(share.domain)):
        return share
    mine = domains.room(share.domain)
    p, d = share.prefill, share.decode
    others = (o for o in view.domains(demand.topology_key) if o not in used and o not in demand.running and demand.allows(o))
    smaller = sorted((room, o) for o in others if (room := domains.bound(o).room) < mine and domains.may_hold(o, p, d))
    for _, domain in smaller[:_SWAPS]:
        frontier = domains.frontier(domain)
        if p < len(frontier) and frontier[p] >= d:
            used.discard(share.domain)
            used.add(domain)
            return share._replace(domain=domain)
    return share


def _crossing(domains: Domains, view: CapacityIndex | CapacityView, shares: tuple[Share, ...]) -> tuple[Share, ...]:
    """Mode Preferred: the shares themselves, one slice that crosses domains, or both, whichever has most effective capacity.

    Of equals the one with fewest replicas that cross, then the least disruption.
    """
    demand, packer = domains.demand, domains.packer
    if not objective(domains, shares).lost:
        return shares
    answers = [shares]
    plans: list[tuple[tuple[Share, ...], int, int]] = [((), demand.prefill, demand.decode)]
    left = demand.prefill - sum(s.prefill for s in shares), demand.decode - sum(s.decode for s in shares)
    if shares and len(shares) < demand.max_domains and min(left) > 0:
        plans.append((shares, *left))
    for kept, p, d in plans:
        beside = view.fork()
        if kept and not reserve(demand, beside, kept):
            continue
        whole = Domains(demand, beside, packer, "").candidate(CROSSING)
        found = Search([whole], (p, d), 1, CONSOLIDATION).run()
        answers.append((*(Share(CROSSING, c.prefill, c.decode, crossing=True) for c in found.choices), *kept))

    def key(answer: tuple[Share, ...]) -> tuple[int, int, int, int]:
        value = objective(domains, answer)
        return value.lost, sum(s.prefill + s.decode for s in answer if s.crossing), value.disruption, value.unplaced

    return min(answers, key=key)
