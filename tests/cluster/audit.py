"""Read the API server's audit log: which calls a client really made."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def events(
    log: Path, *, user: str | None = None, agent: str | None = None, verbs: tuple[str, ...] = ()
) -> Iterator[dict[str, Any]]:
    """The finished requests in the order they were logged, filtered by exact user name, by a part of the user agent, by verbs.

    One event is one request: verb, user.username, userAgent, objectRef, responseStatus.code, requestReceivedTimestamp
    (https://kubernetes.io/docs/reference/config-api/apiserver-audit.v1/). A watch counts once, when it begins.
    """
    seen: set[str] = set()
    with log.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):  # the line is being written
                break
            event = json.loads(line)
            if event["auditID"] in seen:
                continue
            seen.add(event["auditID"])
            if user is not None and event["user"].get("username") != user:
                continue
            if agent is not None and agent not in event.get("userAgent", ""):
                continue
            if verbs and event["verb"] not in verbs:
                continue
            yield event


def mark() -> str:
    """The present time in the form of `requestReceivedTimestamp`, for comparing as text (UTC, microseconds)."""
    now = time.time_ns() // 1000
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 1_000_000)) + f".{now % 1_000_000:06d}Z"
