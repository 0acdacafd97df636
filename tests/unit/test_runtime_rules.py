"""Rules that keep kopf's and the clients' traps out, checked on the source itself."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import kopf
import pytest

from pd_operator.controller.watch import CHILD_KINDS, OPTIONAL_KINDS, OUR_KINDS, EventStreams, event_registry, kopf_settings
from pd_operator.core.names import DEPLOYMENT
from pd_operator.core.observed import ChildFact
from pd_operator.kube.kinds import KINDS
from pd_operator.kube.store import Stores

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "operator" / "pd_operator"


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> set[str]:
    """First parts of all imported modules, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("kopf", r"controller/.*|settings\.py"),
        ("kubernetes", r"kube/.*"),
        ("kubernetes_asyncio", r"(?!)"),
        ("pykube", r"(?!)"),
    ],
)
def test_a_library_is_imported_only_where_it_belongs(library: str, allowed: str) -> None:
    users = [name for name, tree in modules() if library in imports(tree)]
    assert [name for name in users if not re.fullmatch(allowed, name)] == []
    if allowed != r"(?!)":
        assert users


def test_only_event_and_login_handlers_are_given_to_kopf() -> None:
    """index: quadratic start, ghosts. timer, daemon, delete: finalizers. create, update, resume, field: annotations."""
    used: set[str] = set()
    for _, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                if text.startswith("kopf.on."):
                    used.add(text)
                assert text not in {"kopf.index", "kopf.timer", "kopf.daemon", "kopf.subhandler", "kopf.register", "kopf.adopt"}
                assert not text.startswith("patch."), "kopf's patch object writes to the user's object"
    assert used == {"kopf.on.event", "kopf.on.login"}


async def test_the_registry_holds_two_event_handlers_and_one_login() -> None:
    registry = event_registry(None, EventStreams((None,)), Stores(), lambda key: None)  # type: ignore[arg-type]
    assert len(registry._watching.get_all_handlers()) == 2
    for other in (registry._indexing, registry._spawning, registry._changing, registry._webhooks):
        assert list(other.get_all_handlers()) == []
    assert len(registry._activities._handlers) == 1
    # Nothing was registered globally either.
    default = kopf.get_default_registry()
    assert list(default._watching.get_all_handlers()) == []


def test_kopf_is_a_pure_event_source() -> None:
    settings = kopf_settings()
    assert settings.posting.enabled is False
    assert settings.peering.standalone is True
    assert settings.scanning.disabled is True
    assert settings.queueing.worker_limit is None  # kopf#1243: a limit below the number of objects is a deadlock
    assert settings.watching.inactivity_timeout == 70
    assert settings.watching.server_timeout == 290
    assert settings.watching.chunk_size is None  # an expired token ends the operator
    assert settings.watching.initial_streaming is False
    assert settings.networking.request_timeout == 30
    assert settings.networking.enforce_retry_after is True
    assert settings.process.ultimate_exiting_timeout == 25


def test_every_watched_kind_is_known() -> None:
    assert {*CHILD_KINDS, *OPTIONAL_KINDS, *OUR_KINDS, "Pod"} <= set(KINDS)
    assert len({*CHILD_KINDS, *OPTIONAL_KINDS}) == len(CHILD_KINDS) + len(OPTIONAL_KINDS)
    assert {name for name, kind in KINDS.items() if kind.optional} == {*OPTIONAL_KINDS, "HorizontalPodAutoscaler"}


def test_the_source_root_is_no_package() -> None:
    """`operator` is a module of the standard library: with an __init__.py here, it would be shadowed."""
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_clients_that_kopf_would_import_too_are_not_installed() -> None:
    """kopf imports every client it finds; a second one costs tens of MiB."""
    installed = {distribution.metadata["Name"].lower() for distribution in metadata.distributions()}
    assert installed.isdisjoint({"kubernetes-asyncio", "kubernetes_asyncio", "pykube-ng", "pykube"})


@pytest.mark.parametrize("pattern", [r"\btime\.sleep\(", r"\brequests\.(get|post)\(", r"asyncio\.get_event_loop\("])
def test_nothing_blocks_the_event_loop(pattern: str) -> None:
    for folder in ("kube", "controller"):
        for path in (PACKAGE / folder).glob("*.py"):
            assert not re.search(pattern, path.read_text(encoding="utf-8")), path


async def test_handlers_only_enqueue_and_never_write() -> None:
    keys: list[tuple[str, str]] = []
    stores = Stores()
    registry = event_registry(None, EventStreams((None,)), stores, keys.append)  # type: ignore[arg-type]
    deployment, pool = (handler.fn for handler in registry._watching.get_all_handlers())
    for kind in (None, "ADDED", "MODIFIED"):
        assert await deployment(type=kind, namespace="ns", name="chat", labels={}, meta={"resourceVersion": "5"}) is None
        assert stores.deployments == {("ns", "chat")}
    assert await deployment(type="DELETED", namespace="ns", name="chat", labels={}, meta={"resourceVersion": "5"}) is None
    assert stores.deployments == set()
    assert await pool(type="ADDED", namespace="ns", name="p", labels={"pdserve.dev/deployment": "other"}, meta={}) is None
    assert await pool(type="ADDED", namespace="ns", name="p", labels={}, meta={}) is None
    assert keys == [("ns", "chat")] * 4 + [("ns", "other")]
    assert all(asyncio.iscoroutinefunction(handler) for handler in (deployment, pool))  # sync ones take a thread each


async def test_an_event_that_shows_what_was_read_already_is_no_news() -> None:
    """After a start kopf lists what the workers may have looked at: a second look at each object would find nothing."""
    keys: list[tuple[str, str]] = []
    stores = Stores()
    registry = event_registry(None, EventStreams((None,)), stores, keys.append)  # type: ignore[arg-type]
    deployment, pool = (handler.fn for handler in registry._watching.get_all_handlers())
    stores.read["ns", "chat"] = "5"

    async def told(type_: str | None, version: str) -> bool:
        keys.clear()
        await deployment(type=type_, namespace="ns", name="chat", labels={}, meta={"resourceVersion": version})
        return bool(keys)

    assert not await told(None, "5") and not await told("MODIFIED", "5") and stores.deployments == {("ns", "chat")}
    assert await told("MODIFIED", "6") and await told(None, "4") and await told("DELETED", "5")

    async def pool_told(type_: str | None, version: str) -> bool:
        keys.clear()
        await pool(type=type_, namespace="ns", name="chat-decode", labels={DEPLOYMENT: "chat"}, meta={"resourceVersion": version})
        return bool(keys)

    assert await pool_told(None, "7"), "our own watch has not shown it"
    fact = ChildFact("PDPool", "ns", "chat-decode", "u", labels={DEPLOYMENT: "chat"}, resource_version="7")
    stores.children.put("pools", ("PDPool", "ns", "chat-decode"), fact)
    assert not await pool_told(None, "7") and await pool_told(None, "8") and await pool_told("MODIFIED", "7")
