"""Log lines as JSON, one object a line: ts, level, logger, msg, and inside a reconcile key and reconcile_id.

Nothing may log an object's body: users put secrets into specs. Libraries that do so at DEBUG are pinned at INFO.
"""

from __future__ import annotations

import json
import logging
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

# kopf logs whole bodies and diffs at DEBUG, the Kubernetes client whole responses.
PINNED = {"kopf": logging.INFO, "kubernetes": logging.INFO, "aiohttp.access": logging.WARNING, "asyncio": logging.INFO}
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_key: ContextVar[str] = ContextVar("pd_key", default="")
_reconcile_id: ContextVar[str] = ContextVar("pd_reconcile_id", default="")


@contextmanager
def reconciling(key: tuple[str, str]) -> Iterator[str]:
    """All log lines inside carry the key and a fresh reconcile id, which is yielded."""
    reconcile_id = uuid.uuid4().hex[:12]
    key_token = _key.set("/".join(key))
    id_token = _reconcile_id.set(reconcile_id)
    try:
        yield reconcile_id
    finally:
        _reconcile_id.reset(id_token)
        _key.reset(key_token)


class JsonFormatter(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "msg": record.getMessage(),
        }
        key = _key.get() or _kopf_key(record)
        if key:
            line["key"] = key
        if _reconcile_id.get():
            line["reconcile_id"] = _reconcile_id.get()
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _kopf_key(record: logging.LogRecord) -> str:
    """kopf attaches a reference to the object that a line is about."""
    ref = getattr(record, "k8s_ref", None)
    return f"{ref.get('namespace', '')}/{ref.get('name', '')}" if isinstance(ref, dict) else ""


def setup(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send all logging to `stream` (default: standard error) as JSON.

    Raises:
        ValueError: `level` is not one of LEVELS.
    """
    if level.upper() not in LEVELS:
        raise ValueError(f"log level {level!r}: one of {', '.join(LEVELS)} is accepted")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name, pinned in PINNED.items():
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(max(pinned, root.level))
    # One line per event of each object would be all that one sees.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
