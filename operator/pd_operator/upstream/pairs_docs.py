"""docs/reference/compatibility.md, from the rows of pairs.py and states.py and the predicates of core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from pd_operator.core.capabilities import Check, State
from pd_operator.core.compatibility_model import ARCHITECTURES, KEY, MAX_SIZE, MODEL_TYPES
from pd_operator.core.compatibility_verdict import NAMES, PREDICATES
from pd_operator.upstream import lmcache, pairs, smg, states, vllm, vllm_router

_INTRO: Final = f"""\
<!-- Generated from pd_operator/upstream/pairs.py and states.py by `make generate`; do not edit. -->
# Compatibility

Prefill, decode, router and cache at some versions and settings cannot hand a request over, and most such pairs look healthy: pods
are ready, and each request fails or is computed twice. The operator judges a spec before it makes anything.

* **Refused**: `Accepted` is False with `IncompatiblePair`, `StateNotTransferable`, `UnsafeFailurePolicy` or `UnsupportedVersion`.
  The message names the field, its value and what would be accepted. Nothing is made; what serves goes on serving.
* **Unproven**: no table and no test of ours knows the combination. It is accepted, and `Accepted` names it after `unproven:`.

With `spec.model.configMapRef` the model's config.json is judged too. Its ConfigMap holds it under the key `{KEY}`, at most
{MAX_SIZE // 1024} KiB; it is read at each reconcile. Without it nothing that depends on the model is checked: KV heads, recurrent
state, states at handoff.

    kubectl create configmap llama-config --from-file={KEY}

Prefill and decode run one image, and each LMCache server belongs to one engine, so both sides of a handoff have the same version.
The lease outlives a drain: prefill finishes for `handoff.leaseDuration` and {vllm.LEASE_MARGIN} s after SIGTERM, and neither that
flag nor the grace period can be replaced.
"""


def markdown() -> str:
    """The whole page."""
    return "\n".join([_INTRO, *_tested(), *_states(), *_pairs(), *_routers(), *_models(), ""])


def _tested() -> Iterator[str]:
    yield "## Versions\n"
    yield "| program | oldest | tested | any other |\n|---|---|---|---|"
    oldest = f"{vllm.MINIMUM}; with lmcache {vllm.MINIMUM_WITH_LMCACHE}"
    yield f"| vLLM | {oldest} | {vllm.TESTED} | unproven |"
    yield f"| LMCache | {lmcache.MINIMUM} | {lmcache.TESTED} | unproven |"
    yield f"| smg |  | {smg.TESTED} | unproven |"
    yield f"| vllm-router |  | {vllm_router.TESTED} | unproven |"
    yield ""
    yield "`handoff.onFailure: Fail` with lmcache needs LMCache 0.5.6, whose connector can be told to load only: with 0.5.5 one"
    yield "failed handoff ends the decode engine (measured with vLLM 0.32.0; its assertion is in 0.26.0, 0.27.1 and 0.29.0 too).\n"


def _states() -> Iterator[str]:
    yield "## States at handoff\n"
    yield "What a model keeps for each request, and what becomes of it with the connector `nixl`. *Rebuilt* and *not known* are"
    yield "accepted with `verification: Required` only, which compares the output of the pair with that of one engine.\n"
    yield "| engine | state | versions | at handoff | how | source |\n|---|---|---|---|---|---|"
    for state in State:
        for row in states.ROWS:
            if state in row.states:
                cells = (NAMES[row.engine], state, versions(row.since, row.until), row.carriage, row.how, row.source)
                yield _line(cells)
    yield ""


def _pairs() -> Iterator[str]:
    yield "## Pairs\n"
    yield "| rule | engine | versions | verdict | why | source |\n|---|---|---|---|---|---|"
    for check in Check:
        for row in pairs.ROWS:
            if row.check is check and check is not Check.ROUTER_PROTOCOL:
                cache = " with lmcache" if row.with_cache else ""
                named = f" ({', '.join(f'`{n}`' for n in row.names)})" if row.names else ""
                rule = (PREDICATES[check].__doc__ or "").strip().rstrip(".")
                verdict = row.reason or "unproven"
                yield _line((rule + named, NAMES[row.engine], versions(row.since, row.until) + cache, verdict, row.why, row.source))
    yield ""


def _routers() -> Iterator[str]:
    rows = [r for r in pairs.ROWS if r.check is Check.ROUTER_PROTOCOL]
    yield "## Engines and routers\n"
    yield "| engine | routers | why no other |\n|---|---|---|"
    for row in rows:
        yield _line((NAMES[row.engine], ", ".join(row.names), row.why))
    yield ""


def _models() -> Iterator[str]:
    yield "## Model types\n"
    yield "`model_type` of config.json, and the recurrent state that it means. Of other types the states are read from keys only,"
    yield "and the combination is unproven.\n"
    yield "| recurrent state | model types |\n|---|---|"
    kinds: Mapping[State | None, list[str]] = {kind: [] for kind in (None, *dict.fromkeys(k for k in MODEL_TYPES.values() if k))}
    for model_type, kind in MODEL_TYPES.items():
        kinds[kind].append(model_type)
    for architecture, state in ARCHITECTURES.items():
        kinds[state].append(f"{architecture} (architecture)")
    for kind, found in kinds.items():
        yield _line((kind or "none", ", ".join(f"`{name}`" for name in sorted(found))))
    yield ""


def versions(since: str, until: str) -> str:
    """A range as people read it."""
    if since and until:
        return f"{since} to below {until}"
    return f"{since} and later" if since else f"below {until}" if until else "all"


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"
