"""PDDeployment as pydantic models: the source of the CRD and of every default.

A field's description is what `kubectl explain` prints. A rule (`x-kubernetes-validations`) stands at the smallest object
that holds the fields it reads, and its message names the field (`{self}` is the path of that object below spec) and what
would be accepted. Defaults stand here only where absence has no meaning of its own; the API server applies them, the
operator never writes them back. Rules about flags and variables of the programs that we run are added by crdgen.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pd_operator.api.scalars import (
    HOSTNAME,
    IDENTIFIER,
    IMAGE,
    LABEL_KEY,
    QUANTITY,
    SEMVER,
    Amount,
    Check,
    Duration,
    Image,
    Quantity,
    Rule,
    Says,
    Share,
    between,
    rules,
    to_camel,
    unique,
)

GROUP = "pdserve.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
MAX_NAME = 30  # so that every derived name fits the 63 characters of a DNS label
SECRET_NAME = "(?i)(TOKEN|KEY|PASSWORD|SECRET)$"


class Model(BaseModel):
    """Base of all API objects: camelCase on the wire, unknown fields refused, immutable."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


Arg = Annotated[str, Field(min_length=1, max_length=4096)]
Version = Annotated[
    str, Field(pattern=SEMVER, max_length=64), Says("a version of three numbers without a leading v, such as 0.32.0")
]


class EnvVar(Model):
    """An environment variable of the engine container."""

    model_config = rules(
        Rule(
            f"!self.name.matches('{SECRET_NAME}') || !has(self.value)",
            "{self}.value: a variable whose name ends in TOKEN, KEY, PASSWORD or SECRET must use valueFrom.secretKeyRef",
        ),
        Rule("!(has(self.value) && has(self.valueFrom))", "{self}: set either value or valueFrom, not both"),
    )
    name: Annotated[
        str,
        Field(min_length=1, max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$"),
        Says("made of letters, digits, '_', '.' and '-', and not begin with a digit, '.' or '-'"),
    ] = Field(description="Name of the variable, e.g. NCCL_DEBUG.")
    value: str | None = Field(default=None, max_length=8192, description="Literal value.")
    value_from: Annotated[dict[str, Any], Field(min_length=1, max_length=1)] | None = Field(
        default=None,
        description="Source of the value, as in a Pod, one of: secretKeyRef, configMapKeyRef, fieldRef, resourceFieldRef.",
    )


EnvList = Annotated[
    list[EnvVar],
    AfterValidator(unique),
    Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
]
ArgList = Annotated[list[Arg], Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "atomic"})]
Template = Annotated[
    dict[str, Any],
    Field(description="Partial PodTemplateSpec, merged over what the operator renders: lists merge by name, tolerations append."),
]
ResourceMap = Annotated[
    dict[str, Amount],
    Field(max_length=16),
    Check(
        f"self.all(k, k.matches(r'{LABEL_KEY}'))",
        "{self}: each name must be a resource name such as cpu, memory or nvidia.com/gpu",
    ),
    Check(
        "self.all(k, !k.contains('/') || !isQuantity(string(self[k])) || quantity(string(self[k])).isInteger())",
        "{self}: an extended resource such as nvidia.com/gpu must be a whole number",
    ),
]


class ConfigMapRef(Model):
    """Reference to a ConfigMap of the same namespace."""

    name: Annotated[
        str,
        Field(pattern=r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$", max_length=253),
        Says("the name of a ConfigMap: lower-case letters, digits, '.' and '-'"),
    ] = Field(default="", description="Name of the ConfigMap that holds the model's config.json.")


class ModelSpec(Model):
    """What is served."""

    uri: Annotated[
        str,
        Field(
            max_length=512,
            pattern=r"^(hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*|pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[!-~]+"
            r"|oci://[A-Za-z0-9][!-~]*|/[!-~]*)$",
        ),
        Says("hf://org/model, pvc://claim/path, oci://image or an absolute /path, without spaces"),
    ] = Field(
        description="Where the weights are: hf://org/model, pvc://claim/path, oci://image or an absolute path inside the "
        "container. The same string is given to prefill and decode."
    )
    name: (
        Annotated[
            str,
            Field(min_length=1, max_length=253, pattern=IDENTIFIER),
            Says("made of letters, digits and . _ / : @ + -, and begin with a letter or digit"),
        ]
        | None
    ) = Field(default=None, description="Name that clients ask for; the name of the object when absent.")
    config_map_ref: ConfigMapRef | None = Field(
        default=None, description="The model's config.json, for the checks of transferable state."
    )


class EngineSpec(Model):
    """The serving engine, the same for both roles."""

    type: Literal["vllm", "sglang", "trtllm"] = Field(description="Engine: vllm, sglang or trtllm.")
    version: Version = Field(description="Version of the engine, without a leading v, e.g. 0.32.0.")
    image: Image = Field(default="", description="Image of the engine; absent takes the install's image table.")
    args: ArgList = Field(default_factory=list, description="Arguments added for both roles, after those of the operator.")
    env: EnvList = Field(default_factory=list, description="Environment variables for both roles.")


class HandoffSpec(Model):
    """How a request's state goes from prefill to decode."""

    connector: Literal["nixl"] = Field(default="nixl", description="Transfer connector: nixl.")
    on_failure: Literal["Recompute", "Fail"] = Field(
        default="Recompute",
        description="What decode does when a handoff fails: Recompute the prompt, or Fail the request (refused where it kills "
        "decode engines).",
    )
    lease_duration: Annotated[Duration, between("30s", "1h")] = Field(
        default="30s", description="How long prefill keeps a finished prompt's state for decode, at least 30s."
    )


class Parallelism(Model):
    """How one replica spreads over its accelerators."""

    tensor: int = Field(default=1, ge=1, le=128, description="Tensor parallel size.")
    pipeline: int = Field(default=1, ge=1, le=64, description="Pipeline parallel size.")
    data: int = Field(default=1, ge=1, le=256, description="Data parallel size.")
    expert: bool = Field(default=False, description="Expert parallelism for mixture-of-experts models.")


class Resources(Model):
    """Resources of the engine container."""

    model_config = rules(
        Rule("has(self.limits) && size(self.limits) > 0", "{self}.limits is required, e.g. limits: {nvidia.com/gpu: 1}"),
        Rule(
            "!has(self.limits) || !has(self.requests) || self.requests.all(k, !(k in self.limits)"
            " || !isQuantity(string(self.requests[k])) || !isQuantity(string(self.limits[k]))"
            " || !quantity(string(self.requests[k])).isGreaterThan(quantity(string(self.limits[k]))))",
            "{self}.requests must not exceed limits",
        ),
        Rule(
            "!has(self.requests) || self.requests.all(k, !k.contains('/') || (has(self.limits) && k in self.limits"
            " && string(self.requests[k]) == string(self.limits[k])))",
            "{self}.requests: an extended resource such as nvidia.com/gpu must also be in limits, with the same number",
        ),
    )
    limits: ResourceMap | None = Field(default=None, description="Limits, by resource name, e.g. nvidia.com/gpu.")
    requests: ResourceMap | None = Field(default=None, description="Requests, by resource name; the limits when absent.")


class RoleSpec(Model):
    """One role: prefill or decode."""

    replicas: int | None = Field(
        default=None,
        ge=1,
        le=10000,
        description="Replicas when spec.scaling is absent; absent too: what the pool has, 1 when it is made.",
    )
    parallelism: Parallelism = Field(default_factory=Parallelism, description="How one replica spreads over its accelerators.")
    nodes: int = Field(default=1, ge=1, le=64, description="Nodes that one replica spans; above 1 a replica is a group of pods.")
    resources: Resources = Field(description="Resources of the engine container; limits are required.")
    args: ArgList = Field(default_factory=list, description="Engine arguments of this role, after those of spec.engine.")
    env: EnvList = Field(default_factory=list, description="Environment variables of this role; they win over spec.engine.env.")
    template: Template = Field(default_factory=dict)


class P2PSpec(Model):
    """Peer-to-peer sharing between the LMCache servers."""

    enabled: bool = Field(default=False, description="Share cached state between servers through a coordinator.")


class LMCacheSpec(Model):
    """One LMCache server beside each engine."""

    version: Version = Field(default="0.5.5", description="LMCache version, of the server and in the engine image.")
    image: Image = Field(
        default="",
        description="Image of the server; absent takes the install's image table, else the engine's image.",
    )
    l1_size: Annotated[
        Quantity,
        Check(
            f"self.matches(r'{QUANTITY}') && quantity(self).compareTo(quantity('64Mi')) >= 0"
            " && quantity(self).compareTo(quantity('16Ti')) <= 0",
            "{self} must be a quantity from 64Mi to 16Ti, such as 20Gi",
        ),
    ] = Field(default="20Gi", description="Memory of the server's first tier, per engine.")
    chunk_size: int = Field(
        default=256, ge=16, le=65536, description="Tokens in one cached chunk; a multiple of the engine's block size."
    )
    transfer: Literal["Engine", "Server"] = Field(
        default="Engine", description="Who copies: the Engine (the server needs no accelerator) or the Server (CUDA IPC)."
    )
    p2p: P2PSpec = Field(default_factory=P2PSpec, description="Peer-to-peer sharing between servers.")


class RouterSpec(Model):
    """The router in front of a slice."""

    type: Literal["smg", "vllm-router", "sglang-router", "dynamo", "trtllm", "External"] = Field(
        default="smg",
        description="Router: smg, vllm-router, sglang-router, dynamo, trtllm, or External (not deployed by the operator).",
    )
    version: Annotated[
        str,
        Field(pattern=f"^({SEMVER.strip('^$')})?$", max_length=64),
        Says("a version of three numbers without a leading v, such as 1.13.0"),
    ] = Field(default="", description="Version of the router; absent takes the tested one.")
    image: Image = Field(default="", description="Image of the router; absent takes the install's image table.")
    replicas: int = Field(default=2, ge=1, le=100, description="Router pods per slice; two are needed for no lost request.")
    args: ArgList = Field(default_factory=list, description="Arguments added after those of the operator.")
    template: Template = Field(default_factory=dict)


Hostname = Annotated[
    str,
    Field(pattern=HOSTNAME, min_length=1, max_length=253),
    Says("a DNS name in lower case, such as chat.example.org or *.example.org"),
]


class GatewaySpec(Model):
    """An HTTPRoute that weights slices by capacity, beside the plain Service."""

    model_config = rules(
        Rule("size(self.parentRefs) > 0", "{self}.parentRefs: at least one gateway is required, e.g. [{name: public}]")
    )
    parent_refs: Annotated[list[dict[str, Any]], Field(max_length=8, json_schema_extra={"x-kubernetes-list-type": "atomic"})] = (
        Field(default_factory=list, description="Gateways, as in an HTTPRoute: name, namespace, sectionName, port.")
    )
    hostnames: Annotated[
        list[Hostname], AfterValidator(unique), Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"})
    ] = Field(default_factory=list, description="Host names, as in an HTTPRoute.")


class TransferDomain(Model):
    """Nodes inside which a handoff is fast."""

    topology_key: Annotated[
        str,
        Field(pattern=f"^({LABEL_KEY.strip('^$')})?$", max_length=317),
        Says("the key of a node label, such as topology.kubernetes.io/zone, or empty"),
    ] = Field(default="", description="Node label whose value names the transfer domain; empty: no placement.")
    mode: Literal["Required", "Preferred"] = Field(
        default="Required", description="Required: never across domains. Preferred: if possible."
    )


class PlacementSpec(Model):
    """Where pods go."""

    transfer_domain: TransferDomain = Field(default_factory=TransferDomain, description="Nodes inside which a handoff is fast.")
    max_domains: int = Field(default=1, ge=1, le=64, description="Transfer domains that the deployment may use.")
    scheduling_timeout: Annotated[Duration, between("10s", "24h")] = Field(
        default="10m", description="How long part of a slice may stay unschedulable before another domain is tried."
    )


class SLOSpec(Model):
    """Service level objectives; all optional."""

    ttft: Annotated[Duration, between("1ms", "1h")] | None = Field(default=None, description="Time to first token.")
    ttft_per_thousand_tokens: Annotated[Duration, between("1ms", "1h")] | None = Field(
        default=None, description="Time to first token added per thousand prompt tokens."
    )
    itl: Annotated[Duration, between("1ms", "1h")] | None = Field(default=None, description="Inter-token latency.")
    percentile: int = Field(default=95, ge=50, le=99, description="Percentile at which the objectives hold.")


class ScalingBounds(Model):
    """Bounds of one pool."""

    model_config = rules(Rule("self.minReplicas <= self.maxReplicas", "{self}.minReplicas must not exceed maxReplicas"))
    min_replicas: int = Field(default=1, ge=1, le=10000, description="Replicas never go below this.")
    max_replicas: int = Field(ge=1, le=10000, description="Replicas never go above this.")


class ScalingSpec(Model):
    """How the pools scale."""

    mode: Literal["Auto", "External", "Advisory"] = Field(
        default="Auto", description="Auto; External (HPA or KEDA on the PDPools); Advisory (decide and report, write nothing)."
    )
    max_gpus: int | None = Field(
        default=None, alias="maxGPUs", ge=2, le=100000, description="Accelerators that both pools may use together."
    )
    priority: int = Field(
        default=0, ge=-1000000, le=1000000, description="Order between deployments that share a budget; higher first."
    )
    headroom_percent: int = Field(
        default=100,
        ge=50,
        le=200,
        description="Spare capacity, in percent of what the law keeps by itself: less saves accelerators, more keeps latency.",
    )
    prefill: ScalingBounds = Field(description="Bounds of the prefill pool.")
    decode: ScalingBounds = Field(description="Bounds of the decode pool.")


class BackpressureSpec(Model):
    """When requests are refused."""

    max_queue_time: Annotated[Duration, between("100ms", "1h")] = Field(
        default="5s", description="Longest wait in a queue before requests are refused."
    )


class RolloutSpec(Model):
    """How a change reaches the pods."""

    # has(): the server evaluates the rule on `default: {}` when the CRD is applied, before it fills in nested defaults
    model_config = rules(
        Rule(
            "!has(self.maxSurge) || !has(self.maxUnavailable) || !(string(self.maxSurge) in ['0', '0%']"
            " && string(self.maxUnavailable) in ['0', '0%'])",
            "{self}: maxSurge and maxUnavailable must not both be 0; set one of them to 1 or more",
        ),
    )
    type: Literal["RollingUpdate", "Recreate"] = Field(
        default="RollingUpdate", description="RollingUpdate, or Recreate (all at once)."
    )
    max_surge: Share = Field(default="25%", description="Replicas above the desired number during a rollout.")
    max_unavailable: Share = Field(default="25%", description="Replicas that may be missing during a rollout.")
    paused: bool = Field(default=False, description="Hold a rollout where it is; pools scale as ever.")
    restart_id: Annotated[str, Field(pattern=IMAGE, max_length=63), Says("printable ASCII without spaces")] = Field(
        default="", alias="restartID", description="Any new value makes a new revision: all pods are replaced."
    )
    progress_deadline_seconds: int = Field(
        default=1800, ge=60, le=86400, description="Seconds after which a rollout without progress is reported."
    )
    drain_timeout: Annotated[Duration, between("1s", "24h")] = Field(
        default="120s", description="Longest time that a decode replica may finish its streams."
    )


class PDDeploymentSpec(Model):
    """Intent of the user."""

    model_config = rules(
        Rule(
            "!has(self.scaling) || !has(self.prefill.replicas)",
            "prefill.replicas is not allowed with scaling; remove it and use scaling.prefill.minReplicas",
        ),
        Rule(
            "!has(self.scaling) || !has(self.decode.replicas)",
            "decode.replicas is not allowed with scaling; remove it and use scaling.decode.minReplicas",
        ),
    )
    suspend: bool = Field(default=False, description="True: both pools go to 0; learned numbers are kept.")
    model: ModelSpec = Field(description="What is served.")
    engine: EngineSpec = Field(description="The serving engine, the same for both roles.")
    handoff: HandoffSpec = Field(default_factory=HandoffSpec, description="How a request's state goes from prefill to decode.")
    prefill: RoleSpec = Field(description="The prefill role.")
    decode: RoleSpec = Field(description="The decode role.")
    lmcache: LMCacheSpec | None = Field(default=None, description="One LMCache server beside each engine; absent: none.")
    router: RouterSpec = Field(default_factory=RouterSpec, description="The router in front of a slice.")
    gateway: GatewaySpec | None = Field(
        default=None, description="An HTTPRoute that weights slices by capacity, beside the Service."
    )
    placement: PlacementSpec = Field(default_factory=PlacementSpec, description="Where pods go.")
    slo: SLOSpec | None = Field(default=None, description="Service level objectives.")
    scaling: ScalingSpec | None = Field(default=None, description="How the pools scale; absent: static replicas.")
    backpressure: BackpressureSpec = Field(default_factory=BackpressureSpec, description="When requests are refused.")
    rollout: RolloutSpec = Field(default_factory=RolloutSpec, description="How a change reaches the pods.")
    verification: Literal["Required", "Advisory", "Disabled"] = Field(
        default="Required",
        description="Required: a slice stays dark until a canary has proven its handoff. Advisory: it serves, the canary reports. "
        "Disabled: no canary, and no evidence is taken.",
    )

    @property
    def roles(self) -> dict[str, RoleSpec]:
        """Both roles, prefill first."""
        return {"prefill": self.prefill, "decode": self.decode}
