"""Review of a spec beyond what the CRD's schema can refuse. Every refusal names field, value and what is accepted (I8)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from pd_operator.api.conditions import Reason
from pd_operator.api.types import SECRET_NAME, EnvVar, PDDeploymentSpec, PlacementSpec
from pd_operator.core.capabilities import Program, Refusal, Upstream
from pd_operator.core.compatibility_model import Model
from pd_operator.core.compatibility_verdict import judge
from pd_operator.core.names import COMPONENT, GROUP_KIND, LLMD_ROLE, MANAGED_BY, ROLES
from pd_operator.core.pools import bounds_of, gpus
from pd_operator.core.snapshot import Reference

OCI_SINCE = (1, 35)  # image volumes are on by default since (kubernetes.io: feature gate ImageVolume; off in the beta of 1.33)
OWNED_METADATA = frozenset({MANAGED_BY, COMPONENT, LLMD_ROLE, "smg.ai/kv-connector"})  # and whatever begins with pdserve.dev/
SECRET_REMEDY = "a name that ends in TOKEN, KEY, PASSWORD or SECRET takes no literal value; use valueFrom.secretKeyRef"
GROUP_REMEDY = "install LeaderWorkerSet, which runs a replica as a group of pods, or set 1"
OWNED_CONTAINER_FIELDS = ("image", "command", "args", "lifecycle")
OWNED_POD_FIELDS = ("restartPolicy", "terminationGracePeriodSeconds", "enableServiceLinks")
# Lists that are merged with ours -> what each item needs. A null would remove ours, the owned entries too.
POD_LISTS = {"containers": "name", "initContainers": "name", "volumes": "name", "imagePullSecrets": "name", "tolerations": ""}
CONTAINER_LISTS = {"env": "name", "volumeMounts": "mountPath", "ports": "", "envFrom": ""}
PARENT_FIELDS = ("name", "namespace", "sectionName", "port", "group", "kind")  # of a parentRef (gateway-api, ParentReference)
MAX_BACKENDS = 16  # of one rule (gateway-api, HTTPRouteRule.backendRefs)
MAIN_CONTAINERS = {"prefill": ("engine", "lmcache"), "decode": ("engine", "lmcache"), "router": ("router",)}


def review(
    spec: PDDeploymentSpec,
    upstream: Upstream,
    images: Mapping[str, str],
    missing: Sequence[Reference] = (),
    server_version: tuple[int, int] = OCI_SINCE,
    model: Model | Refusal | None = None,
    missing_kinds: Mapping[str, str] = MappingProxyType({}),
) -> list[Refusal]:
    """All refusals, the one to show first."""
    return [
        *_not_implemented(spec),
        *upstream.refusals,
        *judge(spec, upstream, images, model).refusals,
        *_model(spec, server_version),
        *_placement(spec),
        *_scaling(spec),
        *_gateway(spec),
        *_owned(spec, upstream),
        *_images(spec, images),
        *(
            Refusal(Reason.MISSING_REFERENCE, r.field, r.name, f"{r.kind} {r.name} does not exist in this namespace; create it")
            for r in missing
        ),
        *_kinds(spec, missing_kinds),
    ]


def invalid(error: ValidationError) -> Refusal:
    """The refusal for a spec that the models do not accept (an object older than the installed CRD, for instance)."""
    first = error.errors(include_url=False)[0]
    field = ".".join(["spec", *(str(part) for part in first["loc"])])
    value = first.get("input")
    secret = {"args", "env", "template"} & set(first["loc"])  # may hold one, so it is not shown (invariant I10)
    shown = str(value)[:80] if isinstance(value, str | int | float | bool) and not secret else ""
    return Refusal(Reason.INVALID_SPEC, field, shown, str(first["msg"]))


def _not_implemented(spec: PDDeploymentSpec) -> Iterator[Refusal]:
    """Fields whose feature is not built yet: refused when set, never ignored."""
    rollout = spec.rollout
    table: list[tuple[bool, str, object, str]] = [
        (spec.engine.type != "vllm", "engine.type", spec.engine.type, "vllm"),
        (spec.router.type not in ("smg", "vllm-router"), "router.type", spec.router.type, "smg or vllm-router"),
        (rollout.max_surge != "25%", "rollout.maxSurge", rollout.max_surge, "25%"),
        (rollout.max_unavailable != "25%", "rollout.maxUnavailable", rollout.max_unavailable, "25%"),
    ]
    for refused, field, value, accepted in table:
        if refused:
            yield Refusal(Reason.NOT_IMPLEMENTED, f"spec.{field}", str(value), f"not built yet; accepted today: {accepted}")


def _model(spec: PDDeploymentSpec, server_version: tuple[int, int]) -> Iterator[Refusal]:
    if spec.model.uri.startswith("oci://") and server_version < OCI_SINCE:
        have = ".".join(map(str, server_version))
        accepted = f"oci:// needs image volumes, Kubernetes 1.35 or later (this one is {have}); use hf://, pvc:// or a path"
        yield Refusal(Reason.UNSUPPORTED_VERSION, "spec.model.uri", spec.model.uri, accepted)


def _placement(spec: PDDeploymentSpec) -> Iterator[Refusal]:
    """Fields that mean nothing without a transfer domain: refused, not ignored."""
    mine, defaults = spec.placement, PlacementSpec()
    if mine.transfer_domain.topology_key:
        return
    for field, value, plain in (
        ("transferDomain.mode", mine.transfer_domain.mode, defaults.transfer_domain.mode),
        ("maxDomains", mine.max_domains, defaults.max_domains),
        ("schedulingTimeout", mine.scheduling_timeout, defaults.scheduling_timeout),
    ):
        if value != plain:
            accepted = f"it needs placement.transferDomain.topologyKey, the node label that names the domain; without it: {plain}"
            yield Refusal(Reason.INVALID_SPEC, f"spec.placement.{field}", str(value), accepted)


def _scaling(spec: PDDeploymentSpec) -> Iterator[Refusal]:
    """A budget that the smallest pools do not fit into: no count would satisfy it."""
    cap = spec.scaling.max_gpus if spec.scaling else None
    least = gpus(spec, {role: bounds.min_replicas for role in ROLES if (bounds := bounds_of(spec, role))})
    if cap is not None and least > cap:
        accepted = f"{least} and above, what scaling.prefill.minReplicas and scaling.decode.minReplicas need"
        yield Refusal(Reason.INVALID_SPEC, "spec.scaling.maxGPUs", str(cap), accepted)


def _gateway(spec: PDDeploymentSpec) -> Iterator[Refusal]:
    """What an HTTPRoute cannot hold; the schema takes any object as a parent."""
    if spec.gateway is None:
        return
    for index, parent in enumerate(spec.gateway.parent_refs):
        field = f"spec.gateway.parentRefs[{index}]"
        for key in parent:
            if key not in PARENT_FIELDS:
                yield Refusal(Reason.INVALID_SPEC, f"{field}.{key}", "", f"a parent has {', '.join(PARENT_FIELDS)}")
        if not isinstance(parent.get("name"), str) or not parent["name"]:
            yield Refusal(Reason.INVALID_SPEC, f"{field}.name", str(parent.get("name", "")), "the name of a Gateway is required")
    domains = spec.placement.max_domains
    if domains > MAX_BACKENDS:
        accepted = f"{MAX_BACKENDS} or less with gateway: so many backends has a rule of an HTTPRoute, one for each slice"
        yield Refusal(Reason.INVALID_SPEC, "spec.placement.maxDomains", str(domains), accepted)


def _kinds(spec: PDDeploymentSpec, missing: Mapping[str, str]) -> Iterator[Refusal]:
    """Kinds of other projects that the spec needs and this cluster does not have."""
    needed = [(GROUP_KIND, mine.nodes > 1, f"{role}.nodes", str(mine.nodes), GROUP_REMEDY) for role, mine in spec.roles.items()]
    routes = "install the CRDs of the Gateway API (v1), or leave it out"
    needed.append(("HTTPRoute", spec.gateway is not None, "gateway", "", routes))
    for kind, wanted, field, value, remedy in needed:
        if wanted and kind in missing:
            yield Refusal(Reason.MISSING_KIND, f"spec.{field}", value, f"{missing[kind]}: {remedy}", outside=True)


def _images(spec: PDDeploymentSpec, images: Mapping[str, str]) -> Iterator[Refusal]:
    for component, what in (("engine", spec.engine.type), ("router", spec.router.type)):
        if not images.get(component):
            accepted = (
                f"no image is known for {what}; set this field, or add {what} to the install's image table (chart value images)"
            )
            yield Refusal(Reason.IMAGE_REQUIRED, f"spec.{component}.image", "", accepted)
    if spec.verification != "Disabled" and not images.get("canary"):
        accepted = "this install names no image for the canary (setting images.canary: the operator's own); without it: Disabled"
        yield Refusal(Reason.IMAGE_REQUIRED, "spec.verification", spec.verification, accepted)


def _owned(spec: PDDeploymentSpec, upstream: Upstream) -> Iterator[Refusal]:
    yield from _flags("spec.engine.args", spec.engine.args, upstream.engine)
    yield from _env("spec.engine.env", spec.engine.env, upstream.engine)
    for name, role in spec.roles.items():
        yield from _flags(f"spec.{name}.args", role.args, upstream.engine)
        yield from _env(f"spec.{name}.env", role.env, upstream.engine)
        main = MAIN_CONTAINERS[name] if upstream.lmcache else MAIN_CONTAINERS[name][:1]
        yield from _template(f"spec.{name}.template", role.template, main, upstream)
    yield from _flags("spec.router.args", spec.router.args, upstream.router)
    yield from _template("spec.router.template", spec.router.template, MAIN_CONTAINERS["router"], upstream)


def _flags(field: str, args: Sequence[str], program: Program) -> Iterator[Refusal]:
    """Owned flags in every spelling: with =, with underscores, dotted, negated, abbreviated. Only the flag is ever shown."""
    forbidden = dict(program.forbidden_flags)
    for arg in args:
        if not arg.startswith("-") or arg.lstrip("-")[:1].isdigit():
            continue
        flag = arg.split("=", 1)[0].split(".", 1)[0]
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        meant = _meant(flag, {*forbidden, *program.owned_flags})
        if meant in forbidden:
            yield Refusal(Reason.INVALID_SPEC, field, flag, forbidden[meant])
        elif meant:
            yield Refusal(Reason.INVALID_SPEC, field, flag, f"{meant} is set by the operator; remove it")


def _meant(flag: str, known: Set[str]) -> str:
    """The known flag that a spelling means: argparse takes `--no-x` for a switch and every unique prefix (`--kv-t`)."""
    if flag in known:
        return flag
    whole = f"--{flag.removeprefix('--no-')}" if flag.startswith("--no-") else flag
    if whole in known:
        return whole
    return next((k for k in sorted(known) if len(flag) > 2 and flag.startswith("--") and k.startswith(flag)), "")


def _env(field: str, env: Iterable[EnvVar], program: Program) -> Iterator[Refusal]:
    for var in env:
        if var.name in program.owned_env:
            yield Refusal(Reason.INVALID_SPEC, field, var.name, f"{var.name} is set by the operator; remove it")
        if var.value is not None and re.search(SECRET_NAME, var.name):
            yield Refusal(Reason.INVALID_SPEC, field, var.name, SECRET_REMEDY)


def _template(field: str, template: Mapping[str, Any], main: tuple[str, ...], upstream: Upstream) -> Iterator[Refusal]:
    for key in template:
        if key not in ("metadata", "spec"):
            yield Refusal(Reason.INVALID_SPEC, f"{field}.{key}", "", "a template holds metadata and spec only")
    metadata, pod = template.get("metadata", {}), template.get("spec", {})
    if not isinstance(metadata, Mapping) or not isinstance(pod, Mapping):
        yield Refusal(Reason.INVALID_SPEC, field, "", "metadata and spec are objects, as in a PodTemplateSpec")
        return
    for kind in ("labels", "annotations"):
        yield from _metadata(f"{field}.metadata.{kind}", metadata.get(kind, {}))
    for key in OWNED_POD_FIELDS:
        if key in pod:
            yield Refusal(Reason.INVALID_SPEC, f"{field}.spec.{key}", str(pod[key]), "set by the operator; remove it")
    malformed = list(_lists(f"{field}.spec", pod, POD_LISTS))
    yield from malformed
    if not malformed:
        for kind in ("containers", "initContainers"):
            yield from _containers(f"{field}.spec.{kind}", pod.get(kind, []), main, upstream)


def _metadata(field: str, values: Any) -> Iterator[Refusal]:
    if not isinstance(values, Mapping):
        yield Refusal(Reason.INVALID_SPEC, field, "", "an object of names and values")
        return
    for key in values:
        if key in OWNED_METADATA or str(key).startswith("pdserve.dev/"):
            yield Refusal(Reason.INVALID_SPEC, field, str(key), "set by the operator; remove it")


def _lists(field: str, value: Mapping[str, Any], lists: Mapping[str, str]) -> Iterator[Refusal]:
    for key, name in lists.items():
        items = value.get(key, [])
        if not isinstance(items, list) or not all(isinstance(i, Mapping) and (not name or i.get(name)) for i in items):
            yield Refusal(Reason.INVALID_SPEC, f"{field}.{key}", "", f"a list of objects{f', each with {name}' if name else ''}")


def _containers(
    field: str, containers: Sequence[Mapping[str, Any]], main: tuple[str, ...], upstream: Upstream
) -> Iterator[Refusal]:
    for container in containers:
        name = str(container["name"])
        here = f"{field}[{name}]"
        malformed = list(_lists(here, container, CONTAINER_LISTS))
        yield from malformed
        for var in [] if malformed else container.get("env", []):
            if var.get("value") is not None and re.search(SECRET_NAME, str(var["name"])):
                yield Refusal(Reason.INVALID_SPEC, f"{here}.env", str(var["name"]), SECRET_REMEDY)
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
        for var in [] if malformed else container.get("env", []):
            if var["name"] in owned:
                yield Refusal(Reason.INVALID_SPEC, f"{here}.env", var["name"], f"{var['name']} is set by the operator; remove it")


def _instead(name: str, key: str) -> str:
    """The field to use in place of an owned one."""
    if key == "image":
        return f"spec.{name}.image"
    if key == "lifecycle":
        return "spec.rollout.drainTimeout"
    return "spec.engine.args or the role's args" if name == "engine" else "the fields of spec." + name
