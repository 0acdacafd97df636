"""The chart, rendered by the real helm: rights, security, settings, CRDs, and what the values schema refuses."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import generated
from cluster.tools import tool
from pd_operator import settings as operator_settings
from pd_operator.kube.kinds import KINDS
from pd_operator.upstream import signals_labels as labels

CHART = generated.ROOT / "charts" / "pd-operator"
PROFILES = CHART / "profiles"
IMAGE = {"image": {"repository": "localhost/pd-operator", "tag": "dev"}}
Manifest = dict[str, Any]
CLUSTER_WIDE = {"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"}
CHILD = frozenset({"get", "list", "watch", "create", "patch", "delete"})

# What the operator may do in a namespace that it watches. A change here is a change of what an administrator grants: say why.
RIGHTS: Mapping[tuple[str, str], frozenset[str]] = {
    ("pdserve.dev", "pddeployments"): frozenset({"get", "list", "watch"}),
    ("pdserve.dev", "pddeployments/status"): frozenset({"patch"}),
    ("pdserve.dev", "pddeployments/finalizers"): frozenset({"update"}),
    ("pdserve.dev", "pdpools"): CHILD - {"delete"},
    ("pdserve.dev", "pdpools/status"): frozenset({"patch"}),
    ("pdserve.dev", "pdpools/scale"): frozenset({"patch"}),
    ("apps", "deployments"): CHILD,
    ("apps", "controllerrevisions"): CHILD,
    ("batch", "jobs"): frozenset({"list", "watch", "create", "delete"}),  # the canary: created once, never changed
    ("", "services"): CHILD,
    ("", "serviceaccounts"): CHILD,
    ("rbac.authorization.k8s.io", "roles"): CHILD,
    ("rbac.authorization.k8s.io", "rolebindings"): CHILD,
    ("policy", "poddisruptionbudgets"): CHILD,
    ("networking.k8s.io", "networkpolicies"): CHILD,
    ("leaderworkerset.x-k8s.io", "leaderworkersets"): CHILD,  # spec.*.nodes
    ("gateway.networking.k8s.io", "httproutes"): CHILD,  # spec.gateway
    ("autoscaling", "horizontalpodautoscalers"): frozenset({"list", "watch"}),  # two writers of one number are named
    ("", "pods"): frozenset({"list", "watch"}),
    ("", "secrets"): frozenset({"get"}),
    ("", "configmaps"): frozenset({"get"}),
    ("", "persistentvolumeclaims"): frozenset({"get"}),
    ("events.k8s.io", "events"): frozenset({"create", "patch"}),
}


def helm(*arguments: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    argv = [str(tool("helm")), *arguments, *(["--values", "-"] if values is not None else [])]
    return subprocess.run(argv, input=yaml.safe_dump(values), capture_output=True, text=True, timeout=60)


def render(values: Mapping[str, Any] | None = None, *arguments: str, namespace: str = "pds") -> list[Manifest]:
    """`helm template` with an image and these values."""
    given = {**IMAGE, **(values or {})}
    done = helm("template", "pd-operator", str(CHART), "--namespace", namespace, *arguments, values=given)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def one(manifests: list[Manifest], kind: str, name: str = "pd-operator") -> Manifest:
    (found,) = [manifest for manifest in of(manifests, kind) if manifest["metadata"]["name"] == name]
    return found


def rights(rules: list[Mapping[str, Any]]) -> dict[tuple[str, str], frozenset[str]]:
    found: dict[tuple[str, str], frozenset[str]] = {}
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                assert (group, resource) not in found, f"{resource} stands twice"
                found[group, resource] = frozenset(rule["verbs"])
    return found


def profile(name: str) -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = yaml.safe_load((PROFILES / f"{name}.yaml").read_text())
    return loaded


@pytest.mark.parametrize("name", ["", "cluster-wide", "namespaced"])
def test_lint(name: str) -> None:
    arguments = ["--values", str(PROFILES / f"{name}.yaml")] if name else []
    done = helm("lint", "--strict", str(CHART), *arguments, values=IMAGE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_cluster_wide_is_the_default() -> None:
    assert render() == render(profile("cluster-wide"))


def test_rights_of_a_cluster_wide_install() -> None:
    manifests = render()
    assert rights(one(manifests, "ClusterRole")["rules"]) == {**RIGHTS, ("", "nodes"): frozenset({"list", "watch"})}
    binding = one(manifests, "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == "pd-operator"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "pd-operator", "namespace": "pds"}]


@pytest.mark.parametrize(("given", "watched"), [([], ["pds"]), (["team-a", "team-b"], ["team-a", "team-b"])])
def test_a_namespaced_install_makes_nothing_cluster_wide(given: list[str], watched: list[str]) -> None:
    manifests = render({**profile("namespaced"), "watchNamespaces": given})
    assert not {manifest["kind"] for manifest in manifests} & CLUSTER_WIDE
    roles = [role for role in of(manifests, "Role") if role["metadata"]["name"] == "pd-operator"]
    assert [role["metadata"]["namespace"] for role in roles] == watched
    assert all(rights(role["rules"]) == RIGHTS for role in roles)
    bindings = [b for b in of(manifests, "RoleBinding") if b["metadata"]["name"] == "pd-operator"]
    assert [binding["metadata"]["namespace"] for binding in bindings] == watched
    assert all(binding["subjects"][0]["namespace"] == "pds" for binding in bindings)


def test_no_right_is_a_wildcard_and_no_spec_of_a_user_is_writable() -> None:
    for manifest in of(render(), "ClusterRole") + of(render(), "Role"):
        assert "*" not in json.dumps(manifest["rules"])
    assert not RIGHTS["pdserve.dev", "pddeployments"] & {"create", "update", "patch", "delete"}


def test_rights_are_about_the_kinds_that_the_client_knows() -> None:
    known = {(kind.group, kind.plural) for kind in KINDS.values()}
    granted = {(group, resource.split("/")[0]) for group, resource in RIGHTS}
    assert granted <= known
    # Read never, or by a Role of its own (leases), or only by a cluster-wide install (nodes).
    unused = {"nodes", "namespaces", "customresourcedefinitions", "leases"}
    assert {plural for _, plural in known - granted} <= unused


def test_the_lease_is_one_by_name() -> None:
    manifests = render()
    rules = one(manifests, "Role", "pd-operator-lease")["rules"]
    assert [rule["verbs"] for rule in rules] == [["create"], ["get", "update"]]
    assert rules[1]["resourceNames"] == [settings_of(manifests)["leaseName"]]
    assert one(manifests, "Role", "pd-operator-lease")["metadata"]["namespace"] == "pds"


def settings_of(manifests: list[Manifest]) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(one(manifests, "ConfigMap")["data"]["settings.yaml"])
    return loaded


@pytest.mark.parametrize("name", ["cluster-wide", "namespaced"])
def test_the_operator_accepts_its_settings(name: str, tmp_path: Path) -> None:
    manifests = render(profile(name))
    file = tmp_path / "settings.yaml"
    file.write_text(one(manifests, "ConfigMap")["data"]["settings.yaml"])
    container = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    env = {var["name"]: var.get("value", "from-the-pod") for var in container["env"]}
    assert env["PD_CONFIG"] == "/etc/pd-operator/settings.yaml"
    loaded = operator_settings.load({**env, "PD_CONFIG": str(file)})
    assert loaded.namespaces == ((None,) if name == "cluster-wide" else ("pds",))
    assert loaded.http_port == container["ports"][0]["containerPort"] == 8081
    assert loaded.image("vllm", "0.32.0") == "vllm/vllm-openai:v0.32.0"
    assert loaded.image("smg", "1.13.0") == "lightseekorg/smg:1.13.0"
    assert loaded.image("vllm-router", "0.1.17") == "vllm/vllm-router:v0.1.17"
    assert loaded.image("lmcache", "0.5.5") == "", "the engine's image"
    assert loaded.namespace == loaded.identity == "from-the-pod"
    assert loaded.log_level == "INFO"


def test_values_reach_the_settings() -> None:
    values = {
        "images": {
            "engine": {"vllm": "here/vllm:1"},
            "router": {"smg": ""},
            "lmcache": "here/lmcache:{version}",
            "pullPolicy": "Never",
        },
        "monitoring": {"namespace": "prometheus"},
        "log": {"level": "debug"},
        "fullnameOverride": "serving",
        "budgets": [{"name": "prod", "namespaces": ["a", "b"], "maxGPUs": 64}],
    }
    manifests = render(values)
    settings = yaml.safe_load(one(manifests, "ConfigMap", "serving")["data"]["settings.yaml"])
    assert settings["images"]["vllm"] == "here/vllm:1"
    assert settings["images"]["lmcache"] == "here/lmcache:{version}"
    assert "smg" not in settings["images"], "an empty value takes an entry away"
    assert settings["pullPolicy"] == "Never"
    assert settings["monitoringNamespace"] == "prometheus"
    assert settings["leaseName"] == "serving"
    assert settings["logLevel"] == "DEBUG"
    assert settings["install"] == "pds.serving"
    (budget,) = operator_settings.Settings.model_validate(settings).budgets
    assert (budget.name, budget.namespaces, budget.max_gpus) == ("prod", ("a", "b"), 64)


def test_a_change_of_settings_rolls_the_operator() -> None:
    def checksum(values: Mapping[str, Any]) -> str:
        annotations = one(render(values), "Deployment")["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/settings"])

    assert checksum({}) == checksum({"replicas": 2})
    assert checksum({}) != checksum({"log": {"level": "debug"}})


def test_the_pod_passes_restricted_pod_security() -> None:
    pod = one(render(), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/etc/pd-operator", "/tmp"}
    assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert container["livenessProbe"]["httpGet"] == container["startupProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}


def test_the_policies_of_the_operator_let_this_pod_in() -> None:
    """render/network.py opens LMCache's HTTP port to pods of this name in the namespace, whatever the release is called."""
    for override in ("", "other"):
        template = of(render({"fullnameOverride": override}), "Deployment")[0]["spec"]["template"]
        assert template["metadata"]["labels"]["app.kubernetes.io/name"] == "pd-operator"


def test_the_chart_has_the_crds_of_the_checkout() -> None:
    rendered = {manifest["metadata"]["name"]: manifest for manifest in of(render(), "CustomResourceDefinition")}
    for file in (generated.ROOT / "crds").glob("*.yaml"):
        manifest = copy.deepcopy(rendered.pop(yaml.safe_load(file.read_text())["metadata"]["name"]))
        assert manifest["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert manifest == yaml.safe_load(file.read_text())
    assert rendered == {}
    assert of(render({"crds": {"install": False}}), "CustomResourceDefinition") == []


def test_optional_parts() -> None:
    assert {manifest["kind"] for manifest in render()}.isdisjoint({"PodDisruptionBudget", "PodMonitor"})
    assert one(render({"replicas": 2}), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    monitor = one(render({"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}), "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "http", "path": "/metrics", "honorLabels": True, "interval": "30s"}]
    assert of(render({"networkPolicy": {"enabled": False}}), "NetworkPolicy") == []
    closed = one(render({"networkPolicy": {"from": [{"namespaceSelector": {}}]}}), "NetworkPolicy")
    assert closed["spec"]["ingress"] == [{"ports": [{"port": "http", "protocol": "TCP"}], "from": [{"namespaceSelector": {}}]}]
    assert closed["spec"]["policyTypes"] == ["Ingress"]


def test_monitors_of_what_serves_carry_the_labels_of_the_contract() -> None:
    on = {"servingMonitors": {"enabled": True, "labels": {"release": "prometheus"}}}
    assert of(render(), "PodMonitor") == []
    found = {m["metadata"]["name"]: m for m in of(render(on), "PodMonitor")}
    assert set(found) == {"pd-operator-engine", "pd-operator-router"}
    ports = {name: [e["port"] for e in m["spec"]["podMetricsEndpoints"]] for name, m in found.items()}
    assert ports == {"pd-operator-engine": ["http", "lmc-http"], "pd-operator-router": ["metrics"]}
    for monitor in found.values():
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        assert monitor["spec"]["namespaceSelector"] == {"any": True}
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            copied = {r["targetLabel"]: r["sourceLabels"] for r in endpoint["relabelings"]}
            wanted = {labels.sanitized(n): [f"__meta_kubernetes_pod_label_{labels.sanitized(n)}"] for n in labels.POD_TARGET_LABELS}
            assert copied == wanted and set(labels.GROUP) == {labels.NAMESPACE, *copied}
            assert (endpoint["honorLabels"], endpoint["interval"]) == (False, "15s")
    scoped = render({**on, "scope": "namespaced", "watchNamespaces": ["a", "b"]})
    assert all(m["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]} for m in of(scoped, "PodMonitor"))


def test_alerts_are_about_this_install() -> None:
    on = {"alerts": {"enabled": True, "labels": {"a": "b"}, "runbookURL": "https://docs.example.org/runbooks/"}}
    rule = one(render(on, namespace="elsewhere"), "PrometheusRule", "pd-operator-alerts")
    assert rule["metadata"]["labels"]["a"] == "b"
    alerts = {r["alert"]: r for r in rule["spec"]["groups"][0]["rules"]}
    assert alerts["PDOperatorDown"]["expr"] == 'absent(pd_operator_leader{namespace="elsewhere"} == 1)'
    assert alerts["PDOperatorDown"]["labels"]["namespace"] == "elsewhere"
    assert alerts["PDQueueTooLong"]["annotations"]["runbook_url"] == "https://docs.example.org/runbooks/PDQueueTooLong.md"
    plain = yaml.safe_load((CHART / "files/rules/alerts.yaml").read_text())["groups"][0]["rules"]
    assert set(alerts) == {r["alert"] for r in plain}


def test_dashboards_reach_the_sidecar() -> None:
    found = of(render({"dashboards": {"enabled": True}}), "ConfigMap")
    by_name = {m["metadata"]["name"]: m for m in found if "dashboard" in m["metadata"]["name"]}
    assert set(by_name) == {"pd-operator-dashboard-fleet", "pd-operator-dashboard-deployment"}
    for name, manifest in by_name.items():
        assert manifest["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((file, text),) = manifest["data"].items()
        assert file == f"pd-operator-{name.rpartition('-')[2]}.json"
        assert json.loads(text)["uid"] == file.removesuffix(".json")


def test_aggregated_roles_give_what_people_need_and_no_more() -> None:
    manifests = render()
    view, edit = one(manifests, "ClusterRole", "pd-operator-view"), one(manifests, "ClusterRole", "pd-operator-edit")
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert "pddeployments/status" not in json.dumps(edit["rules"])
    assert "pdpools" not in [resource for rule in edit["rules"] for resource in rule["resources"]], "the operator makes them"
    off = render({"rbac": {"aggregateToDefaultRoles": False}})
    assert [role["metadata"]["name"] for role in of(off, "ClusterRole")] == ["pd-operator"]


def test_pod_settings_reach_the_pod() -> None:
    values = {
        "image": {"repository": "example/pd-operator", "digest": "sha256:" + "0" * 64},
        "imagePullSecrets": [{"name": "pull"}],
        "podLabels": {"a": "b"},
        "podAnnotations": {"c": "d"},
        "nodeSelector": {"e": "f"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "priorityClassName": "system-cluster-critical",
        "serviceAccount": {"annotations": {"g": "h"}},
    }
    manifests = render(values)
    template = one(manifests, "Deployment")["spec"]["template"]
    pod = template["spec"]
    assert pod["containers"][0]["image"] == "example/pd-operator@sha256:" + "0" * 64
    assert template["metadata"]["labels"]["a"] == "b" and template["metadata"]["annotations"]["c"] == "d"
    for key in ("imagePullSecrets", "nodeSelector", "tolerations", "affinity", "topologySpreadConstraints", "priorityClassName"):
        assert pod[key] == values[key]
    assert one(manifests, "ServiceAccount")["metadata"]["annotations"] == {"g": "h"}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replica": 2}, "replica"),
        ({"image": {"repo": "x"}}, "repo"),
        ({"image": {"repository": "x", "digest": "sha256:abc"}}, "digest"),
        ({"scope": "global"}, "scope"),
        ({"watchNamespaces": ["a"]}, "watchNamespaces"),
        ({"scope": "namespaced", "watchNamespaces": ["*"]}, "watchNamespaces"),
        ({"replicas": 9}, "replicas"),
        ({"replicas": "two"}, "replicas"),
        ({"images": {"engine": {"vlm": "x"}}}, "vlm"),
        ({"images": {"engine": {"vllm": "x:{tag}"}}}, "vllm"),
        ({"images": {"router": {"smg": "two words"}}}, "smg"),
        ({"images": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"crds": {"keep": True}}, "keep"),
        ({"log": {"level": "trace"}}, "level"),
        ({"monitoring": {"namespace": "Not A Name"}}, "namespace"),
        ({"resources": {"limit": {}}}, "limit"),
        ({"podMonitor": {"interval": "soon"}}, "interval"),
        ({"budgets": [{"namespaces": "some", "maxGPUs": 4}]}, "namespaces"),
        ({"budgets": [{"namespaces": ["a"]}]}, "maxGPUs"),
        ({"servingMonitors": {"interval": "soon"}}, "interval"),
        ({"alerts": {"runbookURL": "https://docs.example.org/runbooks"}}, "runbookURL"),
        ({"dashboards": {"label": {}}}, "label"),
        ({"networkPolicy": {"enable": True}}, "enable"),
    ],
)
def test_the_schema_refuses(values: dict[str, Any], named: str) -> None:
    done = helm("template", "pd-operator", str(CHART), values={**IMAGE, **values})
    assert done.returncode != 0 and named in done.stderr


def test_a_missing_image_says_what_to_set() -> None:
    done = helm("template", "pd-operator", str(CHART), values={})
    assert done.returncode != 0 and "--set image.repository=" in done.stderr


@pytest.mark.parametrize(
    ("name", "said"), [("cluster-wide", "all namespaces"), ("namespaced", "kubectl apply --server-side -f crds/")]
)
def test_notes(name: str, said: str) -> None:
    arguments = ["install", "pd-operator", str(CHART), "--namespace", "pds", "--dry-run=client"]
    done = helm(*arguments, values={**IMAGE, **profile(name)})
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
