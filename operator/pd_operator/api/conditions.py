"""Conditions and their reasons: the closed vocabulary that status, events and the docs share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

Status = Literal["True", "False", "Unknown"]
MAX_MESSAGE = 1024  # characters; the API allows 32768, people read one line


class Type(StrEnum):
    """Condition types of a PDDeployment, in the order in which they stand in the way of Ready."""

    ACCEPTED = "Accepted"
    PLACED = "Placed"
    PREFILL_READY = "PrefillReady"
    DECODE_READY = "DecodeReady"
    ROUTER_READY = "RouterReady"
    HANDOFF_VERIFIED = "HandoffVerified"
    OFFLOAD_VERIFIED = "OffloadVerified"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    UPDATE_AVAILABLE = "UpdateAvailable"
    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"


class PoolType(StrEnum):
    """Condition types of a PDPool."""

    SCALING_ACTIVE = "ScalingActive"
    SCALING_LIMITED = "ScalingLimited"


@dataclass(frozen=True, slots=True)
class ReasonDoc:
    """What a reason means and what the user does about it; docs/reference/conditions.md is made from these."""

    conditions: tuple[Type, ...]
    meaning: str
    remedy: str = ""


class Reason(StrEnum):
    """Reasons that the operator writes today. A reason of a later feature is added with that feature."""

    ACCEPTED = "Accepted"
    UNSUPPORTED_VERSION = "UnsupportedVersion"
    INCOMPATIBLE_PAIR = "IncompatiblePair"
    STATE_NOT_TRANSFERABLE = "StateNotTransferable"
    UNSAFE_FAILURE_POLICY = "UnsafeFailurePolicy"
    IMAGE_REQUIRED = "ImageRequired"
    MISSING_REFERENCE = "MissingReference"
    NAME_CONFLICT = "NameConflict"
    MANAGED_BY_OTHER = "ManagedByOther"
    MISSING_KIND = "MissingKind"
    NOT_IMPLEMENTED = "NotImplemented"
    INVALID_SPEC = "InvalidSpec"
    BOUND = "Bound"
    NO_CAPACITY = "NoCapacity"
    NO_DOMAIN_LABEL = "NoDomainLabel"
    WAITING_FOR_NODES = "WaitingForNodes"
    GATED = "Gated"
    WEDGED = "Wedged"
    CAPACITY_UNOBSERVED = "CapacityUnobserved"
    PAIRING_NOT_ENFORCED = "PairingNotEnforced"
    ROUTE_REFUSED = "RouteRefused"
    UNEVEN_TRAFFIC = "UnevenTraffic"
    READY = "Ready"
    STARTING = "Starting"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_ERROR = "ImageError"
    CRASH_LOOP = "CrashLoop"
    CONFIG_ERROR = "ConfigError"
    PODS_REFUSED = "PodsRefused"
    WRITE_REFUSED = "WriteRefused"
    NOT_DISCOVERED = "NotDiscovered"
    SUSPENDED = "Suspended"
    NOT_YET_RUN = "NotYetRun"
    VERIFIED = "Verified"
    NO_TRANSFER = "NoTransfer"
    TRANSFER_FAILED = "TransferFailed"
    SILENT_FALLBACK = "SilentFallback"
    PAIR_LOST = "PairLost"
    BROKEN_PATH = "BrokenPath"
    LEASE_EXPIRED = "LeaseExpired"
    REPLICA_NOT_TRANSFERRING = "ReplicaNotTransferring"
    CACHE_DOWN = "CacheDown"
    REQUEST_FAILED = "RequestFailed"
    OUTPUT_DIFFERS = "OutputDiffers"
    VERSION_MISMATCH = "VersionMismatch"
    CANARY_FAILED = "CanaryFailed"
    CANARY_FORBIDDEN = "CanaryForbidden"
    NOT_SUBMITTING = "NotSubmitting"
    SERVER_DOWN = "ServerDown"
    PEERS_MISSING = "PeersMissing"
    VERIFICATION_FAILED = "VerificationFailed"
    UPDATED = "Updated"
    ROLLING_OUT = "RollingOut"
    NO_CAPACITY_FOR_PAIR = "NoCapacityForPair"
    WEIGHTS_NOT_ENFORCEABLE = "WeightsNotEnforceable"
    PAUSED = "Paused"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    AS_EXPECTED = "AsExpected"
    RENDERER_CHANGED = "RendererChanged"


_ROLES = (Type.PREFILL_READY, Type.DECODE_READY, Type.ROUTER_READY)
_VERIFIED = (Type.HANDOFF_VERIFIED, Type.OFFLOAD_VERIFIED)
_HANDOFF = (Type.HANDOFF_VERIFIED, Type.READY)

REASONS: Mapping[Reason, ReasonDoc] = {
    Reason.ACCEPTED: ReasonDoc((Type.ACCEPTED,), "The spec was accepted."),
    Reason.UNSUPPORTED_VERSION: ReasonDoc(
        (Type.ACCEPTED,), "A version cannot do what the spec asks.", "Use a version that the message names."
    ),
    Reason.INCOMPATIBLE_PAIR: ReasonDoc(
        (Type.ACCEPTED,),
        "Prefill, decode, router and cache at these versions and settings cannot hand a request over.",
        "Change the field that the message names to what it says is accepted.",
    ),
    Reason.STATE_NOT_TRANSFERABLE: ReasonDoc(
        (Type.ACCEPTED,),
        "The model keeps a state for each request that would not be on decode after the handoff; the message names it.",
        "Use what the message says is accepted: a version that carries it, or another model.",
    ),
    Reason.UNSAFE_FAILURE_POLICY: ReasonDoc(
        (Type.ACCEPTED,), "handoff.onFailure Fail would end decode engines at these versions.", "Use handoff.onFailure: Recompute."
    ),
    Reason.IMAGE_REQUIRED: ReasonDoc(
        (Type.ACCEPTED,),
        "No image is known for a component.",
        "Set the field that the message names, or add it to the install's image table.",
    ),
    Reason.MISSING_REFERENCE: ReasonDoc(
        (Type.ACCEPTED,),
        "A Secret, ConfigMap or PersistentVolumeClaim that the spec names does not exist.",
        "Create it; the operator looks again by itself.",
    ),
    Reason.NAME_CONFLICT: ReasonDoc(
        (Type.ACCEPTED,),
        "An object with a name that we need exists and is not ours.",
        "Remove or rename that object, or rename the PDDeployment.",
    ),
    Reason.MANAGED_BY_OTHER: ReasonDoc(
        (Type.ACCEPTED,), "Another install of pd-operator owns this object.", "Let one install watch this namespace."
    ),
    Reason.MISSING_KIND: ReasonDoc(
        (Type.ACCEPTED,),
        "The spec needs a kind of somebody else's CRD that this cluster does not have.",
        "Install what the message names, or leave the field out; the operator looks again by itself.",
    ),
    Reason.NOT_IMPLEMENTED: ReasonDoc(
        (Type.ACCEPTED,), "The field is part of the API, its feature is not built yet.", "Remove the field that the message names."
    ),
    Reason.INVALID_SPEC: ReasonDoc(
        (Type.ACCEPTED,), "The spec contains something that the schema cannot refuse.", "Change the field that the message names."
    ),
    Reason.BOUND: ReasonDoc((Type.PLACED,), "Every engine pod has a node."),
    Reason.NO_CAPACITY: ReasonDoc(
        (Type.PLACED,),
        "The scheduler finds no node for an engine pod, or no transfer domain holds a prefill and a decode replica.",
        "Free or add the resources that the message names; the operator looks again by itself.",
    ),
    Reason.NO_DOMAIN_LABEL: ReasonDoc(
        (Type.PLACED,),
        "No node that the pods may use has the label placement.transferDomain.topologyKey.",
        "Label the nodes, or name a label that they have.",
    ),
    Reason.WAITING_FOR_NODES: ReasonDoc((Type.PLACED,), "Nothing fits yet, and a node is being made."),
    Reason.GATED: ReasonDoc((Type.PLACED,), "A scheduling gate (a queue, for instance) holds an engine pod."),
    Reason.WEDGED: ReasonDoc(
        (Type.PLACED,),
        "Part of a slice had a node and the rest found none for placement.schedulingTimeout: its transfer domain is left alone for "
        "a while.",
        "Free or add the resources that the message names, or wait: another domain is tried by itself.",
    ),
    Reason.CAPACITY_UNOBSERVED: ReasonDoc(
        (Type.PLACED,),
        "Engine pods have no node yet, and what nodes have free cannot be seen: the scheduler chooses the transfer domain.",
    ),
    Reason.PAIRING_NOT_ENFORCED: ReasonDoc(
        (Type.DEGRADED,),
        "Pods of one slice are in different transfer domains: the label of a node changed under them.",
        "Restore the label, or set a new rollout.restartID to place everything anew.",
    ),
    Reason.ROUTE_REFUSED: ReasonDoc(
        (Type.DEGRADED,),
        "A gateway's controller does not take the HTTPRoute, or cannot resolve it; Ready, which is about the slices, stays.",
        "Change what the message names, often the Gateway's listeners: their allowedRoutes and hostnames.",
    ),
    Reason.UNEVEN_TRAFFIC: ReasonDoc(
        (Type.DEGRADED,),
        "A slice gets another share of the requests than its weight in the HTTPRoute, or than its capacity behind a plain Service.",
        "Look at the gateway; behind a plain Service set spec.gateway, or let clients open more connections.",
    ),
    Reason.PAIR_LOST: ReasonDoc(
        (Type.DEGRADED,),
        "A serving slice has no ready prefill, or no ready decode, for longer than a replacement takes: requests are refused.",
        "Look at the condition that the message names, PrefillReady or DecodeReady.",
    ),
    Reason.BROKEN_PATH: ReasonDoc(
        (Type.DEGRADED,),
        "Handoffs wait on decode longer than the lease and nothing runs there, or an engine answers each request with an error.",
        "Read the engine's log with the command in the message; queued work is not demand here, so nothing is scaled for it.",
    ),
    Reason.LEASE_EXPIRED: ReasonDoc(
        (Type.DEGRADED,),
        "Prefill freed prompts before decode had taken them, again and again; what is read after that may give a wrong answer.",
        "More decode replicas, or a longer handoff.leaseDuration.",
    ),
    Reason.REPLICA_NOT_TRANSFERRING: ReasonDoc(
        (Type.DEGRADED,),
        "Transfers to one decode replica fail, or it receives nothing while others of its slice do.",
        "Read its log with the command in the message; a new pod in its place gets a new connection.",
    ),
    Reason.CACHE_DOWN: ReasonDoc(
        (Type.DEGRADED,),
        "The LMCache server beside an engine does not answer, and the engine serves without it; or the coordinator of P2P is gone.",
        "Read its log with the command in the message.",
    ),
    Reason.READY: ReasonDoc((*_ROLES, Type.READY), "Everything that the condition covers works."),
    Reason.STARTING: ReasonDoc((*_ROLES, Type.PLACED), "Pods are starting."),
    Reason.UNSCHEDULABLE: ReasonDoc(
        _ROLES, "The scheduler finds no node for a pod.", "Free or add the resources that the message names."
    ),
    Reason.IMAGE_ERROR: ReasonDoc(
        _ROLES, "An image cannot be pulled.", "Correct the image, or give the namespace's pods the right to pull it."
    ),
    Reason.CRASH_LOOP: ReasonDoc(_ROLES, "A container ends again and again.", "Read its log with the command in the message."),
    Reason.CONFIG_ERROR: ReasonDoc(
        _ROLES,
        "The kubelet cannot make a container from the pod's spec.",
        "Correct what the message names, often a key of a Secret.",
    ),
    Reason.PODS_REFUSED: ReasonDoc(
        _ROLES,
        "The API server refuses to create pods: a quota, Pod Security, or another admission rule.",
        "Change what the message names: the quota, the namespace's Pod Security level, or the role's template.",
    ),
    Reason.WRITE_REFUSED: ReasonDoc(
        (Type.ACCEPTED,),
        "The API server refuses an object that the operator makes from this spec.",
        "Change what the message names, often a field of a template; the operator tries again by itself.",
    ),
    Reason.NOT_DISCOVERED: ReasonDoc(
        (Type.ROUTER_READY,),
        "The router runs, and sees no healthy prefill or no healthy decode.",
        "Look at the engines first, then at the router's log.",
    ),
    Reason.SUSPENDED: ReasonDoc((*_ROLES, Type.READY, Type.PLACED, Type.PROGRESSING), "spec.suspend is true: both pools are at 0."),
    Reason.NOT_YET_RUN: ReasonDoc(
        (*_VERIFIED, Type.READY),
        "No evidence has been taken yet: the slice is not complete, its canary runs, or spec.verification is Disabled.",
    ),
    Reason.VERIFIED: ReasonDoc(_VERIFIED, "Counters moved as they do when it works; the message says which and when."),
    Reason.NO_TRANSFER: ReasonDoc(
        _HANDOFF,
        "Requests were answered, and no state came from prefill to decode.",
        "Look at the connector of both engines and at the network between their pods; then run the canary again.",
    ),
    Reason.TRANSFER_FAILED: ReasonDoc(
        _HANDOFF,
        "Decode tried to fetch the state from prefill and failed.",
        "Look at decode's log for NIXL: side channel address, network policy, UCX devices.",
    ),
    Reason.SILENT_FALLBACK: ReasonDoc(
        (*_HANDOFF, Type.DEGRADED),
        "Every answer was 200, and decode had computed the prompts itself: prefill works for nothing.",
        "Look at what the message names: the router's view of prefill's pods, or the connector.",
    ),
    Reason.REQUEST_FAILED: ReasonDoc(
        _HANDOFF,
        "A request through the slice's own Service was not answered with 200.",
        "Read the answer in the message, then the engines' logs.",
    ),
    Reason.OUTPUT_DIFFERS: ReasonDoc(
        _HANDOFF,
        "The pair's answers at temperature 0 are not those of one engine alone: what arrives is not what was sent.",
        "Use a combination of versions that docs/reference/compatibility.md calls tested.",
    ),
    Reason.VERSION_MISMATCH: ReasonDoc(
        _HANDOFF, "The engines of one slice run different versions.", "Give prefill and decode one image; look for a moved tag."
    ),
    Reason.CANARY_FAILED: ReasonDoc(
        _HANDOFF,
        "The canary could not do its work: its pod does not start, it did not reach something, or it left no evidence.",
        "Do what the message says, or read the log of the Job that it names.",
    ),
    Reason.CANARY_FORBIDDEN: ReasonDoc(
        _HANDOFF,
        "The canary's Job or its pod is refused: a quota, Pod Security, or a webhook.",
        "Allow one Job and its small pod, or set spec.verification: Advisory or Disabled.",
    ),
    Reason.NOT_SUBMITTING: ReasonDoc(
        (Type.OFFLOAD_VERIFIED, Type.READY, Type.DEGRADED),
        "Prefill computed prompts and its LMCache server did not store them.",
        "Look at prefill's log for LMCache, and at the server's.",
    ),
    Reason.SERVER_DOWN: ReasonDoc(
        (Type.OFFLOAD_VERIFIED, Type.READY), "An LMCache server does not answer.", "Look at the container lmcache of the pod."
    ),
    Reason.PEERS_MISSING: ReasonDoc(
        (Type.OFFLOAD_VERIFIED, Type.READY),
        "With lmcache.p2p the LMCache servers of a slice do not see each other: what one stored, the others compute again.",
        "Look at the pod of the slice's coordinator, and at the way from the servers to it and to each other.",
    ),
    Reason.VERIFICATION_FAILED: ReasonDoc(
        (Type.PROGRESSING,),
        "The canary of a slice failed three times; the slice stays dark, and what served before serves on.",
        "See HandoffVerified and OffloadVerified; it is tried again by itself, or when its Job is deleted.",
    ),
    Reason.UPDATED: ReasonDoc((Type.PROGRESSING,), "The current revision serves."),
    Reason.ROLLING_OUT: ReasonDoc((Type.PROGRESSING,), "A new revision, or a change of a role's pods, is on its way."),
    Reason.NO_CAPACITY_FOR_PAIR: ReasonDoc(
        (Type.PROGRESSING,),
        "The new revision does not fit beside the old one.",
        "Add the resources that the message names; otherwise the old slice goes first.",
    ),
    Reason.PAUSED: ReasonDoc(
        (Type.PROGRESSING,),
        "spec.rollout.paused is true and a change waits: nothing new is begun and nothing that serves ends; pools scale as ever.",
        "Set rollout.paused to false when the change may go on.",
    ),
    Reason.DEADLINE_EXCEEDED: ReasonDoc(
        (Type.PROGRESSING, Type.STALLED),
        "A Deployment of the new slice made no progress for rollout.progressDeadlineSeconds; the message has the cause.",
        "Mend what the message names: it goes on by itself. Or set the spec back: what served before serves.",
    ),
    Reason.WEIGHTS_NOT_ENFORCEABLE: ReasonDoc(
        (Type.PROGRESSING,),
        "A further slice is ready and stays dark: a plain Service gives every slice the same share of the requests, and this one "
        "is so small that all together would serve less with it than without it.",
        "Set spec.gateway, which weights slices by capacity, or choose replicas that divide evenly over the domains.",
    ),
    Reason.AS_EXPECTED: ReasonDoc((Type.DEGRADED, Type.UPDATE_AVAILABLE, Type.RECONCILING, Type.STALLED), "Nothing to report."),
    Reason.RENDERER_CHANGED: ReasonDoc(
        (Type.UPDATE_AVAILABLE,),
        "This version of the operator would render the pods differently.",
        "Set a new rollout.restartID when it suits you.",
    ),
}


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition; `message` says what to do when that is not plain."""

    type: Type | PoolType
    status: Status
    reason: str
    message: str = ""


def merge(
    previous: Iterable[Mapping[str, Any]], wanted: Iterable[Condition], generation: int, now: datetime
) -> list[dict[str, Any]]:
    """Conditions for status, sorted by type; the transition time moves only when the status does."""
    before = {str(c.get("type")): c for c in previous}
    merged = []
    for condition in wanted:
        old = before.get(condition.type.value, {})
        same = old.get("status") == condition.status and old.get("lastTransitionTime")
        merged.append(
            {
                "type": condition.type.value,
                "status": condition.status,
                "reason": str(condition.reason),
                "message": condition.message[:MAX_MESSAGE],
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if same else now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
        )
    return sorted(merged, key=lambda c: str(c["type"]))
