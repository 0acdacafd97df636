"""Checks of flags and variables that prefill and decode must agree on, or that rule a handoff out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pd_operator.core.capabilities import Check, Rule
from pd_operator.core.compatibility_case import Case, Finding, Predicate
from pd_operator.core.compatibility_options import Option, Options

SWITCHES: Final = frozenset({"--disable-hybrid-kv-cache-manager"})
# vllm/config/speculative.py use_eagle at 0.32.0, and the names of one model each that older versions had (deepseek_mtp)
HIDDEN_STATE_METHODS: Final = ("eagle", "eagle3", "mtp", "dflash", "dspark")
SPECULATION_KEYS: Final = ("method", "model", "revision", "code_revision", "parallel_drafting")
# Names of one layout before and since vLLM 0.31 (vllm/v1/kv_cache_layout.py); NIXL's default is HND.
LAYOUTS: Final[Mapping[str, str]] = {"": "LBHNC", "HND": "LBHNC", "NHD": "LBNHC"}
CONTIGUOUS: Final = frozenset({"LBHNC", "BLHNC"})  # heads of a block in one piece
CUMEM: Final = ("--enable-sleep-mode", "--enable-cumem-allocator")


def _said(options: Options, name: str) -> str:
    """A setting as the engine takes it: "auto" is what it does without the flag."""
    if name in SWITCHES:
        return "on" if options.on(name) else ""
    option = options.flag(name)
    return "" if option is None or option.value == "auto" else option.value


def _shown(option: Option | None) -> str:
    return option.shown if option else "none"


def same_option(case: Case, rule: Rule) -> Iterator[Finding]:
    """The same on both roles; absence is a value of its own."""
    for name in rule.names:
        prefill, decode = (options.switch(name) for options in case.roles)
        if _said(case.prefill, name) != _said(case.decode, name):
            yield _differs(name, prefill, decode)


def similar_option(case: Case, rule: Rule) -> Iterator[Finding]:
    """The same on both roles; what one role leaves open may come out the same."""
    for name in rule.names:
        prefill, decode = (options.flag(name) for options in case.roles)
        said = _said(case.prefill, name), _said(case.decode, name)
        if said[0].lower() != said[1].lower():
            yield _differs(name, prefill, decode, unproven=not all(said))


def _differs(name: str, prefill: Option | None, decode: Option | None, unproven: bool = False) -> Finding:
    option = decode or prefill
    assert option is not None  # two values that differ are not both absent
    having = f"prefill has {_shown(prefill)}" if decode else "decode has none"
    return Finding(option.field, option.shown, having, f"the same {name} on both roles, best in spec.engine.args", unproven)


def same_weights(case: Case, rule: Rule) -> Iterator[Finding]:
    """Flags that choose what is loaded, dotted forms too."""
    for name in rule.names:
        prefill, decode = (_under(options, name) for options in case.roles)
        if {o.name: o.value for o in prefill} != {o.name: o.value for o in decode}:
            last = (decode or prefill)[-1]
            having = f"prefill has {prefill[-1].shown if prefill else 'none'}" if decode else "decode has none"
            yield Finding(last.field, last.shown, having, f"the same {name} on both roles, best in spec.engine.args")


def _under(options: Options, name: str) -> list[Option]:
    return [o for o in options.flags if o.name.partition(".")[0] == name]


def same_speculation(case: Case, rule: Rule) -> Iterator[Finding]:
    """The same draft model where it reads hidden states."""
    prefill, decode = (_draft(options.nested(*rule.names)) for options in case.roles)
    if prefill == decode:
        return
    options = case.decode if decode else case.prefill
    field = next(o.field for o in reversed(options.flags) if o.name.partition(".")[0] in rule.names)
    shown = f"{rule.names[0]} method={(decode or prefill)['method']}"
    having = f"prefill has {_named(prefill)}" if decode else "decode has none"
    yield Finding(field, shown, having, f"the same {rule.names[0]} on both roles, best in spec.engine.args")


def _draft(config: Mapping[str, Any]) -> dict[str, Any]:
    method = str(config.get("method", ""))
    if method not in HIDDEN_STATE_METHODS and not method.endswith("_mtp"):
        return {}
    return {key: config[key] for key in SPECULATION_KEYS if key in config}


def _named(draft: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={str(value)[:60]}" for key, value in draft.items()) or "none"


def _layouts(case: Case, name: str) -> tuple[str, str] | None:
    """Layouts of both roles; None when one comes from elsewhere and cannot be read."""
    for options in case.roles:
        if name in options.variables and not options.variables[name].value:
            return None
    prefill, decode = (options.variable(name) for options in case.roles)
    return LAYOUTS.get(prefill, prefill), LAYOUTS.get(decode, decode)


def same_layout(case: Case, rule: Rule) -> Iterator[Finding]:
    """The same layout, but for caches that have no heads to lay out."""
    name = rule.names[0]
    layouts = _layouts(case, name)
    if layouts is None or layouts[0] == layouts[1] or (case.model is not None and case.model.replicated):
        return
    option = case.decode.variables.get(name) or case.prefill.variables[name]
    prefill, decode = (options.variable(name) or "the default, HND" for options in case.roles)
    having = f"prefill has {prefill} and decode {decode}"
    yield Finding(option.field, option.shown, having, f"the same {name} on both roles, best in spec.engine.env")


def layout_tensor(case: Case, rule: Rule) -> Iterator[Finding]:
    """A layout that can be split by heads when the sizes differ."""
    name = rule.names[0]
    layouts = _layouts(case, name)
    if layouts is None or layouts[0] != layouts[1] or layouts[0] in CONTIGUOUS or case.tensor[0] == case.tensor[1]:
        return
    if case.model is not None and (case.model.replicated or 0 < case.model.kv_heads < case.tensor[0]):
        return
    option = case.decode.variables[name]
    having = f"prefill has {case.tensor[0]} ranks and decode {case.tensor[1]}"
    yield Finding(option.field, option.shown, having, f"{name}=HND, or the same tensor parallel size on both roles")


def conv_layout(case: Case, rule: Rule) -> Iterator[Finding]:
    """Layout DS for convolution state, on each role."""
    name = rule.names[0]
    if not case.recurrent:
        return
    wrong = [o for o in case.roles if (name not in o.variables or o.variables[name].value not in ("DS", ""))]
    if not wrong:
        return
    option = wrong[0].variables.get(name)
    field = option.field if option else "spec.engine.env" if len(wrong) == 2 else f"spec.{wrong[0].role}.env"
    lacking = "" if option else f" and there is no {name}"
    having = f"the model needs {case.recurrent} at handoff{lacking}"
    yield Finding(field, option.shown if option else "", having, f"{name}=DS in spec.engine.env")


def hybrid_manager(case: Case, rule: Rule) -> Iterator[Finding]:
    """The hybrid KV cache manager stays on for recurrent state."""
    for options in case.roles if case.recurrent else ():
        option = options.switch(rule.names[0])
        if option is not None and options.on(rule.names[0]):
            yield Finding(option.field, option.shown, f"the model needs {case.recurrent} at handoff", f"no {rule.names[0]}")


def dynamic_scales(case: Case, rule: Rule) -> Iterator[Finding]:
    """No scales of the cache that are computed at run time."""
    for options in case.roles:
        option = options.switch(rule.names[0])
        if option is not None and options.on(rule.names[0]):
            yield Finding(option.field, option.shown, "", "scales from the checkpoint, without this flag")


def expandable_memory(case: Case, rule: Rule) -> Iterator[Finding]:
    """No allocator that moves registered memory."""
    for options in case.roles:
        option = options.variables.get(rule.names[0])
        cumem = any(options.on(flag) for flag in CUMEM)
        if option is not None and "expandable_segments:True" in option.value and not cumem:
            accepted = f"{rule.names[0]} without expandable_segments:True, or --enable-cumem-allocator with it"
            yield Finding(option.field, option.shown, "", accepted)


def old_lease(case: Case, rule: Rule) -> Iterator[Finding]:
    """A variable that does nothing any more."""
    for options in case.roles:
        option = options.variables.get(rule.names[0])
        if option is not None:
            yield Finding(option.field, rule.names[0], "", "spec.handoff.leaseDuration, at least 30s")


PREDICATES: Final[Mapping[Check, Predicate]] = {
    Check.SAME_OPTION: same_option,
    Check.SIMILAR_OPTION: similar_option,
    Check.SAME_WEIGHTS: same_weights,
    Check.SAME_SPECULATION: same_speculation,
    Check.SAME_LAYOUT: same_layout,
    Check.LAYOUT_TENSOR: layout_tensor,
    Check.CONV_LAYOUT: conv_layout,
    Check.HYBRID_MANAGER: hybrid_manager,
    Check.DYNAMIC_SCALES: dynamic_scales,
    Check.EXPANDABLE_MEMORY: expandable_memory,
    Check.OLD_LEASE: old_lease,
}
