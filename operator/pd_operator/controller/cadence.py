"""Cadence: the pace of what the leader does again and again, the scaling tick and the look at the evidence."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable


async def while_leading(
    once: Callable[[], Awaitable[None]],
    forget: Callable[[], None],
    is_leader: Callable[[], bool],
    *,
    tick: float,
    logger: logging.Logger,
    failed: str,
) -> None:
    """`once` every `tick` seconds until cancelled; one that is late is not made up for, one that fails is logged as `failed`.

    A replica that does not lead forgets instead.
    """
    due = time.monotonic()
    while True:
        due = max(due + tick, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        if not is_leader():
            forget()
            continue
        try:
            await once()
        except Exception:
            logger.exception(failed)
