"""An object that is deleted while its pods start is gone as fast as one that ran."""

from __future__ import annotations

import time

import pytest

from served import Served

GRACE = 190  # of a router; what a SIGTERM that nobody heard would cost


@pytest.mark.parametrize("pause", [0.0, 0.7, 1.4])
def test_a_router_that_has_just_started_hears_sigterm(served: Served, pause: float) -> None:
    """A program as PID 1 ignores SIGTERM until its handler is set; the pod's process namespace has another PID 1."""
    served.apply(router={"replicas": 4})
    served.until("a node for the routers", lambda: [p for p in served.pods("router") if p["spec"].get("nodeName")])
    time.sleep(pause)
    begin = time.monotonic()
    served.cluster.kubectl("delete", "pdd", "chat", "-n", served.namespace, "--wait=true", timeout=30)
    served.cluster.kubectl(
        "wait", "--for=delete", "pods", "-l", "app.kubernetes.io/component=router", "-n", served.namespace, "--timeout=90s",
        timeout=100,
    )  # fmt: skip
    assert time.monotonic() - begin < GRACE / 2
