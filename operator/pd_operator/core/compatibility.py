"""Review of a spec beyond what the CRD's schema can refuse. Every refusal names field, value and what is accepted (I8)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from pd_operator.api.conditions import Reason
from pd_operator.api.types import EnvVar, PDDeploymentSpec
from pd_operator.core.capabilities import Program, Refusal, Upstream
from pd_operator.core.names import MANAGED_BY
from pd_operator.core.snapshot import Reference

OCI_SINCE = (1, 33)  # image volumes are on by default from Kubernetes 1.33 (KEP-4639)
OWNED_CONTAINER_FIELDS = ("image", "command", "args", "lifecycle")
OWNED_POD_FIELDS = ("restartPolicy", "terminationGracePeriodSeconds", "enableServiceLinks")
MAIN_CONTAINERS = {"prefill": ("engine", "lmcache"), "decode": ("engine", "lmcache"), "router": ("router",)}


def review(
    spec: PDDeploymentSpec,
    upstream: Upstream,
    images: Mapping[str, str],
    missing: Sequence[Reference] = (),
    server_version: tuple[int, int] = OCI_SINCE,
) -> list[Refusal]:
    """All refusals, the one to show first."""
    return [
        *_not_implemented(spec),
        *upstream.refusals,
        *_model(spec, server_version),
        *_owned(spec, upstream),
        *_images(spec, images),
        *(
            Refusal(Reason.MISSING_REFERENCE, r.field, r.name, f"{r.kind} {r.name} does not exist in this namespace; create it")
            for r in missing
        ),
    ]


def invalid(error: ValidationError) -> Refusal:
    """The refusal for a spec that the models do not accept (an object older than the installed CRD, for instance)."""
    first = error.errors(include_url=False)[0]
    field = ".".join(["spec", *(str(part) for part in first["loc"])])
    value = first.get("input")
    shown = str(value)[:80] if isinstance(value, str | int | float | bool) else ""
    return Refusal(Reason.INVALID_SPEC, field, shown, str(first["msg"]))


def _not_implemented(spec: PDDeploymentSpec) -> Iterator[Refusal]:
    """Fields whose feature is not built yet: refused when set, never ignored."""
    domain, rollout = spec.placement.transfer_domain, spec.rollout
    table: list[tuple[bool, str, object, str]] = [
        (spec.engine.type != "vllm", "engine.type", spec.engine.type, "vllm"),
        (spec.router.type not in ("smg", "vllm-router"), "router.type", spec.router.type, "smg or vllm-router"),
        (spec.prefill.nodes > 1, "prefill.nodes", spec.prefill.nodes, "1"),
        (spec.decode.nodes > 1, "decode.nodes", spec.decode.nodes, "1"),
        (spec.scaling is not None, "scaling", "", "leave it out; set prefill.replicas and decode.replicas"),
        (spec.gateway is not None, "gateway", "", "leave it out; the front door is the Service"),
        (spec.slo is not None, "slo", "", "leave it out"),
        (spec.model.config_map_ref is not None, "model.configMapRef", "", "leave it out"),
        (
            bool(domain.topology_key),
            "placement.transferDomain.topologyKey",
            domain.topology_key,
            "leave it out; use template.spec.affinity",
        ),
        (domain.mode != "Required", "placement.transferDomain.mode", domain.mode, "Required"),
        (spec.placement.max_domains != 1, "placement.maxDomains", spec.placement.max_domains, "1"),
        (spec.placement.scheduling_timeout != "10m", "placement.schedulingTimeout", spec.placement.scheduling_timeout, "10m"),
        (spec.backpressure.max_queue_time != "5s", "backpressure.maxQueueTime", spec.backpressure.max_queue_time, "5s"),
        (rollout.max_surge != "25%", "rollout.maxSurge", rollout.max_surge, "25%"),
        (rollout.max_unavailable != "25%", "rollout.maxUnavailable", rollout.max_unavailable, "25%"),
        (rollout.paused, "rollout.paused", "true", "false"),
        (rollout.progress_deadline_seconds != 1800, "rollout.progressDeadlineSeconds", rollout.progress_deadline_seconds, "1800"),
        (spec.verification in ("Required", "Advisory"), "verification", spec.verification, "Disabled, or leave it out"),
    ]
    for refused, field, value, accepted in table:
        if refused:
            yield Refusal(Reason.NOT_IMPLEMENTED, f"spec.{field}", str(value), f"not built yet; accepted today: {accepted}")


def _model(spec: PDDeploymentSpec, server_version: tuple[int, int]) -> Iterator[Refusal]:
    if spec.model.uri.startswith("oci://") and server_version < OCI_SINCE:
        have = ".".join(map(str, server_version))
        accepted = f"oci:// needs image volumes, Kubernetes 1.33 or later (this one is {have}); use hf://, pvc:// or a path"
        yield Refusal(Reason.UNSUPPORTED_VERSION, "spec.model.uri", spec.model.uri, accepted)


def _images(spec: PDDeploymentSpec, images: Mapping[str, str]) -> Iterator[Refusal]:
    for component, what in (("engine", spec.engine.type), ("router", spec.router.type)):
        if not images.get(component):
            accepted = (
                f"no image is known for {what}; set this field, or add {what} to the install's image table (chart value images)"
            )
            yield Refusal(Reason.IMAGE_REQUIRED, f"spec.{component}.image", "", accepted)


def _owned(spec: PDDeploymentSpec, upstream: Upstream) -> Iterator[Refusal]:
    yield from _flags("spec.engine.args", spec.engine.args, upstream.engine)
    yield from _env("spec.engine.env", spec.engine.env, upstream.engine)
    for name, role in spec.roles.items():
        yield from _flags(f"spec.{name}.args", role.args, upstream.engine)
        yield from _env(f"spec.{name}.env", role.env, upstream.engine)
        yield from _template(f"spec.{name}.template", role.template, MAIN_CONTAINERS[name], upstream)
    yield from _flags("spec.router.args", spec.router.args, upstream.router)
    yield from _template("spec.router.template", spec.router.template, MAIN_CONTAINERS["router"], upstream)


def _flags(field: str, args: Sequence[str], program: Program) -> Iterator[Refusal]:
    """Owned flags in every spelling: with =, with underscores, dotted, abbreviated (argparse takes unique prefixes)."""
    for arg in args:
        if not arg.startswith("-") or arg.lstrip("-")[:1].isdigit():
            continue
        flag = arg.split("=", 1)[0].split(".", 1)[0]
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        for forbidden, accepted in program.forbidden_flags:
            if flag == forbidden:
                yield Refusal(Reason.INVALID_SPEC, field, flag, accepted)
        owned = flag if flag in program.owned_flags else _abbreviated(flag, program.owned_flags)
        if owned:
            yield Refusal(Reason.INVALID_SPEC, field, flag, f"{owned} is set by the operator; remove it")


def _abbreviated(flag: str, owned: Iterable[str]) -> str:
    """The owned flag that a prefix of at least 10 characters means (`--kv-transfer`)."""
    return next((o for o in sorted(owned) if len(flag) >= 10 and o.startswith(flag)), "")


def _env(field: str, env: Iterable[EnvVar], program: Program) -> Iterator[Refusal]:
    for var in env:
        if var.name in program.owned_env:
            yield Refusal(Reason.INVALID_SPEC, field, var.name, f"{var.name} is set by the operator; remove it")


def _template(field: str, template: Mapping[str, Any], main: tuple[str, ...], upstream: Upstream) -> Iterator[Refusal]:
    for key in template:
        if key not in ("metadata", "spec"):
            yield Refusal(Reason.INVALID_SPEC, f"{field}.{key}", "", "a template holds metadata and spec only")
    metadata, pod = template.get("metadata", {}), template.get("spec", {})
    if not isinstance(metadata, Mapping) or not isinstance(pod, Mapping):
        yield Refusal(Reason.INVALID_SPEC, field, "", "metadata and spec are objects, as in a PodTemplateSpec")
        return
    for key in metadata.get("labels") or {}:
        if key == MANAGED_BY or key.startswith("pdserve.dev/") or key == "app.kubernetes.io/component":
            yield Refusal(Reason.INVALID_SPEC, f"{field}.metadata.labels", key, "this label is set by the operator; remove it")
    for key in OWNED_POD_FIELDS:
        if key in pod:
            yield Refusal(Reason.INVALID_SPEC, f"{field}.spec.{key}", str(pod[key]), "set by the operator; remove it")
    for kind in ("containers", "initContainers"):
        yield from _containers(f"{field}.spec.{kind}", pod.get(kind) or [], main, upstream)


def _containers(field: str, containers: Any, main: tuple[str, ...], upstream: Upstream) -> Iterator[Refusal]:
    if not isinstance(containers, list) or not all(isinstance(c, Mapping) and c.get("name") for c in containers):
        yield Refusal(Reason.INVALID_SPEC, field, "", "a list of containers, each with a name")
        return
    for container in containers:
        name = str(container["name"])
        here = f"{field}[{name}]"
        if name not in main:
            if not container.get("image"):
                yield Refusal(
                    Reason.INVALID_SPEC, here, "", f"a container of your own needs an image; ours are {' and '.join(main)}"
                )
            continue
        if (name == "lmcache") != field.endswith("initContainers"):
            yield Refusal(Reason.INVALID_SPEC, here, "", "engine and router stand under containers, lmcache under initContainers")
        for key in OWNED_CONTAINER_FIELDS:
            if key in container:
                yield Refusal(Reason.INVALID_SPEC, f"{here}.{key}", "", f"set by the operator; use {_instead(name, key)}")
        program = {"engine": upstream.engine, "lmcache": upstream.lmcache, "router": upstream.router}[name]
        owned = program.owned_env if program else frozenset()
        for var in container.get("env") or []:
            if isinstance(var, Mapping) and var.get("name") in owned:
                yield Refusal(
                    Reason.INVALID_SPEC, f"{here}.env", str(var["name"]), f"{var['name']} is set by the operator; remove it"
                )


def _instead(name: str, key: str) -> str:
    """The field to use in place of an owned one."""
    if key == "image":
        return f"spec.{name}.image"
    if key == "lifecycle":
        return "spec.rollout.drainTimeout"
    return "spec.engine.args or the role's args" if name == "engine" else "the fields of spec." + name
