"""A placement as a person reads it in a terminal, and as a program does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pd_operator.core.placement.demand import Demand
from pd_operator.core.placement.result import Placement

HEADINGS = ("DOMAIN", "PREFILL", "DECODE", "FITS", "WHY")


def text(demand: Demand, placement: Placement) -> str:
    """A headline, then one line for each domain. FITS: replicas of each role that fit there alone, as prefill/decode."""
    rows: list[Sequence[str]] = [HEADINGS]
    for share in placement.domains:
        if share.crossing:
            rows.append(("(crossing)", str(share.prefill), str(share.decode), "", f"most room: {placement.anchor}"))
    for e in placement.explanations:
        name = e.domain or "(cluster)"
        why = e.text.removeprefix(f"{e.domain or 'the cluster'}: ")
        rows.append((name, str(e.chosen[0]), str(e.chosen[1]), f"{e.fits_prefill}/{e.fits_decode}", why))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS) - 1)]
    lines = ["  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] + [row[-1]]).rstrip() for row in rows]
    more = [f"and {placement.unexplained} more domains"] if placement.unexplained else []
    moved = [f"moves {placement.moved[0]} prefill and {placement.moved[1]} decode"] if any(placement.moved) else []
    floats = ["nothing fits now: a slice would wait for room, without a fixed domain"] if placement.floating else []
    head = f"{demand.key}: {placement.reason.value}: {_headline(demand, placement)}"
    return "\n".join([head, *floats, *moved, "", *(lines if len(lines) > 1 else []), *more]).rstrip() + "\n"


def document(demand: Demand, placement: Placement) -> dict[str, Any]:
    """The same for `-o json`."""
    return {
        "deployment": demand.key,
        "reason": placement.reason.value,
        "message": placement.message,
        "wanted": {"prefill": demand.prefill, "decode": demand.decode},
        "slices": [
            {"domain": s.domain, "prefill": s.prefill, "decode": s.decode, "crossing": s.crossing} for s in placement.domains
        ],
        "short": {"prefill": placement.short[0], "decode": placement.short[1]},
        "moved": {"prefill": placement.moved[0], "decode": placement.moved[1]},
        "floating": placement.floating,
        "avoid": list(placement.avoid),
        "exact": placement.exact,
        "domains": [
            {
                "domain": e.domain,
                "fits": {"prefill": e.fits_prefill, "decode": e.fits_decode},
                "chosen": {"prefill": e.chosen[0], "decode": e.chosen[1]},
                "why": e.text,
            }
            for e in placement.explanations
        ],
        "unexplained": placement.unexplained,
    }


def _headline(demand: Demand, placement: Placement) -> str:
    """The message without the sentences that the lines below repeat."""
    if placement.domains and any(placement.short):
        p, d = placement.total
        return f"{p} of {demand.prefill} prefill and {d} of {demand.decode} decode fit"
    if placement.floating and placement.explanations:
        return placement.message.split("; closest is ", maxsplit=1)[0]
    return placement.message
