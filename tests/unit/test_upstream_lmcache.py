"""What the LMCache server and its coordinator are given: exact arguments, memory, probes, environment."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from pd_operator.api.scalars import quantity
from pd_operator.api.types import LMCacheSpec
from pd_operator.upstream import lmcache

GIB = 1024**3
SHARED = Decimal(2 * GIB)


def cache(**fields: Any) -> LMCacheSpec:
    return LMCacheSpec.model_validate(fields)


def after(args: list[str], flag: str) -> str:
    return args[args.index(flag) + 1]


def test_server() -> None:
    assert lmcache.server_arguments(cache(), "http://c:9300") == [
        "server",
        *["--host", "127.0.0.1", "--port", "5555", "--http-host", "0.0.0.0", "--http-port", "8080"],
        *["--l1-size-gb", "20", "--l1-init-size-gb", "20", "--eviction-policy", "LRU"],
        *["--chunk-size", "256", "--instance-id", "$(POD_NAME)", "--supported-transfer-mode", "auto"],
    ]


def test_server_with_peers() -> None:
    args = lmcache.server_arguments(cache(p2p={"enabled": True}), "http://c:9300")
    assert after(args, "--host") == "0.0.0.0"  # peers dial it
    assert args[args.index("--coordinator-url") :] == [
        *["--coordinator-url", "http://c:9300", "--coordinator-advertise-ip", "$(POD_IP)", "--coordinator-heartbeat-interval", "2"],
        *["--p2p-advertise-url", "$(POD_IP):5700", "--p2p-listen-url", "0.0.0.0:5700"],
        *["--p2p-lookup-timeout", "5", "--p2p-load-timeout", "10", "--p2p-transfer-engine", "nixl", "--l1-align-bytes", "65536"],
    ]


def test_without_peers_the_data_port_stays_on_loopback_and_no_coordinator_is_named() -> None:
    args = lmcache.server_arguments(cache(), "http://c:9300")
    assert after(args, "--host") == "127.0.0.1" and not [a for a in args if "coordinator" in a or "p2p" in a]


def test_coordinator() -> None:
    assert lmcache.coordinator_arguments(cache(chunkSize=64)) == [
        "coordinator",
        *["--host", "0.0.0.0", "--port", "9300", "--instance-timeout", "10", "--health-check-interval", "2", "--chunk-size", "64"],
    ]


def test_servers_and_coordinator_cut_the_same_chunks() -> None:
    spec = cache(chunkSize=1024, p2p={"enabled": True})
    server, coordinator = lmcache.server_arguments(spec, "u"), lmcache.coordinator_arguments(spec)
    assert after(server, "--chunk-size") == after(coordinator, "--chunk-size") == "1024"


@pytest.mark.parametrize(
    ("transfer", "server", "engine", "isolated"),
    [("Engine", "auto", "engine_driven", False), ("Server", "lmcache_driven", "lmcache_driven", True)],
)
def test_both_sides_agree_on_who_copies(transfer: str, server: str, engine: str, isolated: bool) -> None:
    spec = cache(transfer=transfer)
    args = lmcache.server_arguments(spec, "u")
    extra = lmcache.connector(spec, load_only=False)["kv_connector_extra_config"]
    assert after(args, "--supported-transfer-mode") == server and extra["lmcache.mp.mp_transfer_mode"] == engine
    assert ("--isolated-ipc" in args) is isolated and extra.get("lmcache.mp.isolated_ipc", False) is isolated
    names = {var["name"] for layer in lmcache.environment(spec) for var in layer}
    assert ("NVIDIA_VISIBLE_DEVICES" in names) is isolated  # it opens the engine's memory, without claiming the device


@pytest.mark.parametrize(
    ("size", "gb", "initial"),
    [
        ("64Mi", "0.0625", "1"),
        ("256Mi", "0.25", "1"),
        ("1Gi", "1", "1"),
        ("1536Mi", "1.5", "1"),
        ("20Gi", "20", "20"),
        ("1Ti", "1024", "20"),
    ],
)
def test_sizes(size: str, gb: str, initial: str) -> None:
    """The size may be a fraction, the initial size may not."""
    args = lmcache.server_arguments(cache(l1Size=size), "u")
    assert after(args, "--l1-size-gb") == gb and after(args, "--l1-init-size-gb") == initial


@pytest.mark.parametrize(
    ("size", "request_", "limit"), [("1Gi", "8Gi", "12Gi"), ("20Gi", "27Gi", "41472Mi"), ("256Mi", "7424Mi", "11136Mi")]
)
def test_memory_is_the_tier_an_overhead_and_the_shared_memory(size: str, request_: str, limit: str) -> None:
    found = lmcache.resources(cache(l1Size=size), SHARED)
    assert found["requests"]["memory"] == request_ and found["limits"] == {"memory": limit}
    assert quantity(request_) == quantity(size) + lmcache.OVERHEAD + SHARED


@pytest.mark.parametrize(("size", "seconds"), [("64Mi", 180), ("20Gi", 220), ("1200Gi", 2580)])
def test_the_startup_probe_waits_longer_for_a_larger_tier(size: str, seconds: int) -> None:
    """The port opens only after all of it is pinned, at 1 GB/s or less."""
    probe = lmcache.probes(cache(l1Size=size))["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == seconds
    assert seconds >= quantity(size) / 10**9


def test_probes() -> None:
    assert {p["httpGet"]["path"] for p in lmcache.probes(cache()).values()} == {"/healthcheck"}
    assert {p["httpGet"]["port"] for p in lmcache.probes(cache()).values()} == {"lmc-http"}
    assert {p["httpGet"]["path"] for p in lmcache.coordinator_probes().values()} == {"/healthz"}


@pytest.mark.parametrize("spec", [cache(), cache(p2p={"enabled": True}), cache(transfer="Server")])
def test_environment(spec: LMCacheSpec) -> None:
    owned, defaults = lmcache.environment(spec)
    assert {var["name"] for var in owned} == lmcache.OWNED_ENV
    values = {var["name"]: var["value"] for var in defaults}
    assert values["LMCACHE_TRACK_USAGE"] == "false" and values["DO_NOT_TRACK"] == "1"  # it calls home otherwise
    assert values["NUMBA_CACHE_DIR"].startswith("/tmp/")  # the root file system is read-only
    assert ("UCX_NET_DEVICES" in values) is spec.p2p.enabled


@pytest.mark.parametrize(
    ("version", "load_only"), [("0.5.5", False), ("0.5.6", True), ("0.6.0", True), ("0.5.6rc1", False), ("x", False)]
)
def test_versions_that_can_load_only(version: str, load_only: bool) -> None:
    assert lmcache.load_only_child(version) is load_only
    assert lmcache.connector(cache(), load_only)["kv_role"] == ("kv_consumer" if load_only else "kv_both")
