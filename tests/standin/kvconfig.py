"""The value of vLLM's --kv-transfer-config, as far as NIXL (pull) and LMCacheMP go.

Keys, defaults and refusals as in vllm/config/kv_transfer.py and in the connectors of vLLM 0.32; children of a
MultiConnector inherit only `engine_id`.
"""

import uuid
from dataclasses import dataclass
from typing import Any

ROLES = ("kv_producer", "kv_consumer", "kv_both")
KEYS = {
    "kv_connector",
    "engine_id",
    "kv_buffer_device",
    "kv_role",
    "kv_port",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "enable_permute_local_kv",
    "kv_load_failure_policy",
}
NIXL_NAMES = ("NixlConnector", "NixlPullConnector")
LMCACHE_NAME = "LMCacheMPConnector"


class KvConfigError(ValueError):
    """vLLM would refuse this configuration."""


@dataclass(frozen=True)
class NixlSettings:
    """What the NIXL connector reads of its extra configuration."""

    lease_duration: float = 30.0  # seconds; D sends a heartbeat every sixth of it, each extends it by two thirds
    enforce_handshake_compat: bool = True


@dataclass(frozen=True)
class LMCacheSettings:
    """What LMCacheMPConnector reads of its extra configuration."""

    host: str = "localhost"
    port: int = 5555
    mq_timeout: float = 300.0
    heartbeat_interval: float = 10.0
    lazy_threshold: int = 0  # with lmcache.mp.lazy_offload: requests that have ended before the oldest is stored


@dataclass(frozen=True)
class KvConfig:
    """A checked configuration; `none()` is an engine without one."""

    engine_id: str
    role: str | None = None
    policy: str = "fail"
    multi: bool = False
    nixl: NixlSettings | None = None
    lmcache: LMCacheSettings | None = None

    @classmethod
    def none(cls) -> "KvConfig":
        """No --kv-transfer-config."""
        return cls(engine_id=str(uuid.uuid4()))

    @property
    def connected(self) -> bool:
        """True if any connector is configured."""
        return self.role is not None

    @property
    def consumer(self) -> bool:
        """True if the top-level role consumes KV."""
        return self.role in ("kv_consumer", "kv_both")

    @property
    def fails_hard(self) -> bool:
        """True for the combination in which one failed load ends the whole engine of vLLM 0.32 (vLLM issue 53049)."""
        return self.multi and self.policy == "fail" and self.lmcache is not None


def _checked(config: Any, where: str) -> dict[str, Any]:
    if not isinstance(config, dict):
        raise KvConfigError(f"{where} must be an object")
    unknown = set(config) - KEYS
    if unknown:
        raise KvConfigError(f"{where}: unexpected keys {sorted(unknown)}")
    connector, role = config.get("kv_connector"), config.get("kv_role")
    if role is not None and role not in ROLES:
        raise KvConfigError(f"Unsupported kv_role: {role}. Supported roles are {ROLES}")
    if connector is not None and role is None:
        raise KvConfigError(f"Please specify kv_role when kv_connector is set, supported roles are {ROLES}")
    policy = config.get("kv_load_failure_policy", "fail")
    if policy not in ("recompute", "fail"):
        raise KvConfigError(f"{where}: kv_load_failure_policy must be 'recompute' or 'fail', not {policy!r}")
    if not isinstance(config.get("kv_connector_extra_config", {}), dict):
        raise KvConfigError(f"{where}: kv_connector_extra_config must be an object")
    return config


def parse(config: Any) -> KvConfig:
    """Checks a decoded --kv-transfer-config.

    Raises KvConfigError for what vLLM refuses, and for connectors that the stand-in does not have.
    """
    top = _checked(config, "--kv-transfer-config")
    connector = top.get("kv_connector")
    extra = top.get("kv_connector_extra_config", {})
    multi = connector == "MultiConnector"
    children = [top]
    if multi:
        children = [_checked(child, f"connectors[{n}]") for n, child in enumerate(extra.get("connectors") or [])]
        if not children:
            raise KvConfigError("MultiConnector needs kv_connector_extra_config.connectors")
    nixl: NixlSettings | None = None
    lmcache: LMCacheSettings | None = None
    for child in children:
        own = child.get("kv_connector_extra_config", {})
        if child.get("kv_connector") in NIXL_NAMES:
            nixl = NixlSettings(float(own.get("kv_lease_duration", 30)), bool(own.get("enforce_handshake_compat", True)))
        elif child.get("kv_connector") == LMCACHE_NAME:
            lmcache = LMCacheSettings(
                host=str(own.get("lmcache.mp.host", "localhost")).removeprefix("tcp://"),
                port=int(own.get("lmcache.mp.port", 5555)),
                mq_timeout=float(own.get("lmcache.mp.mq_timeout", 300.0)),
                heartbeat_interval=float(own.get("lmcache.mp.heartbeat_interval", 10.0)),
                lazy_threshold=int(own.get("lmcache.mp.lazy_offload_threshold", 100)) if own.get("lmcache.mp.lazy_offload") else 0,
            )
        elif child.get("kv_connector") is not None:
            raise KvConfigError(f"the stand-in has no connector {child.get('kv_connector')!r}")
    return KvConfig(
        engine_id=str(top.get("engine_id") or uuid.uuid4()),
        role=top.get("kv_role") if connector else None,
        policy=top.get("kv_load_failure_policy", "fail"),
        multi=multi,
        nixl=nixl,
        lmcache=lmcache,
    )
