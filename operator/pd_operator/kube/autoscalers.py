"""HorizontalPodAutoscalers -> what they scale. KEDA makes them too; their label names its ScaledObject."""

from __future__ import annotations

from pd_operator.core.observed import AutoscalerFact
from pd_operator.kube.pages import Slim, SlimDecoder, Thing, by_namespace

SCALED_OBJECT = "scaledobject.keda.sh/name"  # label that KEDA puts on its HPAs (kedacore/keda, pkg/scaling: hpa.go)


class _Target(Slim):
    api_version: str = ""
    kind: str = ""
    name: str = ""


class _Spec(Slim):
    scale_target_ref: _Target = _Target()


class _Autoscaler(Thing):
    spec: _Spec = _Spec()


class AutoscalerDecoder(SlimDecoder[_Autoscaler, AutoscalerFact]):
    """HPAs, keyed by (namespace, name)."""

    def __init__(self) -> None:
        super().__init__(_Autoscaler, by_namespace, _fact)


def _fact(raw: _Autoscaler) -> AutoscalerFact:
    meta, target = raw.metadata, raw.spec.scale_target_ref
    group = target.api_version.rpartition("/")[0]
    return AutoscalerFact(meta.namespace, meta.name, group, target.kind, target.name, meta.labels.get(SCALED_OBJECT, ""))
