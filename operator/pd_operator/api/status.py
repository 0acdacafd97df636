"""Status of a PDDeployment as models, and the condition that both kinds use.

Only the operator writes status. Bounds are generous on purpose: a refused status write hides everything else. Unknown
fields are dropped, not refused, so that an operator of the previous version can read what a newer one wrote.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from pd_operator.api.types import Model

Text = Annotated[str, Field(max_length=1024)]
Name = Annotated[str, Field(max_length=253)]
Short = Annotated[str, Field(max_length=32)]
Instant = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Counter = Annotated[int, Field(ge=0, le=2**53 - 1)]  # larger maxima become floats in the API server and are refused


class StatusModel(Model):
    """Base of everything below status."""

    model_config = ConfigDict(extra="ignore")


class StatusCondition(StatusModel):
    """One condition, with the fields and bounds of meta/v1 Condition."""

    type: str = Field(min_length=1, max_length=316, description="Type of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    observed_generation: Counter | None = Field(default=None, description="Generation of the object that this was said about.")
    last_transition_time: Instant = Field(description="When status last changed.")
    reason: str = Field(min_length=1, max_length=1024, description="One word for programs; see the conditions reference.")
    message: str = Field(max_length=32768, description="One sentence for people; it says what to do where that is not plain.")


Conditions = Annotated[
    list[StatusCondition],
    Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
]


class RoleStatus(StatusModel):
    """One pool, over all slices and revisions."""

    name: Literal["prefill", "decode"] = Field(description="prefill or decode.")
    ready: Short = Field(default="", description="readyReplicas/desiredReplicas, for the columns of kubectl get.")
    desired_replicas: Count | None = Field(default=None, description="Replicas that should exist.")
    replicas: Count | None = Field(default=None, description="Replicas that exist.")
    ready_replicas: Count | None = Field(default=None, description="Replicas that are ready.")
    updated_replicas: Count | None = Field(default=None, description="Replicas of the updated revision.")
    verified_replicas: Count | None = Field(default=None, description="Replicas that evidence proved.")
    gpus: Count | None = Field(default=None, description="Accelerators that the existing replicas hold.")


class VerifiedStatus(StatusModel):
    """The newest proof of a slice."""

    at: Instant = Field(description="When it was taken.")
    canary: Count = Field(description="Number of the canary that took it.")
    evidence: Short = Field(default="", description="Hash of the evidence, the termination message of the canary's pod.")
    about: Short = Field(default="", description="Hash of what was proven: revision, pods, router and images.")
    handoff: Text = Field(default="", description="What was seen of the handoff.")
    offload: Text = Field(default="", description="What was seen of the offload.")


class CanaryStatus(StatusModel):
    """The newest canary of a slice that ended."""

    number: Count = Field(description="Its number; the Job is called SLICE-canary-NUMBER.")
    at: Instant = Field(description="When its end was seen.")
    about: Short = Field(default="", description="Hash of what it was about: revision, pods, router and images.")
    failures: Count = Field(default=0, description="Canaries that proved nothing, in a row.")
    handoff_reason: Short = Field(default="", description="Reason of HandoffVerified after it.")
    handoff_message: Text = Field(default="", description="What it saw of the handoff.")
    offload_reason: Short = Field(default="", description="Reason of OffloadVerified after it.")
    offload_message: Text = Field(default="", description="What it saw of the offload.")


class SliceStatus(StatusModel):
    """The part of the deployment in one transfer domain at one revision."""

    name: Name = Field(description="Name of the slice, and of its Service.")
    revision: Name = Field(default="", description="Revision of the slice.")
    domain: Name = Field(default="", description="Transfer domain; empty without placement, or while it is not known.")
    prefill: Count | None = Field(default=None, description="Prefill replicas that are ready.")
    decode: Count | None = Field(default=None, description="Decode replicas that are ready.")
    state: Name = Field(default="", description="Dark, Serving or Removing.")
    weight: Count | None = Field(default=None, description="Weight in the HTTPRoute, in percent; only with a gateway.")
    handoff_mbps: Counter | None = Field(default=None, alias="handoffMBps", description="Megabytes per second, last measured.")
    verified: VerifiedStatus | None = Field(default=None, description="Its newest proof.")
    canary: CanaryStatus | None = Field(default=None, description="Its newest canary that ended.")


class ExcludedDomain(StatusModel):
    """A transfer domain in which a slice did not come together, and that is left alone for a while."""

    name: Annotated[str, Field(max_length=316)] = Field(description="The domain; node/NAME where only the node is known.")
    reason: Annotated[str, Field(max_length=1024)] = Field(default="", description="What was missing there.")
    until: Instant = Field(description="When it may be used again.")
    times: Count = Field(default=1, description="How often in a row; each time doubles the wait.")


class EvidenceFinding(StatusModel):
    """Something that counters accuse; docs/evidence.md has the rules."""

    reason: Annotated[str, Field(max_length=64)] = Field(description="A reason of the condition Degraded.")
    subject: Name = Field(description="The pod, or the slice.")
    slice: Name = Field(default="", description="The slice.")
    since: Instant = Field(description="When its first sign was seen.")
    message: Text = Field(default="", description="What was counted, and what to do next.")


class HandoffStatus(StatusModel):
    """What handoffs did, from the counters of the pods."""

    fallback_requests: Counter | None = Field(
        default=None,
        description="Requests that decode had to recompute; told anew when it grew by a tenth. Metrics have it exactly.",
    )
    expired: Counter | None = Field(
        default=None, description="Handoffs whose lease ended before decode took the state; told anew when it grew by a tenth."
    )
    last_verified: Instant | None = Field(
        default=None, description="When counters last proved a handoff, to ten minutes; metrics have it exactly."
    )
    unverified: Annotated[list[Name], Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "set"})] = Field(
        default_factory=list, description="Ready replicas of which no handoff was seen yet; at most 64 names."
    )
    findings: Annotated[list[EvidenceFinding], Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "atomic"})] = (
        Field(default_factory=list, description="What is wrong, the gravest first.")
    )


class Attainment(StatusModel):
    """Share of requests that met the objectives, e.g. 97.5%."""

    ttft: Short = Field(default="", description="Share within the objective for the time to first token.")
    itl: Short = Field(default="", description="Share within the objective for the inter-token latency.")
    goodput_min: Short = Field(default="", description="Share within both, at least.")
    goodput_max: Short = Field(default="", description="Share within both, at most.")
    window: Short = Field(default="", description="Time that the shares cover.")
    age: Short = Field(default="", description="Age of the readings when this was written.")


class BackpressureStatus(StatusModel):
    """The four questions of back-pressure; nobody is an answer."""

    rejected_at: Text = Field(default="", description="Where a request is refused.")
    code: Text = Field(default="", description="What a refused client gets.")
    kept_for: Text = Field(default="", description="How long state is kept on prefill.")
    freed_by: Text = Field(default="", description="Who frees it.")
    scale_out_p50: Short = Field(default="", description="Time to a new ready replica, median, measured.")
    scale_out_p90: Short = Field(default="", description="Time to a new ready replica, 90th percentile, measured.")
    not_enforced: Annotated[list[Text], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic"})] = Field(
        default_factory=list, description="Limits that nothing enforces here, and why."
    )


class PDDeploymentStatus(StatusModel):
    """What the operator observed."""

    observed_generation: Counter | None = Field(default=None, description="Generation of the spec that this status is about.")
    controller: Name = Field(default="", description="Install of pd-operator that owns the object.")
    current_revision: Name = Field(default="", description="Revision that serves.")
    updated_revision: Name = Field(default="", description="Revision that the spec asks for.")
    url: Text = Field(default="", description="Address for clients: the first host name of the gateway, else the Service.")
    serving_slices: Count | None = Field(default=None, description="Slices that take traffic.")
    bottleneck: Annotated[str, Field(max_length=64)] = Field(
        default="", description="Which role limits the throughput: Prefill, Decode, None or Unknown."
    )
    roles: Annotated[
        list[RoleStatus],
        Field(max_length=2, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ] = Field(default_factory=list, description="Both pools.")
    slices: Annotated[
        list[SliceStatus],
        Field(max_length=256, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ] = Field(default_factory=list, description="Slices, serving or dark.")
    next_slice: Count | None = Field(
        default=None, description="Number of the next new slice. With a topology key the name of a slice is never used again."
    )
    excluded_domains: Annotated[
        list[ExcludedDomain],
        Field(max_length=256, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ] = Field(default_factory=list, description="Transfer domains that are left alone for a while, and why.")
    handoff: HandoffStatus | None = Field(default=None, description="What handoffs did.")
    attainment: Attainment | None = Field(default=None, description="Share of requests that met the objectives.")
    backpressure: BackpressureStatus | None = Field(default=None, description="Who refuses requests, and how.")
    conditions: Conditions = Field(default_factory=list, description="Conditions; Ready sums them up.")
