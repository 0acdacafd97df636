"""A real API server accepts what the chart renders, and RBAC then means what the chart says."""

from __future__ import annotations

import subprocess

import pytest
import yaml

import generated
from cluster.handle import Cluster, KubectlError
from cluster.tools import module_files, tool

CHART = generated.ROOT / "charts" / "pd-operator"


def render(namespace: str, profile: str, *, crds: bool, on: tuple[str, ...] = ()) -> str:
    argv = [
        str(tool("helm")),
        "template",
        namespace,
        str(CHART),
        "--namespace",
        namespace,
        "--values",
        str(CHART / "profiles" / f"{profile}.yaml"),
    ]
    argv += ["--set", "image.repository=localhost/pd-operator", "--set", f"crds.install={str(crds).lower()}"]
    argv += [f"--set={part}.enabled=true" for part in on]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def account_of(manifests: str) -> str:
    """Name of the operator's ServiceAccount."""
    return next(str(d["metadata"]["name"]) for d in yaml.safe_load_all(manifests) if d and d["kind"] == "ServiceAccount")


def may(cluster: Cluster, user: str, verb: str, group: str, resource: str, where: str) -> bool:
    """What the API server's authorizer says."""
    name, _, subresource = resource.partition("/")
    attributes = {"verb": verb, "group": group, "resource": name, "subresource": subresource, "namespace": where}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "resourceAttributes": attributes},
    }
    answer = yaml.safe_load(cluster.kubectl("create", "-f", "-", "-o", "yaml", stdin=yaml.safe_dump(review)))
    return bool(answer["status"]["allowed"])


@pytest.mark.parametrize("profile", ["cluster-wide", "namespaced"])
def test_the_api_server_accepts_the_chart(profile: str, control_plane: Cluster, namespace: str) -> None:
    label = "pod-security.kubernetes.io/enforce=restricted"
    control_plane.kubectl("label", "namespace", namespace, label, "pod-security.kubernetes.io/warn=restricted")
    manifests = render(namespace, profile, crds=True)
    said = control_plane.kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", stdin=manifests, check=False)
    assert "rror" not in said and "Warning" not in said, said


def test_monitors_rules_and_dashboards_are_what_the_prometheus_operator_s_crds_accept(
    control_plane: Cluster, namespace: str
) -> None:
    files = tuple(
        f"example/prometheus-operator-crd/monitoring.coreos.com_{kind}.yaml" for kind in ("podmonitors", "prometheusrules")
    )
    crds = module_files("crds", "github.com/prometheus-operator/prometheus-operator", files)
    names = [yaml.safe_load(file.read_text())["metadata"]["name"] for file in crds]
    control_plane.kubectl("apply", "--server-side", *(f"--filename={file}" for file in crds))
    try:
        control_plane.established(*names)
        parts = ("podMonitor", "servingMonitors", "recordingRules", "alerts", "dashboards")
        manifests = render(namespace, "namespaced", crds=False, on=parts)
        mine = [d for d in yaml.safe_load_all(manifests) if d and d["kind"] in ("PodMonitor", "PrometheusRule", "ConfigMap")]
        assert sorted(d["kind"] for d in mine) == ["ConfigMap"] * 3 + ["PodMonitor"] * 3 + ["PrometheusRule"] * 2
        apply = ("apply", "--server-side", "--validate=strict", "-f", "-")
        said = control_plane.kubectl(*apply, stdin=yaml.safe_dump_all(mine), check=False)
        assert said.count("serverside-applied") == len(mine), said
        wrong = next(d for d in mine if d["kind"] == "PodMonitor")
        wrong["spec"]["podMetricsEndpoints"][0]["relabeling"] = []
        with pytest.raises(KubectlError, match="relabeling"):
            control_plane.kubectl(*apply, stdin=yaml.safe_dump(wrong))
    finally:
        control_plane.kubectl("delete", "crd", *names, "--ignore-not-found")


def test_rights_of_a_namespaced_install_end_at_the_namespace(control_plane: Cluster, namespace: str) -> None:
    manifests = render(namespace, "namespaced", crds=False)
    control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=manifests)
    user = f"system:serviceaccount:{namespace}:{account_of(manifests)}"

    def allowed(verb: str, group: str, resource: str, where: str = namespace) -> bool:
        return may(control_plane, user, verb, group, resource, where)

    for verb, group, resource in (
        ("patch", "apps", "deployments"),
        ("patch", "pdserve.dev", "pddeployments/status"),
        ("patch", "pdserve.dev", "pdpools/scale"),
        ("get", "", "secrets"),
        ("create", "coordination.k8s.io", "leases"),
    ):
        assert allowed(verb, group, resource), f"{verb} {resource}"
    rbac = "rbac.authorization.k8s.io"
    for verb, group, resource in (
        ("patch", "pdserve.dev", "pddeployments"),
        ("update", "pdserve.dev", "pddeployments"),
        ("delete", "pdserve.dev", "pddeployments"),
        ("list", "", "secrets"),
        ("watch", "", "configmaps"),
        ("create", "", "secrets"),
        ("patch", "", "pods"),
        ("delete", "", "pods"),
        ("create", "", "pods/exec"),
        ("create", rbac, "clusterroles"),
        ("escalate", rbac, "roles"),
        ("bind", rbac, "roles"),
        ("list", "", "nodes"),
    ):
        assert not allowed(verb, group, resource), f"{verb} {resource}"
    for verb, group, resource in (("list", "", "pods"), ("get", "", "secrets"), ("list", "pdserve.dev", "pddeployments")):
        assert not allowed(verb, group, resource, "default"), f"{verb} {resource} in another namespace"


def test_the_operator_can_grant_the_routers_role_and_no_more(control_plane: Cluster, namespace: str) -> None:
    """Kubernetes refuses a Role with rights that its maker does not hold."""
    manifests = render(namespace, "namespaced", crds=False)
    control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=manifests)
    who = f"--as=system:serviceaccount:{namespace}:{account_of(manifests)}"

    def role(name: str, resource: str, verbs: list[str]) -> str:
        rules = [{"apiGroups": [""], "resources": [resource], "verbs": verbs}]
        return yaml.safe_dump(
            {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": name}, "rules": rules}
        )

    apply = ("apply", "--server-side", "-n", namespace, "-f", "-", who)
    control_plane.kubectl(*apply, stdin=role("router", "pods", ["list", "watch"]))
    with pytest.raises(KubectlError, match="attempting to grant RBAC permissions not currently held"):
        control_plane.kubectl(*apply, stdin=role("too-much", "secrets", ["list"]))
