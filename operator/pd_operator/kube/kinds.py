"""The Kubernetes kinds that the operator reads or writes, and where each lives in the API.

A fixed table instead of discovery: no request at start, no cache file on a read-only root filesystem, and one place that
the chart's RBAC rules can be compared with.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """Group, version and plural of one kind."""

    group: str  # "" = core
    version: str
    kind: str
    plural: str
    namespaced: bool = True
    optional: bool = False  # a CRD of somebody else: the API server may not know it, and that is no failure of ours

    @property
    def api_version(self) -> str:
        """`apiVersion` as it stands in a manifest."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """URL path of the collection, or of one object when `name` is given.

        `namespace=None` on a namespaced kind is the collection of all namespaces.

        Raises:
            ValueError: a single namespaced object without a namespace.
        """
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        if self.namespaced and name is not None and not namespace:
            raise ValueError(f"{self.kind} {name!r}: a namespace is required")
        scope = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{root}{scope}/{self.plural}" + (f"/{name}" if name is not None else "")


_RBAC = "rbac.authorization.k8s.io"

KINDS: dict[str, Kind] = {
    kind.kind: kind
    for kind in (
        Kind("pdserve.dev", "v1alpha1", "PDDeployment", "pddeployments"),
        Kind("pdserve.dev", "v1alpha1", "PDPool", "pdpools"),
        Kind("apps", "v1", "Deployment", "deployments"),
        Kind("apps", "v1", "ControllerRevision", "controllerrevisions"),
        Kind("batch", "v1", "Job", "jobs"),
        Kind("", "v1", "Service", "services"),
        Kind("", "v1", "ServiceAccount", "serviceaccounts"),
        Kind(_RBAC, "v1", "Role", "roles"),
        Kind(_RBAC, "v1", "RoleBinding", "rolebindings"),
        Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets"),
        Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies"),
        Kind("leaderworkerset.x-k8s.io", "v1", "LeaderWorkerSet", "leaderworkersets", optional=True),
        Kind("gateway.networking.k8s.io", "v1", "HTTPRoute", "httproutes", optional=True),
        Kind(
            "autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers", optional=True
        ),  # an install may not read it
        Kind("", "v1", "Pod", "pods"),
        Kind("events.k8s.io", "v1", "Event", "events"),
        Kind("coordination.k8s.io", "v1", "Lease", "leases"),
        Kind("", "v1", "Secret", "secrets"),
        Kind("", "v1", "ConfigMap", "configmaps"),
        Kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
        Kind("", "v1", "Node", "nodes", namespaced=False),
        Kind("", "v1", "Namespace", "namespaces", namespaced=False),
        Kind("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False),
    )
}
