"""Decision: the counts that a tick asks for, why, with every number that led there, and what was learned."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pd_operator.core.names import Role
from pd_operator.core.scaling.learned import Learned


class Reason(StrEnum):
    """Why a role has the count that it has."""

    DEMAND = "Demand"  # what arrives, or runs, asks for it
    BACKLOG = "Backlog"  # what waits asks for it
    GATED_BY_DECODE = "GatedByDecode"  # decode is congested: more prefill would only hold more KV
    MAX_REPLICAS = "MaxReplicas"
    MAX_GPUS = "MaxGPUs"
    NO_CAPACITY = "NoCapacity"  # replicas that were asked for cannot run
    SIGNALS_UNKNOWN = "SignalsUnknown"
    COOLDOWN = "Cooldown"  # fewer would do, for too short a time yet
    ROLLOUT = "Rollout"  # fewer would do, but a rollout is under way
    HOLD = "Hold"  # the count is right


class Bottleneck(StrEnum):
    """The role that limits the throughput."""

    PREFILL = "Prefill"
    DECODE = "Decode"
    NONE = "None"
    UNKNOWN = "Unknown"


class Alert(StrEnum):
    """What looks like load and is not."""

    BROKEN_PATH = "BrokenPath"  # handoffs wait longer than the lease while decode runs nothing
    STALLED_ENGINE = "StalledEngine"  # prompts wait while prefill runs nothing


@dataclass(frozen=True, slots=True)
class Limit:
    """One bound that changed a count on its way from need to answer."""

    reason: Reason
    before: int
    after: int
    detail: str


@dataclass(frozen=True, slots=True)
class RoleDecision:
    """One role's answer. `need` is fractional replicas, flow + backlog; None when it cannot be told."""

    role: Role
    current: int
    desired: int
    reason: Reason
    wanted: int  # replicas that the need asks for, before any bound
    flow: float | None = None
    backlog: float | None = None
    formula: str = ""  # the need, with its numbers
    inputs: dict[str, float | None] = field(default_factory=dict)  # every number used; None is unknown
    limits: tuple[Limit, ...] = ()

    @property
    def need(self) -> float | None:
        """Replicas needed, fractional."""
        return None if self.flow is None else self.flow + (self.backlog or 0.0)


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer of one tick for one PDDeployment."""

    prefill: RoleDecision
    decode: RoleDecision
    bottleneck: Bottleneck
    learned: Learned
    congested: tuple[str, ...] = ()  # slices whose decode is congested
    alerts: tuple[Alert, ...] = ()

    def of(self, role: Role) -> RoleDecision:
        """The answer for a role."""
        return self.prefill if role == "prefill" else self.decode
