"""HPAs as the API server writes them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import cast

from pd_operator.controller.watch import child_reflectors
from pd_operator.core.names import DEPLOYMENT
from pd_operator.core.observed import AutoscalerFact, ChildFact
from pd_operator.kube.autoscalers import AutoscalerDecoder
from pd_operator.kube.client import KubeClient
from pd_operator.kube.store import Stores

HPA = {
    "metadata": {"namespace": "team", "name": "keda-hpa-x", "resourceVersion": "7", "labels": {"scaledobject.keda.sh/name": "x"}},
    "spec": {"scaleTargetRef": {"apiVersion": "pdserve.dev/v1alpha1", "kind": "PDPool", "name": "chat-decode"}, "maxReplicas": 3},
}


def test_pages_and_events() -> None:
    decoder = AutoscalerDecoder()
    fact = AutoscalerFact("team", "keda-hpa-x", "pdserve.dev", "PDPool", "chat-decode", "x")
    page = decoder.page(json.dumps({"metadata": {"resourceVersion": "9"}, "items": [HPA]}).encode())
    assert page.items == [(("team", "keda-hpa-x"), fact)]
    event = decoder.event(json.dumps({"type": "DELETED", "object": HPA}).encode())
    assert (event.type, event.key, event.item) == ("DELETED", ("team", "keda-hpa-x"), fact)


def test_only_an_hpa_of_ours_wakes_anybody() -> None:
    stores, woken = Stores(), list[tuple[str, str]]()
    for kind, name in (("PDPool", "chat-decode"), ("Deployment", "chat-1a2b3c4d-0-decode")):
        stores.children.put("x", (kind, "team", name), ChildFact(kind, "team", name, "uid", labels={DEPLOYMENT: "chat"}))
    client = cast(KubeClient, None)
    (watch,) = [r for r in child_reflectors(client, stores, (None,), woken.append) if r.kind == "HorizontalPodAutoscaler"]
    pool = AutoscalerFact("team", "a", "pdserve.dev", "PDPool", "chat-decode")
    watch._on_change(None, pool)
    watch._on_change(None, replace(pool, kind="Deployment", group="apps", target="chat-1a2b3c4d-0-decode"))
    assert woken == [("team", "chat")] * 2
    for other in (replace(pool, namespace="other"), replace(pool, target="web"), replace(pool, kind="StatefulSet")):
        watch._on_change(None, other)
    assert len(woken) == 2
    watch._on_change(pool, replace(pool, target="web"))  # it leaves us
    assert len(woken) == 3
