"""smg (Shepherd Model Gateway): arguments, probes and drain as the router of a slice.

"Measured" means smg 1.13.0 before vLLM 0.32.0 in pods. Without the annotation below on the engine pods smg answers 200
and hands nothing over: decode recomputes every prompt. The annotation names the connector that hands over, NixlConnector,
also under MultiConnector (measured).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pd_operator.core.capabilities import Program
from pd_operator.core.names import MODEL
from pd_operator.upstream.flags import with_defaults

TESTED: Final = "1.13.0"
COMMAND: Final = ["smg"]
PORT: Final = 30000
METRICS_PORT: Final = 29000
SHUTDOWN_GRACE: Final = 180  # seconds; smg finishes its streams in that time
GRACE_PERIOD: Final = SHUTDOWN_GRACE + 10  # its listener stays open for 5 s after SIGTERM (measured)
PRE_STOP: Final = 0  # that window is enough for the endpoint's removal (measured)
ENGINE_ANNOTATIONS: Final[Mapping[str, str]] = {"smg.ai/kv-connector": "NixlConnector"}
OWNED_FLAGS: Final = frozenset(
    {
        "--host", "--port", "--pd-disaggregation", "--backend", "--service-discovery", "--service-discovery-namespace",
        "--service-discovery-port", "--prefill-selector", "--decode-selector", "--selector", "--prefill", "--decode",
        "--worker-urls",
        "--prometheus-host", "--prometheus-port", "--shutdown-grace-period-secs", "--kv-connector-annotation",
    }
)  # fmt: skip
FORBIDDEN_FLAGS: Final = (
    ("--api-key", "an argument is readable by everyone who may read pods; put authentication in front of the Service"),
)


def program(version: str) -> Program:
    """smg at a version."""
    return Program("smg", version, version == TESTED, OWNED_FLAGS, frozenset(), FORBIDDEN_FLAGS)


def arguments(
    namespace: str,
    prefill: Mapping[str, str],
    decode: Mapping[str, str],
    engine_port: int,
    user: Sequence[str],
    limits: Sequence[tuple[str, ...]] = (),
) -> list[str]:
    """Arguments of `smg`. Each try re-runs prefill and sends decode twice, so retries are bounded at 2 (measured)."""
    owned = ["launch", "--host", "0.0.0.0", "--port", str(PORT), "--pd-disaggregation", "--backend", "vllm"]
    owned += ["--service-discovery", "--service-discovery-namespace", namespace, "--service-discovery-port", str(engine_port)]
    owned += ["--prefill-selector", *selector(prefill), "--decode-selector", *selector(decode)]
    owned += ["--prometheus-host", "0.0.0.0", "--prometheus-port", str(METRICS_PORT)]
    owned += ["--shutdown-grace-period-secs", str(SHUTDOWN_GRACE)]
    defaults = [
        ("--disable-tokenizer-autoload",),
        ("--retry-max-retries", "2"),
        # A dead engine is dropped at once by its pod's readiness; these are for one that hangs. A busy one must not be taken for
        # that: on a starved machine two checks of 3 s took the last worker of a role away, and every request got 503 (measured).
        ("--health-check-interval-secs", "5"),
        ("--health-failure-threshold", "3"),
        ("--health-success-threshold", "1"),
        ("--health-check-timeout-secs", "5"),
    ]
    return [*owned, *with_defaults([*defaults, *limits], user)]


def selector(labels: Mapping[str, str]) -> list[str]:
    """A selector as separate words, ANDed, equality only."""
    return [f"{key}={value}" for key, value in sorted(labels.items())]


def probes() -> dict[str, Any]:
    """/readiness is 200 only with a healthy prefill and a healthy decode; never a start-up probe on it."""
    live = {"path": "/liveness", "port": "http", "scheme": "HTTP"}
    ready = {"path": "/readiness", "port": "http", "scheme": "HTTP"}
    return {
        "startupProbe": {"httpGet": live, "periodSeconds": 1, "timeoutSeconds": 3, "failureThreshold": 120},
        "readinessProbe": {"httpGet": ready, "periodSeconds": 2, "timeoutSeconds": 3, "failureThreshold": 2},
        "livenessProbe": {"httpGet": live, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
    }


def keyed() -> list[tuple[str, ...]]:
    """Flags where engines ask for a key. smg has none of its own: its look at /v1/models of an engine is refused, and it answers
    requests for a model that it does not know with 404 (measured). So the engines' pods say the name."""
    return [("--model-id-from", f"annotation:{MODEL}")]


def environment(engine_api_key: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Environment; smg forwards the client's Authorization header, so it needs no key."""
    del engine_api_key
    return [{"name": "HOME", "value": "/tmp"}, {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}]
