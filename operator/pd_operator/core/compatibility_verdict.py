"""Verdict over one spec: what the rows of upstream refuse, what they leave unproven, and which state would be missing on decode.

Core knows no version: `Upstream.rules` and `Upstream.carries` hold for the programs of the spec already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from pd_operator.api.conditions import Reason
from pd_operator.api.types import PDDeploymentSpec
from pd_operator.core import compatibility_parallel, compatibility_programs, compatibility_settings
from pd_operator.core.capabilities import Carriage, Carries, Check, Refusal, Rule, State, Unproven, Upstream
from pd_operator.core.compatibility_case import Case, Finding, Predicate
from pd_operator.core.compatibility_model import FIELD, Model
from pd_operator.core.compatibility_options import options

PREDICATES: Final[Mapping[Check, Predicate]] = {
    **compatibility_parallel.PREDICATES,
    **compatibility_settings.PREDICATES,
    **compatibility_programs.PREDICATES,
}
NAMES: Final[Mapping[str, str]] = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
T = TypeVar("T")
BY_VERIFICATION: Final = "or spec.verification: Required"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is refused, and what is accepted without proof."""

    refusals: tuple[Refusal, ...] = ()
    unproven: tuple[Unproven, ...] = ()


def judge(spec: PDDeploymentSpec, upstream: Upstream, images: Mapping[str, str], model: Model | Refusal | None = None) -> Verdict:
    """Judge a spec; `model` is its config.json, or why that cannot be read, or None where the spec names none."""
    unreadable = (model,) if isinstance(model, Refusal) else tuple(_unnamed(spec))
    known = model if isinstance(model, Model) else None
    case = Case(spec, upstream, images, known, options(spec, "prefill"), options(spec, "decode"))
    found = [*unreadable, *_rules(case), *_states(case)]
    return Verdict(
        refusals=_once(f for f in found if isinstance(f, Refusal)),
        unproven=(*upstream.unproven, *_once(f for f in found if isinstance(f, Unproven))),
    )


def _once(found: Iterator[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(found))


def _unnamed(spec: PDDeploymentSpec) -> Iterator[Refusal]:
    reference = spec.model.config_map_ref
    if reference is not None and not reference.name:
        accepted = "the name of a ConfigMap that holds the model's config.json, or no spec.model.configMapRef"
        yield Refusal(Reason.INVALID_SPEC, FIELD, "", accepted)


def _rules(case: Case) -> Iterator[Refusal | Unproven]:
    for rule in case.upstream.rules:
        for finding in PREDICATES[rule.check](case, rule):
            yield _said(case, rule, finding)


def _said(case: Case, rule: Rule, finding: Finding) -> Refusal | Unproven:
    clauses = [finding.having, rule.why]
    if rule.reason is None or finding.unproven:
        clauses.append(f"to be sure: {finding.accepted}" if finding.accepted else "")
        return Unproven(finding.field, finding.value, "; ".join(c for c in clauses if c))
    accepted = "; ".join(c for c in (*clauses, f"accepted: {finding.accepted}") if c)
    return Refusal(rule.reason, finding.field, finding.value, accepted, outside=case.model is not None)


def _states(case: Case) -> Iterator[Refusal | Unproven]:
    """Each state that the model needs, against what becomes of it."""
    if case.model is None:
        return
    needed = {s: key for s, key in case.model.states.items() if s is not State.REPLAY or not _no_replay(case)}
    # Lost ones first: the first refusal is the one that status shows, and nothing but another version or model helps.
    for carries in sorted(case.upstream.carries, key=lambda c: c.carriage is not Carriage.LOST):
        if carries.state in needed:
            yield from _state(case, case.model, needed[carries.state], carries)


def _no_replay(case: Case) -> bool:
    """Replay is a switch, on by default (vllm/config/cache.py swa_bounded_replay)."""
    return all(options.on("--swa-bounded-replay") is False for options in case.roles)


def _state(case: Case, model: Model, key: str, carries: Carries) -> Iterator[Refusal | Unproven]:
    if carries.carriage is Carriage.CARRIED:
        return
    engine = f"{NAMES[case.spec.engine.type]} {case.spec.engine.version}"
    needs = f"its config.json ({key}) needs {carries.state} at handoff"
    carriage = f"with {case.spec.handoff.connector} of {engine} it is {carries.carriage}: {carries.how}"
    if carries.carriage is Carriage.LOST:
        accepted = f"accepted: {carries.accepted}"
    elif case.spec.verification == "Required":
        yield Unproven(FIELD, model.config_map, f"{needs}; {carriage}")
        return
    else:
        accepted = f"accepted: {carries.accepted}, {BY_VERIFICATION}"
    yield Refusal(Reason.STATE_NOT_TRANSFERABLE, FIELD, model.config_map, f"{needs}; {carriage}; {accepted}", outside=True)
