"""A pod's spec -> its shape: what the scheduler counts for it, in integer units, and which nodes it may use.

Source of the sum: k8s.io/component-helpers/resource/helpers.go PodRequests (containers, native sidecars as KEP-753 counts
them, init containers, overhead, pod-level resources of KEP-2837). A limit without a request is the request, as the API
server's defaults make it. What a LimitRange or a webhook adds is seen on pods, not on templates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING
from functools import lru_cache
from typing import Any

from pd_operator.api.scalars import quantity
from pd_operator.core.names import Role
from pd_operator.core.placement.capacity import CPU, PODS, PodShape, ReplicaShape, Requirement, Term, Toleration

Amounts = dict[str, int]


@lru_cache(maxsize=8192)
def units(resource: str, value: str | int | float) -> int:
    """A quantity in the scheduler's unit, rounded up: milli-CPU for cpu, else bytes or a count.

    Raises:
        ValueError: not a quantity.
    """
    number = quantity(value)
    return int((number * 1000 if resource == CPU else number).to_integral_value(rounding=ROUND_CEILING))


def amounts(resources: Mapping[str, Any] | None) -> Amounts:
    """A ResourceList in integer units."""
    return {name: units(name, value) for name, value in (resources or {}).items()}


def pod_requests(spec: Mapping[str, Any]) -> Amounts:
    """What one pod with this spec takes of a node; without `pods`, which is 1 for each.

    Raises:
        ValueError: a request is not a quantity.
    """
    total: Amounts = {}
    for container in spec.get("containers") or ():
        _add(total, _container(container))
    sidecars: Amounts = {}
    peak: Amounts = {}
    for container in spec.get("initContainers") or ():
        asked = _container(container)
        if container.get("restartPolicy") == "Always":
            _add(total, asked)
            _add(sidecars, asked)
            _raise(peak, sidecars)
        else:
            _add(asked, sidecars)
            _raise(peak, asked)
    _raise(total, peak)
    total |= _declared(spec.get("resources") or {})
    _add(total, amounts(spec.get("overhead")))
    total.pop(PODS, None)
    return total


def pod_shape(spec: Mapping[str, Any]) -> PodShape:
    """Requests and node constraints of a pod spec.

    Raises:
        ValueError: a request is not a quantity.
    """
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    return PodShape(
        requests=pod_requests(spec),
        node_selector=dict(spec.get("nodeSelector") or {}),
        affinity=None if required is None else tuple(_term(term) for term in required.get("nodeSelectorTerms") or ()),
        tolerations=tuple(toleration(item) for item in spec.get("tolerations") or ()),
    )


def group_shapes(leader: Mapping[str, Any], worker: Mapping[str, Any], size: int) -> tuple[PodShape, ...]:
    """Shapes of a group of `size` pods, the leader first.

    Raises:
        ValueError: a request is not a quantity.
    """
    return (pod_shape(leader), *([pod_shape(worker)] * (size - 1) if size > 1 else ()))


def replica_shape(role: Role, specs: Iterable[Mapping[str, Any]]) -> ReplicaShape:
    """A replica whose pods have these specs, the leader first.

    Raises:
        ValueError: no spec, or a request is not a quantity.
    """
    pods = tuple(pod_shape(spec) for spec in specs)
    gpus = sum(amount for pod in pods for name, amount in pod.requests.items() if "/" in name and "gpu" in name.lower())
    return ReplicaShape(role, pods, gpus)


def toleration(item: Mapping[str, Any]) -> Toleration:
    """A toleration as it stands in a pod spec."""
    return Toleration(item.get("key") or "", item.get("operator") or "Equal", item.get("value") or "", item.get("effect") or "")


def _container(container: Mapping[str, Any]) -> Amounts:
    return _declared(container.get("resources") or {})


def _declared(resources: Mapping[str, Any]) -> Amounts:
    return amounts(resources.get("limits")) | amounts(resources.get("requests"))


def _add(total: Amounts, more: Mapping[str, int]) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, 0) + amount


def _raise(total: Amounts, floor: Mapping[str, int]) -> None:
    for name, amount in floor.items():
        total[name] = max(total.get(name, 0), amount)


def _term(term: Mapping[str, Any]) -> Term:
    return Term(_requirements(term.get("matchExpressions")), _requirements(term.get("matchFields")))


def _requirements(items: Iterable[Mapping[str, Any]] | None) -> tuple[Requirement, ...]:
    return tuple(Requirement(item["key"], item["operator"], tuple(item.get("values") or ())) for item in items or ())
