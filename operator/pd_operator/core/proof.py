"""What a canary saw, and what it proves: pure, the same in the canary's pod and in the operator.

Only counters that moved count. An engine that says that its connector is initialised, a probe that passes, a right answer with
status 200: none of them tells a handoff from a decode engine that computed the prompt by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pd_operator.api.conditions import Reason

MAX_BYTES: Final = 4096  # of a termination message; kubelet cuts what is longer
# Of the prompt tokens that decode may compute itself. 0 was measured with vLLM 0.32; a version that computes the last block of a
# prompt again stays below, an engine that recomputes one prompt of four does not.
COMPUTED_SHARE: Final = 0.1


class Part(BaseModel):
    """Base of evidence: what a newer canary adds is ignored, what is missing has its default."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Moved(Part):
    """Growth of the counters of all engines of one role, between the first request of the canary and its last."""

    answered: float = 0  # requests
    computed: float = 0  # prompt tokens that it computed itself
    received: float = 0  # prompt tokens whose state it got from another engine or a cache
    transfers: float = 0
    transferred: float = 0  # bytes
    failed: float = 0  # transfers


class Cache(Part):
    """Growth of the counters of prefill's LMCache servers."""

    lookups: float = 0
    written: float = 0  # chunks
    objects: float = 0
    borrowed: float = 0  # tokens that they, or decode's, found on another server, with P2P
    apart: str = ""  # with P2P: which server does not see the others, and how long that was waited for
    down: str = ""  # which server did not answer, and what was waited for


class Comparison(Part):
    """Answers of the pair against the same prompts through one prefill engine alone, at temperature 0."""

    compared: int = 0
    same: int = 0
    shown: str = ""  # the first difference


class Reuse(Part):
    """A prompt that came again after prefill's own cache was dropped."""

    skipped: str = ""  # why it was not tried
    hit: float = 0  # tokens that LMCache had
    expected: int = 0


class Evidence(Part):
    """All that a canary saw; at most 4096 bytes as JSON."""

    problem: str = ""  # why it ended early: what was waited for, where, how long
    sent: int = 0  # requests through the slice's Service
    failures: int = 0  # of them, without a whole answer
    failure: str = ""  # the first one: status and body
    tokens: int = 0  # prompt tokens of those that were answered
    chunks: int = 0  # whole LMCache chunks in them; 0 without LMCache
    cached: bool = False  # each engine has an LMCache server
    shared: bool = False  # the engines answered others meanwhile: their counters are not the canary's alone
    passed: float = 0  # requests that the router passed through without asking for a handoff; 0 where it does not tell
    versions: list[str] = Field(default_factory=list)  # of the engines, if there is more than one
    prefill: Moved = Moved()
    decode: Moved = Moved()
    cache: Cache = Cache()
    output: Comparison = Comparison()
    reuse: Reuse = Reuse()
    seconds: float = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What evidence says of the handoff, or of the offload. `proven` None: nothing, either way."""

    proven: bool | None
    reason: Reason
    sentence: str


def read(text: str) -> Evidence | None:
    """Evidence of a termination message; None when it is none (a traceback, for instance)."""
    try:
        return Evidence.model_validate_json(text)
    except ValidationError:
        return None


def judge_handoff(seen: Evidence) -> Verdict:
    """Whether a prefill and a decode of the slice were seen to hand a request over; the first cause that explains it all."""
    moved, wire = seen.decode, f"{seen.decode.transfers:.0f} transfers, {seen.decode.transferred:.0f} bytes"
    own = f"decode computed {moved.computed:.0f} of {seen.tokens} prompt tokens itself"
    fell_back = moved.computed > COMPUTED_SHARE * seen.tokens and (not seen.shared or moved.computed > moved.received)
    broken = f"; {moved.failed:.0f} transfers failed" if moved.failed else ""
    lost = f"{seen.failures} of {seen.sent} requests failed{broken}; the first: {seen.failure}"
    passed = f"the router passed {seen.passed:.0f} requests through without a handoff: it sees no connector on prefill's pods"
    apart = f"{seen.output.compared - seen.output.same} of {seen.output.compared} answers differ from one engine alone"
    return _first(
        (len(seen.versions) > 1, Reason.VERSION_MISMATCH, f"engines of one slice run {' and '.join(seen.versions)}"),
        (bool(seen.problem), Reason.CANARY_FAILED, seen.problem),
        (seen.failures > 0 or not seen.sent, Reason.REQUEST_FAILED, lost),
        (
            moved.failed > 0 and not seen.shared and (fell_back or not moved.transfers),
            Reason.TRANSFER_FAILED,
            f"{moved.failed:.0f} transfers to decode failed ({wire} came through); {own}",
        ),
        (seen.passed > 0, Reason.SILENT_FALLBACK, f"every answer was 200, and {own}; {passed}"),
        (
            moved.transfers < 1 or moved.transferred < 1,
            Reason.NO_TRANSFER,
            f"{seen.sent} requests were answered, and no byte came to decode ({wire}); {own}",
        ),
        (fell_back, Reason.SILENT_FALLBACK, f"every answer was 200, and {own} ({wire})"),
        (
            moved.received < (1 - COMPUTED_SHARE) * seen.tokens,
            Reason.NO_TRANSFER,
            f"decode received {moved.received:.0f} of {seen.tokens} prompt tokens ({wire})",
        ),
        (not seen.output.compared, Reason.REQUEST_FAILED, f"no answer to compare with: {seen.output.shown}"),
        (_differs(seen.output), Reason.OUTPUT_DIFFERS, f"{apart} at temperature 0: {seen.output.shown}"),
    ) or Verdict(
        True,
        Reason.VERIFIED,
        f"{moved.received:.0f} prompt tokens came to decode in {wire}; "
        f"{seen.output.same} of {seen.output.compared} answers equal those of one engine alone",
    )


def judge_offload(seen: Evidence) -> Verdict:
    """Whether prefill's LMCache servers were seen to store what prefill computed."""
    cache = seen.cache
    stored = max(cache.written, cache.objects)
    found = f"{seen.reuse.hit:.0f} of {seen.reuse.expected} stored tokens were found again after prefill's cache was dropped"
    wrong = _first((bool(cache.down), Reason.SERVER_DOWN, cache.down))
    if wrong is None and (seen.problem or seen.failures or not seen.sent):
        return Verdict(None, Reason.NOT_YET_RUN, f"not judged: {judge_handoff(seen).sentence}")
    if wrong is None and not seen.chunks:
        return Verdict(None, Reason.NOT_YET_RUN, "not judged: the model's context is shorter than one chunk of LMCache")
    lent = f"; {cache.borrowed:.0f} tokens found on another server" if cache.borrowed else ""
    again = seen.reuse.skipped or f"{seen.reuse.hit:.0f} tokens came back from it"
    return (
        wrong
        or _first(
            (
                not stored and not cache.lookups,
                Reason.NOT_SUBMITTING,
                "prefill never asked its LMCache server: 0 lookups, 0 chunks stored",
            ),
            (
                stored < seen.chunks,
                Reason.NOT_SUBMITTING,
                f"{cache.lookups:.0f} lookups, and {stored:.0f} of {seen.chunks} chunks stored",
            ),
            (bool(cache.apart), Reason.PEERS_MISSING, cache.apart),
            (
                not seen.reuse.skipped and seen.reuse.hit < seen.reuse.expected and not seen.shared,
                Reason.NOT_SUBMITTING,
                found,
            ),
        )
        or Verdict(True, Reason.VERIFIED, f"{stored:.0f} chunks stored, {seen.chunks} expected{lent}; {again}")
    )


def _first(*causes: tuple[bool, Reason, str]) -> Verdict | None:
    """The verdict of the first cause that holds."""
    return next((Verdict(False, reason, sentence) for holds, reason, sentence in causes if holds), None)


def _differs(output: Comparison) -> bool:
    """Whether half of the answers or more differ: rounding may turn one of three, state that did not come over spoils them all."""
    return output.compared > 0 and output.same * 2 <= output.compared
