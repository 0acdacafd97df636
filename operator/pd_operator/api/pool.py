"""PDPool: the scale of one role, so that a HorizontalPodAutoscaler or KEDA has something to write to."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pd_operator.api.scalars import Check, Rule, rules
from pd_operator.api.status import Conditions, Count, Counter, Instant, Name, Short, StatusModel, Text
from pd_operator.api.types import MAX_NAME, Model


class PDPoolSpec(Model):
    """Scale of one role of one PDDeployment. The operator makes this object; scale it through its /scale."""

    model_config = rules(
        Rule(
            "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            "minReplicas must not exceed maxReplicas",
        ),
    )
    role: Annotated[
        Literal["prefill", "decode"], Check("self == oldSelf", "{self} is immutable; it is part of the name of the object")
    ] = Field(description="prefill or decode.")
    deployment_name: Annotated[
        str,
        Field(min_length=1, max_length=MAX_NAME),
        Check("self == oldSelf", "{self} is immutable; it is part of the name of the object"),
    ] = Field(description="Name of the PDDeployment.")
    replicas: int | None = Field(
        default=None, ge=0, le=10000, description="Replicas that are asked for. The operator uses fewer where a bound says so."
    )
    min_replicas: int | None = Field(default=None, ge=0, le=10000, description="Lower bound, from the PDDeployment.")
    max_replicas: int | None = Field(default=None, ge=0, le=10000, description="Upper bound, from the PDDeployment.")


class Decision(StatusModel):
    """One scaling decision, with what it was made from."""

    time: Instant | None = Field(default=None, description="When it was made.")
    from_replicas: Count | None = Field(default=None, description="Replicas before.")
    to_replicas: Count | None = Field(default=None, description="Replicas after.")
    reason: Name = Field(default="", description="One word for programs.")
    message: Text = Field(default="", description="One sentence for people.")
    inputs: Annotated[dict[str, Annotated[str, Field(max_length=256)]], Field(max_length=32)] = Field(
        default_factory=dict, description="Readings and learned numbers that it was made from."
    )


class Learned(StatusModel):
    """Numbers measured while serving; they survive a restart of the operator here."""

    throughput: Counter | None = Field(default=None, description="Prompt tokens per second that one replica does (prefill).")
    lead_time: Short = Field(default="", description="Seconds from creating a replica to its being ready, p50 and p90.")
    digest: Text = Field(default="", description="The numbers whose change is worth writing `state` anew.")
    state: Annotated[str, Field(max_length=8192)] = Field(default="", description="All learned numbers, for the operator alone.")


class PDPoolStatus(StatusModel):
    """What the operator observed."""

    observed_generation: Counter | None = Field(default=None, description="Generation of the spec that this status is about.")
    replicas: Count | None = Field(default=None, description="Replicas that exist.")
    ready_replicas: Count | None = Field(default=None, description="Replicas that are ready.")
    starting_replicas: Count | None = Field(default=None, description="Replicas that exist and are not ready yet.")
    desired_replicas: Count | None = Field(
        default=None, description="Replicas that the operator would use, also where it only advises or somebody else scales."
    )
    selector: Annotated[str, Field(max_length=4096)] = Field(
        default="", description="Label selector of one pod per replica, all revisions, for /scale."
    )
    last_decision: Decision | None = Field(default=None, description="The last scaling decision.")
    record: Annotated[str, Field(max_length=16384)] = Field(
        default="", description="A tick with all that its decision was made from, for kubectl pdd explain and pdd-simulate replay."
    )
    learned: Learned | None = Field(default=None, description="Numbers measured while serving.")
    conditions: Conditions = Field(default_factory=list, description="Conditions: ScalingActive and ScalingLimited.")
