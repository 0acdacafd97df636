"""vllm-router: arguments, probes and drain as the router of a slice.

"Measured" means vllm-router 0.1.17. It retries nothing in P/D mode, refuses connections at once on SIGTERM, and its watch
loop waits for each new pod's /health, so that wait is kept short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pd_operator.core.capabilities import Program
from pd_operator.upstream import smg
from pd_operator.upstream.flags import with_defaults

TESTED: Final = "0.1.17"
COMMAND: Final = ["vllm-router"]
PORT: Final = smg.PORT
METRICS_PORT: Final = smg.METRICS_PORT
PRE_STOP: Final = 10  # the listener closes at once on SIGTERM (measured): endpoint removal has to win the race
GRACE_PERIOD: Final = PRE_STOP + 190
OWNED_FLAGS: Final = frozenset(
    {
        "--host", "--port", "--vllm-pd-disaggregation",
        "--service-discovery", "--service-discovery-namespace", "--service-discovery-port",
        "--prefill-selector", "--decode-selector", "--selector", "--prefill", "--decode", "--worker-urls", "--prometheus-host",
        "--prometheus-port", "--kv-connector",
    }
)  # fmt: skip
FORBIDDEN_FLAGS: Final = smg.FORBIDDEN_FLAGS


def program(version: str) -> Program:
    """vllm-router at a version."""
    return Program("vllm-router", version, version == TESTED, OWNED_FLAGS, frozenset(), FORBIDDEN_FLAGS)


def arguments(
    namespace: str,
    prefill: Mapping[str, str],
    decode: Mapping[str, str],
    engine_port: int,
    user: Sequence[str],
    limits: Sequence[tuple[str, ...]] = (),
) -> list[str]:
    """Arguments of `vllm-router`.

    cache_aware, its default policy, sends each prompt to every engine's /render or /tokenize first (measured: 4 to 8
    extra requests with 4 pods), hence round_robin unless the user chooses.
    """
    owned = ["--host", "0.0.0.0", "--port", str(PORT), "--vllm-pd-disaggregation"]
    owned += ["--service-discovery", "--service-discovery-namespace", namespace, "--service-discovery-port", str(engine_port)]
    owned += ["--prefill-selector", *smg.selector(prefill), "--decode-selector", *smg.selector(decode)]
    owned += ["--prometheus-host", "0.0.0.0", "--prometheus-port", str(METRICS_PORT)]
    defaults = [
        ("--policy", "round_robin"),
        ("--worker-startup-timeout-secs", "5"),
        ("--worker-startup-check-interval", "1"),
        # A busy engine must not be taken for one that hangs, as with smg.
        ("--health-check-interval-secs", "5"),
        ("--health-success-threshold", "1"),
        ("--health-failure-threshold", "3"),
        ("--health-check-timeout-secs", "5"),
    ]
    return [*owned, *with_defaults([*defaults, *limits], user)]


probes = smg.probes


def keyed() -> list[tuple[str, ...]]:
    """Flags where engines ask for a key: none, it asks no engine for the model's name."""
    return []


def environment(engine_api_key: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Environment. It replaces the client's Authorization by `Bearer $OPENAI_API_KEY` (measured): give it the engines' key."""
    env = smg.environment(None)
    return env if engine_api_key is None else [*env, {"name": "OPENAI_API_KEY", "valueFrom": dict(engine_api_key)}]
