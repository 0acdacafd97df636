"""vLLM over several nodes: one engine as a group of pods, joined by its own multiprocessing executor, without Ray.

Sources: vllm-project/vllm at 0.32.0 (0.22.1, the oldest that we accept, has the same): engine/arg_utils.py for the flags and for
what each node runs, entrypoints/cli/serve.py run_headless for the workers, which serve no HTTP.
distributed/kv_transfer/kv_transfer_state.py gives all ranks of an engine the leader's engine id, and the leader's scheduler
answers the NIXL handshake for all of them, so a peer needs to reach the leader alone to find the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from pd_operator.api.conditions import Reason
from pd_operator.api.types import Parallelism, PDDeploymentSpec, RoleSpec
from pd_operator.core.capabilities import Refusal, Unproven
from pd_operator.upstream import lmcache
from pd_operator.upstream.flags import flag_of

# Set in every container by LeaderWorkerSet unless it is there already (its pkg/utils/pod, AddLWSVariables).
LEADER_ADDRESS: Final = "LWS_LEADER_ADDRESS"
WORKER_INDEX: Final = "LWS_WORKER_INDEX"
OWNED_ENV: Final = frozenset({LEADER_ADDRESS, "LWS_GROUP_SIZE", WORKER_INDEX, "LEADER_NAME"})
LEADER_NAME_ANNOTATION: Final = "leaderworkerset.sigs.k8s.io/leader-name"  # on the workers
# What the number of nodes decides; on one node they are the user's. A headless process refuses --api-server-count.
FLAGS: Final = frozenset(
    {
        "--api-server-count", "-asc", "--distributed-executor-backend", "--data-parallel-backend", "-dpb", "--data-parallel-rank",
        "-dpn", "--data-parallel-start-rank", "-dpr", "--data-parallel-size-local", "-dpl", "--data-parallel-address", "-dpa",
        "--data-parallel-rpc-port", "-dpp", "--data-parallel-hybrid-lb", "-dph", "--data-parallel-external-lb", "-dpe",
        "--data-parallel-multi-port-external-lb",
    }
)  # fmt: skip


def arguments(nodes: int) -> list[str]:
    """What the leader's command line says about the group; nothing for one node.

    It gives its own address as the meeting point and not its name, which DNS may not know yet.
    """
    return ["--nnodes", str(nodes), "--node-rank", "0", "--master-addr", "$(POD_IP)"] if nodes > 1 else []


def worker_arguments(leader: Sequence[str]) -> list[str]:
    """The command line of a worker from that of its leader: everything must agree but who it is. torch tries the leader's name
    until it resolves (c10d, TCPStore)."""
    mine = {"--node-rank": f"$({WORKER_INDEX})", "--master-addr": f"$({LEADER_ADDRESS})"}
    told = [mine.get(before, word) for before, word in zip(["", *leader], leader, strict=False)]
    return [*told[:2], "--headless", *told[2:]]


def leader_name(worker: bool) -> dict[str, Any]:
    """Variable with the name of the group's leader pod, for addresses of the group's pods."""
    path = f"metadata.annotations['{LEADER_NAME_ANNOTATION}']" if worker else "metadata.name"
    return {"name": "LEADER_NAME", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def spans(parallelism: Parallelism, nodes: int) -> bool:
    """Whether one scheduler has ranks on several nodes; not when each node runs data parallel ranks of its own."""
    return nodes > 1 and parallelism.data % nodes != 0


def cache_servers(mine: RoleSpec, service: str) -> list[str]:
    """URLs of the LMCache servers of a group, by node; none where each scheduler's ranks are on one node.

    A worker process talks to the server of its own node, and the scheduler, on the leader, asks all of them what they hold: the
    KV of a rank is only on its node (LMCache 0.5.5 integration/vllm/lmcache_mp_connector.py, lmcache.mp.server_urls).
    """
    if not spans(mine.parallelism, mine.nodes):
        return []
    names = ["$(LEADER_NAME)", *(f"$(LEADER_NAME)-{n}" for n in range(1, mine.nodes))]
    return [f"tcp://{name}.{service}:{lmcache.DATA_PORT}" for name in names]


def refusals(spec: PDDeploymentSpec) -> Iterator[Refusal]:
    """What cannot run on so many nodes."""
    for role, mine in spec.roles.items():
        if mine.nodes > 1:
            yield from _parallelism(f"spec.{role}", mine.parallelism, mine.nodes)
            yield from _flags("spec.engine.args", spec.engine.args, role)
            yield from _flags(f"spec.{role}.args", mine.args, role)
            yield from _cache(spec, role, mine)


def unproven(spec: PDDeploymentSpec) -> Iterator[Unproven]:
    """Our tests run groups of pods, but no engine over several nodes."""
    for role, mine in spec.roles.items():
        if mine.nodes > 1:
            yield Unproven(f"spec.{role}.nodes", str(mine.nodes), "no test of ours ran an engine over several nodes")


def _parallelism(field: str, parallelism: Parallelism, nodes: int) -> Iterator[Refusal]:
    ranks = parallelism.tensor * parallelism.pipeline * parallelism.data
    if ranks % nodes:
        product = "parallelism.tensor x pipeline x data"
        fitting = ", ".join(str(n) for n in range(1, min(ranks, 64) + 1) if ranks % n == 0)
        accepted = f"each node runs an equal part of the engine's {ranks} ranks ({product}); accepted: {fitting}, or more ranks"
        yield Refusal(Reason.INVALID_SPEC, f"{field}.nodes", str(nodes), accepted)
    elif parallelism.data > 1 and parallelism.data % nodes and nodes % parallelism.data:
        accepted = f"with {nodes} nodes vLLM takes a divisor or a multiple of {nodes}"
        yield Refusal(Reason.INVALID_SPEC, f"{field}.parallelism.data", str(parallelism.data), accepted)


def _flags(field: str, args: Sequence[str], role: str) -> Iterator[Refusal]:
    for flag in sorted({flag_of(arg) for arg in args} & FLAGS):
        accepted = f"the operator decides it where spec.{role}.nodes is above 1; remove it"
        yield Refusal(Reason.INVALID_SPEC, field, flag, accepted)


def _cache(spec: PDDeploymentSpec, role: str, mine: RoleSpec) -> Iterator[Refusal]:
    """LMCache finds the servers of several nodes with tensor parallelism alone (lmcache_mp_connector.py, __init__)."""
    if spec.lmcache is None:
        return
    if spans(mine.parallelism, mine.nodes) and mine.parallelism.data > 1:
        accepted = (
            f"with lmcache and {mine.nodes} nodes: 1, or a multiple of {mine.nodes}, so that no data parallel rank spans nodes"
        )
        yield Refusal(Reason.INCOMPATIBLE_PAIR, f"spec.{role}.parallelism.data", str(mine.parallelism.data), accepted)
    if spans(mine.parallelism, mine.nodes) and mine.parallelism.pipeline > 1:
        accepted = f"with lmcache and {mine.nodes} nodes: 1"
        yield Refusal(Reason.INCOMPATIBLE_PAIR, f"spec.{role}.parallelism.pipeline", str(mine.parallelism.pipeline), accepted)
    if spec.lmcache.p2p.enabled:
        accepted = f"not built yet where spec.{role}.nodes is above 1; accepted today: false"
        yield Refusal(Reason.NOT_IMPLEMENTED, "spec.lmcache.p2p.enabled", "true", accepted)
