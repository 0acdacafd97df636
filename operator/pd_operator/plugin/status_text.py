"""The text of `kubectl pdd status`."""

from __future__ import annotations

from dataclasses import replace

from pd_operator.plugin.chain import Chain, Link, Verdict
from pd_operator.plugin.terminal import Paint, age, columns

WHY = 70  # characters of why a pod is not ready; the link of its part says it in full
NOTE = 240  # characters of a note beside the chain
MEANING = {Verdict.OK: "good", Verdict.NOT: "bad", Verdict.UNKNOWN: "doubt"}


def text(chain: Chain, paint: Paint) -> str:
    """Lines for people: the answer, the chain with what to do under each link that is not ok, pods, events, what was not read."""
    said: set[str] = set()  # a step is told once, where it helps first
    lines = [*_head(chain, paint), "", *_links(chain.links, paint, said)]
    if chain.notes:
        lines += ["", *_links(tuple(replace(x, evidence=_short(x.evidence, NOTE)) for x in chain.notes), paint, said)]
    if chain.pods:
        lines += ["", *_pods(chain, paint)]
    if chain.events:
        rows = [(f"{age(e.age)} ago", f"{e.reason}{f' x{e.count}' if e.count > 1 else ''}", e.object, e.note) for e in chain.events]
        lines += ["", paint("strong", "events"), *columns(rows, "  ")]
    if chain.unread:
        lines += ["", paint("doubt", "not read"), *columns([(what, why) for what, why in chain.unread.items()], "  ")]
    return "\n".join(lines) + "\n"


def _head(chain: Chain, paint: Paint) -> list[str]:
    door = chain.links[-1]
    for_ = f" for {age(door.age)}" if door.age is not None else ""
    answer = paint("good", "READY") if chain.ready else paint("bad", "NOT READY")
    facts = chain.facts
    about = [facts["model"], facts["engine"], f"router {facts['router']}", f"scaling {facts['scaling']}"]
    about += [f"{role} {count}" for role, count in facts["roles"].items()]
    moving = facts["updatedRevision"] not in ("", facts["revision"])
    revision = f"revision {facts['revision'] or 'none'}" + (f" -> {facts['updatedRevision']}" if moving else "")
    return [
        f"{paint('strong', f'{chain.namespace}/{chain.name}')} {answer}{for_}: {chain.headline}",
        *([f"  {paint('strong', 'first')}: {chain.first}"] if chain.first else []),
        paint("faint", f"  {', '.join([*about, revision])}"),
    ]


def _links(links: tuple[Link, ...], paint: Paint, said: set[str]) -> list[str]:
    names, reasons = (max(map(len, column)) for column in zip(*((x.name, x.reason) for x in links), strict=True))
    lines = []
    for link in links:
        verdict = paint(
            MEANING[link.verdict], f"{link.verdict.value.upper() if link.verdict is Verdict.NOT else link.verdict.value:7}"
        )
        since = age(link.age) if link.age is not None else ""
        lines.append(f"{verdict}  {link.name:{names}}  {link.reason:{reasons}}  {since:>6}  {link.evidence}".rstrip())
        lines += [f"           {paint('strong', '->')} {step}" for step in link.next if step not in said]
        said.update(link.next)
    return lines


def _short(text: str, limit: int = WHY) -> str:
    """What fits; -o json has all of it."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _pods(chain: Chain, paint: Paint) -> list[str]:
    header = ("", "POD", "READY", "RESTARTS", "AGE", "NODE", "")
    rows = [header]
    rows += [
        (p.part, p.name, "yes" if p.ready else "no", str(p.restarts), age(p.age), p.node or "-", _short(p.why)) for p in chain.pods
    ]
    lines = columns(rows)
    lines = [paint("faint", lines[0])] + [x if p.ready else paint("doubt", x) for x, p in zip(lines[1:], chain.pods, strict=True)]
    return lines + ([f"and {chain.pods_untold} more pods that are ready or like those"] if chain.pods_untold else [])
