"""Bounds: what the user and the engines allow, as `decide` needs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoleBounds:
    """Bounds of one role. `lead_time` is seconds from creating a replica to its being ready, 90th percentile as measured."""

    minimum: int
    maximum: int
    gpus: int = 1  # of one replica; chips of the roles may differ, throughput is learned per role
    lead_time: float = 120.0

    def clamp(self, count: int) -> int:
        """The nearest allowed count."""
        return max(self.minimum, min(self.maximum, count))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one PDDeployment; times in seconds. Raises ValueError when no count could satisfy them."""

    prefill: RoleBounds
    decode: RoleBounds
    max_gpus: int | None = None
    slo_ttft: float | None = None
    slo_ttft_per_thousand: float = 0.0  # seconds per thousand uncached prompt tokens
    slo_itl: float | None = None
    percentile: int = 95
    max_queue_time: float = 5.0
    lease: float = 30.0
    max_num_seqs: int = 256
    tick: float = 15.0
    shared: str = ""  # the budget of several PDDeployments that makes max_gpus what it is, and who holds the rest

    def __post_init__(self) -> None:
        for name, role in (("prefill", self.prefill), ("decode", self.decode)):
            if not 0 <= role.minimum <= role.maximum:
                raise ValueError(f"scaling.{name}.minReplicas is {role.minimum}: accepted is 0 to maxReplicas, {role.maximum}")
            if role.gpus < 0 or role.lead_time < 0:
                raise ValueError(f"{name}: gpus is {role.gpus}, lead time {role.lead_time}: accepted is 0 and above")
        least = self.gpus_of(self.prefill.minimum, self.decode.minimum)
        if self.max_gpus is not None and least > self.max_gpus:
            raise ValueError(f"scaling.maxGPUs is {self.max_gpus}: accepted is {least} and above, what the minReplicas need")

    def gpus_of(self, prefill: int, decode: int) -> int:
        """GPUs of so many replicas."""
        return prefill * self.prefill.gpus + decode * self.decode.gpus
