"""Checks of how prefill and decode spread over accelerators, and of the blocks that they exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from pd_operator.core.capabilities import HYBRID, Check, Rule, State
from pd_operator.core.compatibility_case import Case, Finding, Predicate, listed, whole
from pd_operator.core.names import ROLES, Role

GIVE_MODEL: Final = "the model's config.json in spec.model.configMapRef, so that it can be checked"
MAX_TENSOR: Final = 128  # of the schema


def _tensor(role: Role) -> str:
    return f"spec.{role}.parallelism.tensor"


def tensor_divides(case: Case, rule: Rule) -> Iterator[Finding]:
    """One size divides the other."""
    prefill, decode = case.tensor
    if max(prefill, decode) % min(prefill, decode):
        yield Finding(_tensor("decode"), str(decode), f"prefill has {prefill}", f"a divisor or a multiple of {prefill}")


def tensor_heads(case: Case, rule: Rule) -> Iterator[Finding]:
    """More ranks on prefill than on decode, and than KV heads, only where the cache is replicated anyway."""
    prefill, decode = case.tensor
    if prefill <= decode:
        return
    if case.model is None:
        yield Finding(_tensor("prefill"), str(prefill), f"decode has {decode}", GIVE_MODEL, unproven=True)
    elif not case.model.replicated and not case.recurrent and 0 < case.model.kv_heads < prefill:
        heads = case.model.kv_heads
        yield Finding(
            _tensor("prefill"),
            str(prefill),
            f"decode has {decode} and the model {heads} KV heads",
            f"at most {max(heads, decode)}, or as many on decode",
        )


def tensor_recurrent(case: Case, rule: Rule) -> Iterator[Finding]:
    """Equal sizes for recurrent state."""
    prefill, decode = case.tensor
    if case.recurrent and prefill != decode:
        having = f"prefill has {prefill} and the model has {case.recurrent}"
        yield Finding(_tensor("decode"), str(decode), having, f"{prefill}")


def tensor_ring(case: Case, rule: Rule) -> Iterator[Finding]:
    """Both sizes on one side of the number of KV heads."""
    prefill, decode = case.tensor
    if case.model is None or State.RING not in case.model.states or not case.model.kv_heads:
        return
    heads = case.model.kv_heads
    if (prefill < heads) != (decode < heads):
        side = f"less than {heads}" if prefill < heads else f"{heads} or more"
        yield Finding(_tensor("decode"), str(decode), f"prefill has {prefill} and the model {heads} KV heads", side)


def tensor_unseen(case: Case, rule: Rule) -> Iterator[Finding]:
    """Different sizes of which nothing is known."""
    prefill, decode = case.tensor
    if prefill != decode:
        yield Finding(_tensor("decode"), str(decode), f"prefill has {prefill}", str(prefill))


def heads_divide(case: Case, rule: Rule) -> Iterator[Finding]:
    """The size divides the attention heads, for each role."""
    heads = case.model.heads if case.model else 0
    for role, size in zip(ROLES, case.tensor, strict=True):
        if heads and heads % size:
            fitting = [n for n in range(1, min(heads, MAX_TENSOR) + 1) if heads % n == 0]
            yield Finding(_tensor(role), str(size), f"the model has {heads} attention heads", listed(fitting))


def experts(case: Case, rule: Rule) -> Iterator[Finding]:
    """Expert parallelism needs experts; only of types that are known, since keys of experts vary."""
    if case.model is None or not case.model.known or case.model.experts:
        return
    for role in ROLES:
        if case.spec.roles[role].parallelism.expert:
            having = f"the config.json of {case.model.model_type} names no experts"
            yield Finding(f"spec.{role}.parallelism.expert", "true", having, "false")


def pipeline(case: Case, rule: Rule) -> Iterator[Finding]:
    """One pipeline stage on each role."""
    for role in ROLES:
        size = case.spec.roles[role].parallelism.pipeline
        if size > 1:
            yield Finding(f"spec.{role}.parallelism.pipeline", str(size), "", f"1, with the ranks in {_tensor(role)}")


def context_prefill_only(case: Case, rule: Rule) -> Iterator[Finding]:
    """No prefill context parallelism on decode."""
    option = case.decode.flag(*rule.names)
    if option is not None and whole(case.decode, rule.names) > 1:
        yield Finding(option.field, option.shown, "", "the flag in spec.prefill.args")


def context_divides(case: Case, rule: Rule) -> Iterator[Finding]:
    """One decode context parallel size divides the other."""
    prefill, decode = (whole(options, rule.names) for options in case.roles)
    option = case.decode.flag(*rule.names) or case.prefill.flag(*rule.names)
    if option is not None and max(prefill, decode) % min(prefill, decode):
        yield Finding(option.field, option.shown, f"prefill has {prefill}, decode {decode}", "sizes of which one divides the other")


def context_recurrent(case: Case, rule: Rule) -> Iterator[Finding]:
    """Equal decode context parallel sizes for recurrent state."""
    prefill, decode = (whole(options, rule.names) for options in case.roles)
    option = case.decode.flag(*rule.names) or case.prefill.flag(*rule.names)
    if option is not None and case.recurrent and prefill != decode:
        having = f"prefill has {prefill}, decode {decode}, and the model has {case.recurrent}"
        yield Finding(option.field, option.shown, having, "the same size on both roles")


def context_unseen(case: Case, rule: Rule) -> Iterator[Finding]:
    """Any decode context parallelism where NIXL does not know it."""
    for options in case.roles:
        option = options.flag(*rule.names)
        if option is not None and whole(options, rule.names) > 1:
            yield Finding(option.field, option.shown, "", "vLLM 0.29.0 or later")


def _blocks(case: Case, rule: Rule) -> tuple[int, int]:
    """Block sizes of prefill and decode; 0 where the backend chooses."""
    return case.prefill.number(*rule.names) or 0, case.decode.number(*rule.names) or 0


def block_multiple(case: Case, rule: Rule) -> Iterator[Finding]:
    """Decode's block is a multiple of prefill's."""
    prefill, decode = _blocks(case, rule)
    option = case.decode.flag(*rule.names)
    if option is not None and prefill and decode and decode % prefill:
        yield Finding(option.field, option.shown, f"prefill has {prefill}", f"{prefill} or a multiple of it")


def block_tensor(case: Case, rule: Rule) -> Iterator[Finding]:
    """Equal blocks when prefill has more ranks and the heads of a block are split."""
    prefill, decode = _blocks(case, rule)
    option = case.decode.flag(*rule.names)
    if option is None or not prefill or not decode or prefill == decode or case.tensor[0] <= case.tensor[1]:
        return
    if case.model is None or not case.model.replicated:
        having = f"prefill has blocks of {prefill} and {case.tensor[0]} ranks, decode has {case.tensor[1]} ranks"
        accepted = str(prefill) if case.model else f"{prefill}, or {GIVE_MODEL}"
        yield Finding(option.field, option.shown, having, accepted, unproven=case.model is None)


def block_hybrid(case: Case, rule: Rule) -> Iterator[Finding]:
    """Equal blocks when layers keep something else than pages of all tokens."""
    prefill, decode = _blocks(case, rule)
    option = case.decode.flag(*rule.names)
    if option is None or case.model is None or not prefill or not decode or prefill == decode:
        return
    states = [s for s in case.model.states if s in HYBRID]
    if states:
        yield Finding(option.field, option.shown, f"prefill has {prefill} and the model has {' and '.join(states)}", f"{prefill}")


def block_unsaid(case: Case, rule: Rule) -> Iterator[Finding]:
    """Only one role names its block size."""
    prefill, decode = _blocks(case, rule)
    option = case.decode.flag(*rule.names) or case.prefill.flag(*rule.names)
    if option is not None and bool(prefill) != bool(decode):
        yield Finding(option.field, option.shown, "", f"{option.shown} in spec.engine.args")


PREDICATES: Final[Mapping[Check, Predicate]] = {
    Check.TENSOR_DIVIDES: tensor_divides,
    Check.TENSOR_HEADS: tensor_heads,
    Check.TENSOR_RECURRENT: tensor_recurrent,
    Check.TENSOR_RING: tensor_ring,
    Check.TENSOR_UNSEEN: tensor_unseen,
    Check.HEADS_DIVIDE: heads_divide,
    Check.EXPERTS: experts,
    Check.PIPELINE: pipeline,
    Check.CONTEXT_PREFILL_ONLY: context_prefill_only,
    Check.CONTEXT_DIVIDES: context_divides,
    Check.CONTEXT_RECURRENT: context_recurrent,
    Check.CONTEXT_UNSEEN: context_unseen,
    Check.BLOCK_MULTIPLE: block_multiple,
    Check.BLOCK_TENSOR: block_tensor,
    Check.BLOCK_HYBRID: block_hybrid,
    Check.BLOCK_UNSAID: block_unsaid,
}
