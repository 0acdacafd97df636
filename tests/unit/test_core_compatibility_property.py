"""Properties of the verdict: it never raises, it is the same for the same spec, and it agrees with rules written down twice."""

from __future__ import annotations

from typing import Any

from builders import deep, images, make_spec
from hypothesis import given
from hypothesis import strategies as st
from test_core_compatibility_table import MODELS, model

from pd_operator.api.conditions import Reason
from pd_operator.api.types import PDDeploymentSpec
from pd_operator.core.capabilities import Carriage
from pd_operator.core.compatibility_model import Model
from pd_operator.core.compatibility_verdict import Verdict, judge
from pd_operator.core.names import ROLES
from pd_operator.upstream import catalog, states, vllm

VERSIONS = st.sampled_from(["0.22.1", "0.25.1", "0.26.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0", "0.40.0"])
SIZES = st.integers(1, 24)
NAMES = st.sampled_from(sorted(MODELS))
DS = {"env": [{"name": "VLLM_SSM_CONV_STATE_LAYOUT", "value": "DS"}]}


def verdict(changes: dict[str, Any], known: Model | None = None) -> Verdict:
    spec = make_spec(changes)
    return judge(spec, catalog.upstream(spec), images(spec), known)


def tensor(prefill: int, decode: int) -> dict[str, Any]:
    return {role: {"parallelism": {"tensor": size}} for role, size in zip(ROLES, (prefill, decode), strict=True)}


@given(SIZES, SIZES, NAMES)
def test_tensor_sizes_agree_with_the_assertions_of_vllm(prefill: int, decode: int, name: str) -> None:
    """The oracle is what vLLM 0.32.0 does: config/model.py, TransferTopology.tp_ratio, _validate_remote_agent_handshake."""
    known = model(name)
    changes = deep({"engine": DS}, tensor(prefill, decode))
    refused = {r.field for r in verdict(changes, known).refusals if r.reason is Reason.INCOMPATIBLE_PAIR}
    wrong = bool(max(prefill, decode) % min(prefill, decode))
    wrong |= known.heads > 0 and any(known.heads % size for size in (prefill, decode))
    wrong |= bool(known.recurrent) and prefill != decode
    replicated = known.replicated or bool(known.recurrent)
    wrong |= prefill > decode and not replicated and 0 < known.kv_heads < prefill
    if "sparse" in name:
        wrong |= (prefill < known.kv_heads) != (decode < known.kv_heads)
    assert bool(refused) is wrong
    assert refused <= {f"spec.{role}.parallelism.tensor" for role in ROLES}


@given(
    st.sampled_from([8, 16, 32, 48, 64, 128]), st.sampled_from([8, 16, 32, 48, 64, 128]), st.sampled_from([16, 64, 96, 256, 384])
)
def test_blocks_and_chunks_agree_with_their_arithmetic(prefill: int, decode: int, chunk: int) -> None:
    changes = {
        "lmcache": {"chunkSize": chunk},
        **{role: {"args": [f"--block-size={size}"]} for role, size in zip(ROLES, (prefill, decode), strict=True)},
    }
    refused = {r.field for r in verdict(changes).refusals}
    expected = {"spec.decode.args"} if decode % prefill else set()
    expected |= {"spec.lmcache.chunkSize"} if chunk % prefill or chunk % decode else set()
    assert refused == expected


@given(VERSIONS, NAMES)
def test_a_state_is_refused_exactly_when_it_does_not_arrive(version: str, name: str) -> None:
    known = model(name)
    carriage = {c.state: c.carriage for c in states.carries("vllm", version)}
    lacking = {state for state in known.states if carriage[state] is not Carriage.CARRIED}
    found = [
        r for r in verdict({"engine": {"version": version, **DS}}, known).refusals if r.reason is Reason.STATE_NOT_TRANSFERABLE
    ]
    assert len(found) == len(lacking)
    assert all(any(f"needs {state} at handoff" in r.accepted for r in found) for state in lacking)
    verified = verdict({"engine": {"version": version, **DS}, "verification": "Required"}, known)
    lost = {state for state in lacking if carriage[state] is Carriage.LOST}
    assert sum(r.reason is Reason.STATE_NOT_TRANSFERABLE for r in verified.refusals) == len(lost)
    assert sum("at handoff" in u.why for u in verified.unproven) == len(lacking - lost)


FLAGS = st.sampled_from(
    [
        *("--dtype=float16", "--dtype", "bfloat16", "--kv-cache-dtype=fp8", "--block-size=64", "-dcp=2", "-pcp=2", "--revision=a"),
        *("--disable-hybrid-kv-cache-manager", "--attention-backend=FLASHINFER", "--hf-overrides.a=1", "--enable-sleep-mode"),
        *('--speculative-config={"method":"mtp"}', "--speculative-config.model=x", "--calculate-kv-scales", "--enforce-eager"),
        *("--no-enable-prefix-caching", "--no-swa-bounded-replay", "--mamba-cache-dtype=float32", "--max-num-seqs", "8"),
    ]
)
ARGS = st.lists(FLAGS, max_size=4)
VARIABLES = st.sampled_from(["VLLM_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_DEBUG"])
ENV = st.dictionaries(VARIABLES, st.sampled_from(["", "DS", "HND", "NHD", "expandable_segments:True"]), max_size=2)


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """Anything that has to do with a pair."""

    def variables() -> list[dict[str, str]]:
        return [{"name": n, "value": v} for n, v in draw(ENV).items()]

    changes: dict[str, Any] = {"engine": {"version": draw(VERSIONS), "args": draw(ARGS), "env": variables()}}
    for role in ROLES:
        shape = {"tensor": draw(SIZES), "pipeline": draw(st.integers(1, 2)), "expert": draw(st.booleans())}
        changes[role] = {"parallelism": shape, "args": draw(ARGS), "env": variables()}
    if draw(st.booleans()):
        changes["lmcache"] = {"chunkSize": draw(st.integers(16, 512)), "transfer": draw(st.sampled_from(["Engine", "Server"]))}
    changes["handoff"] = {"onFailure": draw(st.sampled_from(["Recompute", "Fail"]))}
    return changes


@given(specs(), NAMES | st.none())
def test_the_verdict_is_total_and_each_sentence_is_whole(changes: dict[str, Any], name: str | None) -> None:
    known = model(name) if name else None
    found = verdict(changes, known)
    assert found == verdict(changes, known)
    for refusal in found.refusals:
        assert refusal.field.startswith("spec.") and "accepted: " in refusal.accepted
        assert "None" not in refusal.message and not refusal.message.endswith("; ")
    for unproven in found.unproven:
        assert unproven.field.startswith("spec.") and unproven.why and "; ; " not in unproven.message
    assert len(set(found.refusals)) == len(found.refusals)


@given(specs())
def test_what_holds_for_both_roles_is_no_difference_between_them(changes: dict[str, Any]) -> None:
    """A pair of two equal roles is never refused for being unequal."""
    changes = deep(changes, {"prefill": changes["decode"]})
    differences = ("on both roles", "a divisor or a multiple", "or a multiple of it", "sizes of which one divides")
    for refusal in verdict(changes).refusals:
        assert not any(words in refusal.accepted for words in differences), refusal


@given(st.integers(30, 3600), st.integers(1, 7200))
def test_the_lease_outlives_every_drain(lease: int, drain: int) -> None:
    """Prefill gets at least the lease after SIGTERM, and the pod at least that and the time before SIGTERM, whatever decode has."""
    spec: PDDeploymentSpec = make_spec({"handoff": {"leaseDuration": f"{lease}s"}, "rollout": {"drainTimeout": f"{drain}s"}})
    shutdown = vllm.shutdown_timeout("prefill", spec.handoff, spec.rollout.drain_timeout)
    assert shutdown >= lease + 5
    assert vllm.grace_period("prefill", spec.handoff, spec.rollout.drain_timeout) >= vllm.PRE_STOP + shutdown + 10
    assert vllm.shutdown_timeout("decode", spec.handoff, spec.rollout.drain_timeout) == drain
    assert {"--shutdown-timeout"} <= vllm.OWNED_FLAGS
    assert verdict({"handoff": {"leaseDuration": f"{lease}s"}, "rollout": {"drainTimeout": f"{drain}s"}}) == Verdict()
