"""The programs of one PDDeployment: which modules speak for them, and what their versions rule out together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from pd_operator.api.types import PDDeploymentSpec
from pd_operator.core.capabilities import Program, Refusal, Unproven, Upstream
from pd_operator.upstream import backpressure, lmcache, pairs, smg, states, vllm, vllm_nodes, vllm_router


class Router(Protocol):
    """What a router's module offers."""

    @property
    def TESTED(self) -> str: ...

    @property
    def COMMAND(self) -> list[str]: ...

    @property
    def PORT(self) -> int: ...

    @property
    def METRICS_PORT(self) -> int: ...

    @property
    def PRE_STOP(self) -> int: ...

    @property
    def GRACE_PERIOD(self) -> int: ...

    def program(self, version: str) -> Program: ...

    def arguments(
        self,
        namespace: str,
        prefill: Mapping[str, str],
        decode: Mapping[str, str],
        engine_port: int,
        user: Sequence[str],
        limits: Sequence[tuple[str, ...]] = (),
    ) -> list[str]: ...

    def probes(self) -> dict[str, Any]: ...

    def keyed(self) -> list[tuple[str, ...]]: ...

    def environment(self, engine_api_key: Mapping[str, Any] | None) -> list[dict[str, Any]]: ...


ROUTERS: Final[Mapping[str, Router]] = {"smg": smg, "vllm-router": vllm_router}
ENGINES: Final = ("vllm",)


def router(spec: PDDeploymentSpec) -> Router:
    """The router's module; smg for a type that is not built yet (such a spec is refused before anything is rendered)."""
    return ROUTERS.get(spec.router.type, smg)


def router_version(spec: PDDeploymentSpec) -> str:
    """The router's version: the user's, else the tested one."""
    return spec.router.version or router(spec).TESTED


def upstream(spec: PDDeploymentSpec) -> Upstream:
    """Programs and version refusals of a spec."""
    refusals: list[Refusal] = []
    if spec.engine.type in ENGINES:
        refusals += [*vllm.refusals(spec.engine.version, spec.handoff, spec.lmcache), *vllm_nodes.refusals(spec)]
    if spec.lmcache is not None:
        refusals += lmcache.refusals(spec.lmcache)
    return Upstream(
        engine=vllm.program(spec.engine.version),
        router=router(spec).program(router_version(spec)),
        lmcache=lmcache.program(spec.lmcache.version) if spec.lmcache else None,
        refusals=tuple(refusals),
        rules=pairs.rules(spec.engine.type, spec.engine.version, spec.lmcache is not None),
        carries=states.carries(spec.engine.type, spec.engine.version),
        unproven=(*_unproven(spec, refusals), *vllm_nodes.unproven(spec)),
        backpressure=backpressure.contract(spec),
    )


def _unproven(spec: PDDeploymentSpec, refusals: Sequence[Refusal]) -> Iterator[Unproven]:
    """Versions that our tests did not run, those apart that are refused anyway."""
    tested = [("engine", spec.engine.version, vllm.TESTED)] if spec.engine.type in ENGINES else []
    if spec.router.type in ROUTERS:
        tested.append(("router", router_version(spec), router(spec).TESTED))
    if spec.lmcache is not None:
        tested.append(("lmcache", spec.lmcache.version, lmcache.TESTED))
    refused = {refusal.field for refusal in refusals}
    for component, version, known in tested:
        field = f"spec.{component}.version"
        if version != known and field not in refused:
            yield Unproven(field, version, f"tested is {known}")
