"""Names, labels and annotations of everything that we make. One place, so that no two modules disagree."""

from __future__ import annotations

from typing import Final, Literal

Role = Literal["prefill", "decode"]
ROLES: Final[tuple[Role, Role]] = ("prefill", "decode")

MANAGER: Final = "pd-operator"
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
COMPONENT: Final = "app.kubernetes.io/component"
DEPLOYMENT: Final = "pdserve.dev/deployment"
SLICE: Final = "pdserve.dev/slice"
REVISION: Final = "pdserve.dev/revision"
ROLE: Final = "pdserve.dev/role"  # of the pods that serve: one for each replica
WORKER: Final = "pdserve.dev/worker"  # the role, on the other pods of a group: no router, scale or budget of replicas selects them
FRONT: Final = "pdserve.dev/front"
CANARY: Final = "pdserve.dev/canary"  # number of a slice's canary Job
ABOUT: Final = "pdserve.dev/about"  # hash of what the canary is about: core/verification.py
APPLIED_HASH: Final = "pdserve.dev/applied-hash"
MODEL: Final = "pdserve.dev/model"  # annotation of engine pods that ask for a key: the model's name, for a router that has none
SITE: Final = "pdserve.dev/site"  # annotation of a slice's engine workloads: core/sites.py
LLMD_ROLE: Final = "llm-d.ai/role"  # so that the llm-d router's discovery works on our pods as they are
DEPLOYMENT_KIND: Final = "Deployment"
GROUP_KIND: Final = "LeaderWorkerSet"  # leaderworkerset.x-k8s.io: a replica is a leader pod and its workers
COORDINATOR: Final = "coordinator"  # component of a slice's LMCache coordinator, with P2P
REVISION_COMPONENT: Final = "revision"  # component of our ControllerRevisions
WORKLOADS: Final = (DEPLOYMENT_KIND, GROUP_KIND)
MANAGED_SELECTOR: Final = f"{MANAGED_BY}={MANAGER}"


def base_labels(deployment: str, component: str) -> dict[str, str]:
    """Labels of every child."""
    return {MANAGED_BY: MANAGER, COMPONENT: component, DEPLOYMENT: deployment}


def slice_labels(deployment: str, component: str, slice_name: str, revision: str) -> dict[str, str]:
    """Labels of the children of a slice."""
    return {**base_labels(deployment, component), SLICE: slice_name, REVISION: revision}


def slice_name(deployment: str, revision: str, index: int = 0) -> str:
    """`chat`, `1a2b3c4d` -> `chat-1a2b3c4d-0`: 30 + 9 characters and the number."""
    return f"{deployment}-{revision}-{index}"


def slice_number(slice_: str) -> int:
    """`chat-1a2b3c4d-7` -> 7; -1 for what is no name of a slice."""
    number = slice_.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def workload(slice_: str, role: str) -> str:
    """Workload of a role (or `router`, `coordinator`) of a slice: a Deployment, or a LeaderWorkerSet of the same name."""
    return f"{slice_}-{role}"


def pool(deployment: str, role: Role) -> str:
    """PDPool of a role: a stable name, for HPA and KEDA."""
    return f"{deployment}-{role}"


def service_account(deployment: str, component: Literal["engine", "router", "canary"]) -> str:
    """ServiceAccount of engines, routers or canaries."""
    return f"{deployment}-{component}"


def canary(slice_: str, number: int) -> str:
    """Job of a slice's canary: 42 + 8 characters and the number, and its pod's name is a label value (63)."""
    return f"{slice_}-canary-{number}"


def controller_revision(deployment: str, revision: str, pods: str) -> str:
    """ControllerRevision of one pairing revision and one shape of the pods."""
    return f"{deployment}-{revision}-{pods}"
