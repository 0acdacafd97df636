"""Next steps: what a person does about each reason, as a command to run or a field to change.

One table over all reasons; `{namespace}`, `{name}`, `{pod}` and `{container}` are filled in, and a step that names a pod is left
out where none is at fault. A reason without an entry falls back to its remedy in api/conditions.py; a test asks for one or the
other.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence

from pd_operator.api.conditions import REASONS, Reason

SPEC = "change the field that the message names: kubectl -n {namespace} edit pdd {name}"
EVENTS = "kubectl -n {namespace} get events.events.k8s.io --field-selector regarding.name={pod}"
DESCRIBE = "kubectl -n {namespace} describe pod {pod}"
LOG = "kubectl -n {namespace} logs {pod} -c {container} --tail=50"
ROOM = "what fits where, and what is missing: kubectl -n {namespace} get pdd {name} -o yaml | kubectl pdd plan -n {namespace} -f -"
ENGINES = "kubectl -n {{namespace}} logs -l pdserve.dev/deployment={{name}},pdserve.dev/role={role} -c {container} --tail=50"
PREFILL, DECODE = (ENGINES.format(role=role, container="engine") for role in ("prefill", "decode"))
CACHE = ENGINES.format(role="prefill", container="lmcache")
IMAGES = (
    "kubectl -n {namespace} get pods -l pdserve.dev/deployment={name} "
    "-o custom-columns=POD:.metadata.name,IMAGE:.status.containerStatuses[*].imageID"
)
POLICY = "who may reach the engines: kubectl -n {namespace} get networkpolicies"
EXPLAIN = "kubectl pdd explain {name} -n {namespace}"
NOTHING = "nothing"

STEPS: Mapping[Reason, tuple[str, ...]] = {
    Reason.ACCEPTED: (NOTHING,),
    Reason.BOUND: (NOTHING,),
    Reason.READY: (NOTHING,),
    Reason.UPDATED: (NOTHING,),
    Reason.UNEVEN_TRAFFIC: (
        "behind a plain Service set spec.gateway, or let clients open more connections",
        "what each slice gets: kubectl -n {namespace} get pdd {name} -o jsonpath='{{.status.slices}}'",
    ),
    Reason.PAIR_LOST: ("pods of both roles: kubectl -n {namespace} get pods -l pdserve.dev/deployment={name} -L pdserve.dev/role",),
    Reason.BROKEN_PATH: (DECODE, PREFILL, POLICY),
    Reason.LEASE_EXPIRED: (
        EXPLAIN,
        "more decode replicas, or a longer handoff.leaseDuration: kubectl -n {namespace} edit pdd {name}",
    ),
    Reason.REPLICA_NOT_TRANSFERRING: (
        DECODE,
        "then a new pod in its place: kubectl -n {namespace} delete pod THE-POD-OF-THE-MESSAGE",
    ),
    Reason.CACHE_DOWN: (CACHE, "run the command in the message for the pod that it names"),
    Reason.PAUSED: (
        """to go on: kubectl -n {namespace} patch pdd {name} --type=merge -p '{{"spec": {{"rollout": {{"paused": false}}}}}}'""",
    ),
    Reason.DEADLINE_EXCEEDED: (
        "mend what the message names, or set the spec back: kubectl -n {namespace} edit pdd {name}",
        DESCRIBE,
    ),
    Reason.VERIFIED: (NOTHING,),
    Reason.MISSING_KIND: (
        "which CRDs there are: kubectl get crds",
        "install the one that the message names, or leave the field out",
    ),
    Reason.ROUTE_REFUSED: (
        "what its controller says: kubectl -n {namespace} get httproute {name} -o jsonpath='{{.status.parents}}'",
        "often the Gateway's listeners: their allowedRoutes and hostnames",
    ),
    Reason.NO_TRANSFER: (DECODE, PREFILL, POLICY),
    Reason.TRANSFER_FAILED: (DECODE, POLICY),
    Reason.SILENT_FALLBACK: (
        "what the routers see: kubectl -n {namespace} logs --tail=50 "
        "-l pdserve.dev/deployment={name},app.kubernetes.io/component=router",
        DECODE,
    ),
    Reason.REQUEST_FAILED: (PREFILL, DECODE),
    Reason.OUTPUT_DIFFERS: (SPEC, "use versions that docs/reference/compatibility.md calls tested", IMAGES),
    Reason.VERSION_MISMATCH: (IMAGES, "give both roles one image; look for a tag that moved"),
    Reason.CANARY_FAILED: (
        "what its canary saw: kubectl -n {namespace} logs -l pdserve.dev/deployment={name},app.kubernetes.io/component=canary",
        "why it did not start: kubectl -n {namespace} describe jobs -l "
        "pdserve.dev/deployment={name},app.kubernetes.io/component=canary",
    ),
    Reason.CANARY_FORBIDDEN: (
        "kubectl -n {namespace} describe jobs -l pdserve.dev/deployment={name}",
        "kubectl -n {namespace} get resourcequota,limitrange",
    ),
    Reason.VERIFICATION_FAILED: (
        "what its canary saw: kubectl -n {namespace} logs -l pdserve.dev/deployment={name},app.kubernetes.io/component=canary",
        "to try again now: kubectl -n {namespace} delete jobs -l pdserve.dev/deployment={name},app.kubernetes.io/component=canary",
    ),
    Reason.NOT_SUBMITTING: (PREFILL, CACHE),
    Reason.PEERS_MISSING: (
        "kubectl -n {namespace} describe pods -l pdserve.dev/deployment={name},app.kubernetes.io/component=coordinator",
        CACHE,
        POLICY,
    ),
    Reason.SERVER_DOWN: (CACHE, DESCRIBE),
    Reason.WEIGHTS_NOT_ENFORCEABLE: (
        "set spec.gateway, or replicas that divide evenly over the domains: kubectl -n {namespace} edit pdd {name}",
    ),
    Reason.AS_EXPECTED: (NOTHING,),
    Reason.UNSUPPORTED_VERSION: (SPEC, "the versions that are known: docs/reference/compatibility.md"),
    Reason.INCOMPATIBLE_PAIR: (SPEC, "what goes together: docs/reference/compatibility.md"),
    Reason.STATE_NOT_TRANSFERABLE: (SPEC, "which state which version carries: docs/reference/compatibility.md"),
    Reason.UNSAFE_FAILURE_POLICY: (
        """kubectl -n {namespace} patch pdd {name} --type=merge -p '{{"spec": {{"handoff": {{"onFailure": "Recompute"}}}}}}'""",
    ),
    Reason.IMAGE_REQUIRED: (SPEC, "or add the version to the chart value images of the install"),
    Reason.MISSING_REFERENCE: (
        "create the object that the message names in namespace {namespace}; it is looked at again by itself",
    ),
    Reason.NAME_CONFLICT: (
        "look at the object that the message names; remove or rename it, or make the PDDeployment under another name",
    ),
    Reason.MANAGED_BY_OTHER: (
        "which install has it: kubectl -n {namespace} get pdd {name} -o jsonpath='{{.status.controller}}'",
        "let one install watch namespace {namespace}: chart value watchNamespaces",
    ),
    Reason.NOT_IMPLEMENTED: ("remove the field that the message names: kubectl -n {namespace} edit pdd {name}",),
    Reason.INVALID_SPEC: (SPEC,),
    Reason.NO_CAPACITY: (ROOM, "free what the message names, add nodes, or ask for less"),
    Reason.NO_DOMAIN_LABEL: (
        "the label that the spec names: kubectl -n {namespace} get pdd {name} "
        "-o jsonpath='{{.spec.placement.transferDomain.topologyKey}}'",
        "the labels that nodes have: kubectl get nodes --show-labels",
    ),
    Reason.WAITING_FOR_NODES: ("wait for the node that is being made", "if none comes, its autoscaler says why: " + EVENTS),
    Reason.GATED: (
        "ask the queue that holds it: kubectl -n {namespace} get pods -l pdserve.dev/deployment={name} "
        "-o custom-columns=POD:.metadata.name,GATES:.spec.schedulingGates[*].name",
    ),
    Reason.WEDGED: (ROOM, "or wait: another domain is tried by itself"),
    Reason.CAPACITY_UNOBSERVED: ("wait for the scheduler; where it has chosen: kubectl -n {namespace} get pods -o wide",),
    Reason.PAIRING_NOT_ENFORCED: (
        "put the label back on the nodes that the message names (kubectl label node ...)",
        "or place everything anew: kubectl -n {namespace} patch pdd {name} --type=merge "
        """-p '{{"spec": {{"rollout": {{"restartID": "NEW"}}}}}}'""",
    ),
    Reason.STARTING: (
        "wait, as long as the model should take to load",
        LOG,
        EVENTS,
    ),
    Reason.UNSCHEDULABLE: (DESCRIBE, ROOM),
    Reason.IMAGE_ERROR: (DESCRIBE, "correct the image in the spec, or give namespace {namespace} a pull secret"),
    Reason.CRASH_LOOP: ("kubectl -n {namespace} logs {pod} -c {container} --previous --tail=50", DESCRIBE),
    Reason.CONFIG_ERROR: (DESCRIBE, "create what the message names, often a key of a Secret"),
    Reason.PODS_REFUSED: (
        "kubectl -n {namespace} get resourcequota,limitrange",
        "Pod Security: kubectl get namespace {namespace} --show-labels",
    ),
    Reason.WRITE_REFUSED: (SPEC, "often a template; the operator tries again by itself"),
    Reason.NOT_DISCOVERED: (
        "engines first: a router is ready only with a healthy prefill and a healthy decode",
        "then the router's log: kubectl -n {namespace} logs --tail=50 "
        "-l pdserve.dev/deployment={name},app.kubernetes.io/component=router",
    ),
    Reason.SUSPENDED: (
        """to start it: kubectl -n {namespace} patch pdd {name} --type=merge -p '{{"spec": {{"suspend": false}}}}'""",
    ),
    Reason.NOT_YET_RUN: ("wait for the canary, which starts when prefill, decode and router are ready: docs/verification.md",),
    Reason.ROLLING_OUT: (
        "wait; pods of both revisions: kubectl -n {namespace} get pods -l pdserve.dev/deployment={name} -L pdserve.dev/revision",
    ),
    Reason.NO_CAPACITY_FOR_PAIR: (ROOM, "or let it replace: the old slice goes first after a while"),
    Reason.RENDERER_CHANGED: (
        "when it suits you: kubectl -n {namespace} patch pdd {name} --type=merge "
        """-p '{{"spec": {{"rollout": {{"restartID": "NEW"}}}}}}'""",
    ),
}
UNPROVEN = (
    """to have it proven: kubectl -n {namespace} patch pdd {name} --type=merge -p '{{"spec": {{"verification": "Required"}}}}'""",
)
NOT_SEEN = (
    "does an operator watch it: kubectl get deployments -A -l app.kubernetes.io/name=pd-operator",
    "and what does it say: kubectl -n ITS-NAMESPACE logs deployment/pd-operator --tail=50",
)


def next_steps(reason: str, known: Mapping[str, str]) -> list[str]:
    """What to do about a reason; [] where that is nothing. `known` fills the names in.

    A reason that this version does not know (the operator is newer) has the condition's message and nothing else.
    """
    try:
        found = Reason(reason)
    except ValueError:
        return [f"this kubectl-pdd does not know {reason}, the operator is of another version: go by the message"]
    texts = STEPS.get(found) or tuple(filter(None, [REASONS[found].remedy]))
    return [step for step in fill(texts, known) if step != NOTHING]


def fill(steps: Sequence[str], known: Mapping[str, str]) -> list[str]:
    """Steps with their names filled in; one that names what is not known (a pod, where none is at fault) is left out."""
    return [step.format_map(known) for step in steps if _fields(step) <= known.keys()]


def _fields(step: str) -> set[str]:
    return {field for _, field, _, _ in string.Formatter().parse(step) if field}
