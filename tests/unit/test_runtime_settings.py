"""Settings: the file, then the environment; errors name the field, where it was set and what is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pd_operator import cli, logs
from pd_operator.controller.budgets import budgets_of
from pd_operator.settings import Settings, SettingsError, load


def test_defaults() -> None:
    settings = load({})
    assert settings.namespaces == (None,)
    assert (settings.resync_seconds, settings.http_port, settings.workers, settings.pull_policy) == (600, 8080, 8, "IfNotPresent")
    assert settings.image("vllm", "0.32.0") == ""


def test_every_field_is_described() -> None:
    assert all(field.description for field in Settings.model_fields.values())


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    images = {"vllm": "vllm/vllm-openai:v{version}", "smg": "lightseekorg/smg:v{version}", "fixed": "localhost/x:dev"}
    path.write_text(yaml.safe_dump({"images": images, "httpPort": 9000, "watchNamespaces": ["a"], "pullPolicy": "Always"}))
    settings = load({"PD_CONFIG": str(path), "PD_HTTP_PORT": "9001", "PD_WATCH_NAMESPACES": "b, c,b", "PD_LEASE_NAME": "l"})
    assert (settings.http_port, settings.watch_namespaces, settings.lease_name, settings.pull_policy) == (
        9001,
        ("b", "c"),
        "l",
        "Always",
    )
    assert settings.image("vllm", "0.32.0") == "vllm/vllm-openai:v0.32.0"
    assert settings.image("fixed", "1") == "localhost/x:dev"
    assert load({}, str(path)).http_port == 9000
    assert load({"PD_IMAGES": '{"smg": "mirror/smg:{version}"}'}).image("smg", "1.13.0") == "mirror/smg:1.13.0"


def test_variables_of_services_nearby_are_ignored() -> None:
    """Kubernetes sets PD_OPERATOR_PORT=tcp://... in a namespace with a Service pd-operator."""
    assert load({"PD_OPERATOR_PORT": "tcp://10.0.0.1:80", "PD_OPERATOR_SERVICE_HOST": "10.0.0.1"}) == load({})


@pytest.mark.parametrize(
    ("environ", "content", "says"),
    [
        ({"PD_HTTP_PORT": "99999"}, None, r"httpPort \(environment variable PD_HTTP_PORT\): .*equal to 65535, got '99999'"),
        ({"PD_HTTP_PORT": "http"}, None, r"httpPort \(environment variable PD_HTTP_PORT\): .*valid integer.*got 'http'"),
        ({"PD_PULL_POLICY": "Sometimes"}, None, r"pullPolicy .*'Always', 'IfNotPresent' or 'Never', got 'Sometimes'"),
        ({"PD_WATCH_NAMESPACES": "a,team-*"}, None, r"watchNamespaces .*'team-\*' is not the name of a namespace"),
        ({"PD_IMAGES": "{"}, None, r"PD_IMAGES: a YAML or JSON mapping is required"),
        ({"PD_RESYNC_SECONDS": "0"}, None, r"resyncSeconds .*greater than or equal to 1"),
        ({}, "images: {vllm: 'x:{tag}'}", r"images \(.*c\.yaml\): .*vllm: only \{version\} is replaced, got 'x:\{tag\}'"),
        ({}, "images: {vllm: 'a b'}", r"vllm: an image reference is required"),
        ({}, "imgaes: {}", r"imgaes \(.*c\.yaml\): Extra inputs are not permitted"),
        ({}, "- a", r"c\.yaml: a mapping of settings is required, got list"),
        ({}, "a: [", r"c\.yaml: cannot be read as YAML"),
        ({"PD_BUDGETS": "["}, None, r"PD_BUDGETS: a YAML or JSON list is required"),
        ({"PD_BUDGETS": "[{namespaces: all}]"}, None, r"budgets\.0\.maxGPUs .*Field required"),
        ({"PD_BUDGETS": "[{namespaces: [], maxGPUs: 4}]"}, None, r"budgets\[0\]\.namespaces is empty: all, or at least one name"),
        ({"PD_BUDGETS": "[{namespaces: all, maxGPUs: 4}, {namespaces: [a], maxGPUs: 2}]"}, None,
         r"budgets\[0\]\.namespaces is all: with more than one budget each names its namespaces"),
        ({"PD_BUDGETS": "[{namespaces: [b, a], maxGPUs: 4}, {namespaces: [a], maxGPUs: 2}]"}, None,
         r"budgets\[1\]\.namespaces: a is in budgets\[0\] too; one budget is accepted"),
        ({"PD_BUDGETS": "[{namespaces: [c], maxGPUs: 4}]", "PD_WATCH_NAMESPACES": "a,b"}, None,
         r"budgets\[0\]\.namespaces: c is not served by this install; accepted: a, b"),
        ({}, "workers: 0\nhttpPort: -1", r"httpPort .*; workers .*|workers .*; httpPort"),
    ],
)  # fmt: skip
def test_errors_name_the_field(tmp_path: Path, environ: dict[str, str], content: str | None, says: str) -> None:
    path = None
    if content is not None:
        path = str(tmp_path / "c.yaml")
        Path(path).write_text(content)
    with pytest.raises(SettingsError, match=says):
        load(environ, path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"missing\.yaml: cannot be read"):
        load({"PD_CONFIG": str(tmp_path / "missing.yaml")})


def test_the_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("pd-operator ")
    assert cli.main(["crds"]) == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [crd["metadata"]["name"] for crd in printed] == ["pddeployments.pdserve.dev", "pdpools.pdserve.dev"]
    monkeypatch.setenv("PD_HTTP_PORT", "http")
    assert cli.main(["run"]) == 2
    assert "PD_HTTP_PORT" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == 2


def test_without_a_cluster_the_command_says_where_it_looked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(logs, "setup", lambda level: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert cli.main(["run"]) == 2
    assert "no usable cluster credentials" in capsys.readouterr().err


def test_budgets_from_the_environment_and_their_names() -> None:
    settings = load({"PD_BUDGETS": "[{name: prod, namespaces: [a, b], maxGPUs: 64}, {namespaces: [c], maxGPUs: 8}]"})
    prod, other = budgets_of(settings)
    assert (prod.name, prod.max_gpus, prod.covers("b"), prod.covers("c")) == ("prod", 64, True, False)
    assert (other.name, other.max_gpus) == ("budgets[1]", 8)
    (whole,) = budgets_of(load({"PD_BUDGETS": "[{namespaces: all, maxGPUs: 8}]"}))
    assert whole.covers("anything") and budgets_of(load({"PD_BUDGETS": ""})) == ()
