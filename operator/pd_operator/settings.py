"""Settings of one install: from a mounted YAML file (PD_CONFIG), each field overridden by an environment variable PD_*.

Names are camelCase in the file (`httpPort`) and upper snake case in the environment (`PD_HTTP_PORT`).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel

CONFIG = "PD_CONFIG"
NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"


class SettingsError(Exception):
    """A setting is wrong; the message names each field, where it was set and what is accepted."""


class PrometheusSettings(BaseModel):
    """Where Prometheus is and how to ask it. Credentials are files, read at each tick, so that they may rotate."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    url: str = Field(default="", description="Base URL, e.g. http://prometheus.monitoring.svc:9090.")
    matchers: dict[str, str] = Field(default_factory=dict, description="External labels that every query names, e.g. cluster.")
    headers: dict[str, str] = Field(default_factory=dict, description="Headers of every query, e.g. X-Scope-OrgID of a tenant.")
    token_file: str = Field(default="", description="File with a bearer token.")
    ca_file: str = Field(default="", description="File with the CA's certificate.")
    certificate_file: str = Field(default="", description="File with a client certificate.")
    key_file: str = Field(default="", description="File with its key.")
    recorded: bool = Field(default=False, description="Read the chart's recording rules instead of raw series.")


class SignalSettings(BaseModel):
    """Where signals of load come from."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    source: Literal["podScrape", "prometheus"] = Field(
        default="podScrape", description="podScrape reads /metrics of up to about 1,000 pods; prometheus asks a Prometheus."
    )
    prometheus: PrometheusSettings = Field(default_factory=PrometheusSettings)
    tick_seconds: float = Field(default=15.0, ge=1, le=300, description="Seconds between two scaling decisions.")

    @model_validator(mode="after")
    def _check_url(self) -> SignalSettings:
        url = self.prometheus.url
        if self.source == "prometheus" and not url.startswith(("http://", "https://")):
            raise ValueError(f"signals.prometheus.url is {url!r}: with source prometheus an http:// or https:// URL is required")
        return self


class BudgetSettings(BaseModel):
    """GPUs that the PDDeployments of some namespaces share; spec.scaling.priority says who is served first."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    name: str = Field(default="", max_length=63, pattern=f"{NAME}|^$", description="For messages; empty = its place in the list.")
    namespaces: Literal["all"] | tuple[str, ...] = Field(description="all, or names of namespaces; each in one budget at most.")
    max_gpus: int = Field(alias="maxGPUs", ge=1, le=1_000_000, description="Accelerators that they may use together.")


class Settings(BaseModel):
    """All settings; the defaults suit a run outside the cluster."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    install: str = Field(
        default="pd-operator", pattern=NAME, max_length=63, description="Name of this install; stands in status.controller."
    )
    namespace: str = Field(default="pd-operator", pattern=NAME, max_length=63, description="Namespace the operator runs in.")
    identity: str = Field(
        default_factory=socket.gethostname, min_length=1, max_length=128, description="Name of this process: the pod's name."
    )
    watch_namespaces: tuple[str, ...] = Field(
        default=(), max_length=100, description="Namespaces to serve; empty = the whole cluster. Above 20, cluster-wide is cheaper."
    )
    images: dict[str, str] = Field(
        default_factory=dict, description="Component (vllm, lmcache, smg, ...) -> image; {version} is replaced by its version."
    )
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="imagePullPolicy of all pods that the operator creates."
    )
    monitoring_namespace: str = Field(
        default="monitoring", pattern=NAME, max_length=63, description="Namespace whose pods may scrape LMCache's HTTP port."
    )
    lease_name: str = Field(default="pd-operator", pattern=NAME, max_length=63, description="Lease that elects the leader.")
    lease_namespace: str = Field(default="", max_length=63, description="Namespace of the Lease; empty = `namespace`.")
    http_host: str = Field(default="0.0.0.0", min_length=1, description="Address of /healthz, /readyz and /metrics.")
    http_port: int = Field(default=8080, ge=0, le=65535, description="Port of /healthz, /readyz and /metrics; 0 = any free one.")
    workers: int = Field(default=8, ge=1, le=64, description="Reconciles that run at once.")
    resync_seconds: float = Field(
        default=600.0, ge=1, le=86400, description="Every object is reconciled at least this often, +-20 %."
    )
    reconcile_timeout_seconds: float = Field(default=120.0, ge=1, le=600, description="A reconcile that takes longer is an error.")
    drain_seconds: float = Field(
        default=6.0, ge=0, le=20, description="After SIGTERM, running reconciles may take this long to finish."
    )
    max_loop_lag_seconds: float = Field(default=5.0, gt=0, description="/healthz fails while the event loop is later than this.")
    max_stream_age_seconds: float = Field(
        default=180.0, ge=90, description="/readyz fails when a watch was silent for longer; the server speaks every 60 s."
    )
    max_key_age_seconds: float = Field(default=120.0, gt=0, description="/readyz fails when a key waits for a worker longer.")
    signals: SignalSettings = Field(default_factory=SignalSettings, description="Where signals of load come from.")
    budgets: tuple[BudgetSettings, ...] = Field(default=(), max_length=100, description="GPUs that several PDDeployments share.")
    decision_log: str = Field(
        default="", max_length=4096, description="File that gets one line of JSON for each scaling decision; empty = none."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="INFO", description="Least severe level logged.")

    @field_validator("images")
    @classmethod
    def _check_images(cls, images: dict[str, str]) -> dict[str, str]:
        for component, template in images.items():
            try:
                image = template.format(version="0")
            except (KeyError, IndexError, ValueError) as exc:
                raise ValueError(f"{component}: only {{version}} is replaced, got {template!r}") from exc
            if not image or any(ch.isspace() for ch in image):
                raise ValueError(f"{component}: an image reference is required, got {template!r}")
        return images

    @field_validator("watch_namespaces")
    @classmethod
    def _check_namespaces(cls, namespaces: tuple[str, ...]) -> tuple[str, ...]:
        for name in namespaces:
            if not name or name != name.lower() or not name.replace("-", "").isalnum():
                raise ValueError(f"{name!r} is not the name of a namespace (patterns are not accepted)")
        return tuple(dict.fromkeys(namespaces))

    @model_validator(mode="after")
    def _check_budgets(self) -> Settings:
        covered: dict[str, int] = {}
        for number, budget in enumerate(self.budgets):
            if budget.namespaces == "all" and len(self.budgets) > 1:
                raise ValueError(f"budgets[{number}].namespaces is all: with more than one budget each names its namespaces")
            for name in budget.namespaces if budget.namespaces != "all" else ():
                if name in covered:
                    raise ValueError(
                        f"budgets[{number}].namespaces: {name} is in budgets[{covered[name]}] too; one budget is accepted"
                    )
                if self.watch_namespaces and name not in self.watch_namespaces:
                    watched = ", ".join(self.watch_namespaces)
                    raise ValueError(f"budgets[{number}].namespaces: {name} is not served by this install; accepted: {watched}")
                covered[name] = number
            if not budget.namespaces:
                raise ValueError(f"budgets[{number}].namespaces is empty: all, or at least one name, is accepted")
        return self

    @property
    def namespaces(self) -> tuple[str | None, ...]:
        """What to list and watch: the named namespaces, or (None,) for the whole cluster."""
        return self.watch_namespaces or (None,)

    def image(self, component: str, version: str) -> str:
        """The image of a component at a version, or "" when the table has no entry."""
        template = self.images.get(component, "")
        return template.format(version=version) if template else ""


def load(environ: Mapping[str, str], path: str | None = None) -> Settings:
    """Read the file named by `path` or PD_CONFIG, then the environment.

    Raises:
        SettingsError: the file cannot be read, or fields are wrong or unknown.
    """
    path = path or environ.get(CONFIG) or None
    values = _read(path) if path else {}
    origin = dict.fromkeys(values, path or "")
    for name, field in Settings.model_fields.items():
        variable = f"PD_{name.upper()}"
        if variable in environ:
            alias = field.alias or name
            values[alias] = _parse(name, variable, environ[variable])
            origin[alias] = f"environment variable {variable}"
    try:
        return Settings.model_validate(values)
    except ValidationError as exc:
        raise SettingsError("; ".join(_explain(error, origin) for error in exc.errors())) from exc


def _read(path: str) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as exc:
        raise SettingsError(f"{path}: cannot be read as YAML: {exc}") from exc
    if not isinstance(loaded, dict):
        raise SettingsError(f"{path}: a mapping of settings is required, got {type(loaded).__name__}")
    return {str(key): value for key, value in loaded.items()}


def _parse(name: str, variable: str, text: str) -> Any:
    if name == "watch_namespaces":
        return [part.strip() for part in text.split(",") if part.strip()]
    if name in ("images", "signals", "budgets"):
        try:
            return yaml.safe_load(text) or ([] if name == "budgets" else {})
        except yaml.YAMLError as exc:
            kind = "list" if name == "budgets" else "mapping"
            raise SettingsError(f"environment variable {variable}: a YAML or JSON {kind} is required: {exc}") from exc
    return text


def _explain(error: Mapping[str, Any], origin: Mapping[str, str]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    source = origin.get(str(error["loc"][0]), "") if error["loc"] else ""
    value = f", got {error['input']!r}" if error["type"] != "value_error" else ""
    return f"{where}{f' ({source})' if source else ''}: {error['msg']}{value}"
