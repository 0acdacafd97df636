"""The source `prometheus` on real Prometheus servers of two tenants, behind TLS, a token, a tenant header and a namespace scope."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from monitor.front import Front, certificate
from monitor.pods import Pod, deployment, past
from monitor.prometheus import Prometheus as Server
from monitor.seen import busy
from pd_operator.signals.load import Load
from pd_operator.signals.prometheus import Options, Prometheus

pytestmark = pytest.mark.timeout(120)
STEP, SCRAPES = 15, 5
TOKEN = "not-a-secret"
SIDES = ("prefill", "decode", "router")


def history(running: float) -> list[list[Pod]]:
    """The same deployment, slice, namespace and model in both tenants; another load."""
    own = {side: {"namespace": "team"} for side in SIDES}
    return busy(SCRAPES, **{**own, "decode": {"namespace": "team", "running": running}})


FLEET = deployment(*history(1)[-1])


@pytest.fixture(scope="module")
def tenants() -> Iterator[Mapping[str, str]]:
    end = time.time() - 1
    with ExitStack() as stack:
        found = {}
        for name, running in (("east", 20.0), ("west", 70.0)):
            rows = history(running)
            text = past((end - STEP * (SCRAPES - 1 - n), row) for n, row in enumerate(rows))
            found[name] = stack.enter_context(Server({"scrape_configs": []}, text)).url
        yield found


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate(tmp_path_factory.mktemp("tls"))


def read(url: str, **options: Any) -> Load:
    """The load as the front lets it through."""

    async def once() -> Load:
        source = Prometheus(lambda: (FLEET,), Options(url, fresh=120, window=60, **options))
        try:
            return (await source.read(time.time()))[FLEET.key]
        finally:
            await source.close()

    return asyncio.run(once())


def known(load: Load) -> set[str]:
    return {name for name, signal in load.signals().items() if signal.known}


def options(pem: Path, tenant: str = "east", token: str = TOKEN) -> dict[str, Any]:
    """What the chart's values would give: a file of the CA, a file of the token, and a header."""
    file = pem.parent / f"token-{token}"
    file.write_text(f"{token}\n")
    return {"ca_file": str(pem), "token_file": str(file), "headers": {"X-Scope-OrgID": tenant}}


def test_each_tenant_sees_its_own(tenants: Mapping[str, str], pem: Path) -> None:
    with Front(pem, TOKEN, tenants) as front:
        east, west = (read(front.url, **options(pem, tenant)) for tenant in ("east", "west"))
    assert (east.running.value, west.running.value) == (20.0, 70.0)
    assert len(known(east)) > 10 and front.refused == []


@pytest.mark.parametrize(
    ("change", "told"),
    [({"token": "wrong"}, "401"), ({"tenant": "north"}, "403"), ({"ca": False}, "CERTIFICATE_VERIFY_FAILED")],
    ids=["token", "tenant", "certificate"],
)
def test_what_is_refused_is_unknown_and_named(change: dict[str, Any], told: str, tenants: Mapping[str, str], pem: Path) -> None:
    given = options(pem, **{k: v for k, v in change.items() if k != "ca"})
    if "ca" in change:
        given.pop("ca_file")
    with Front(pem, TOKEN, tenants) as front:
        load = read(front.url, **given)
    assert known(load) == set()
    assert told in load.running.source, load.running.source
    assert front.passed == 0


def test_a_scope_lets_an_operator_of_that_namespace_in_and_no_other(tenants: Mapping[str, str], pem: Path) -> None:
    """Every selector of every query names the namespaces that the install watches, so a proxy that enforces them lets all pass."""
    with Front(pem, TOKEN, tenants, namespace="team") as front:
        scoped = read(front.url, namespaces=("team",), **options(pem))
        assert front.refused == [] and front.passed > 20
        everywhere = read(front.url, **options(pem))
    assert scoped.running.value == 20.0 and len(known(scoped)) > 10
    assert known(everywhere) == set() and "403" in everywhere.running.source
