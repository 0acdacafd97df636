"""The decision log and the source of signals, as the settings ask for them."""

from __future__ import annotations

import logging
import logging.handlers

from pd_operator.settings import Settings
from pd_operator.signals.fleet import Fleet
from pd_operator.signals.prometheus import Options, Prometheus
from pd_operator.signals.scrape import PodScrape
from pd_operator.signals.source import Both

MAX_BYTES = 64 * 2**20  # of one file; a decision is about 3 KB
BACKUPS = 1


class DecisionLog:
    """One line of JSON for each decision, in a file that is rotated once it is large. `pdd-simulate replay` reads it."""

    def __init__(self, path: str) -> None:
        self._handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=MAX_BYTES, backupCount=BACKUPS, encoding="utf-8", delay=True
        )
        self._handler.setFormatter(logging.Formatter("%(message)s"))

    def write(self, line: str) -> None:
        """Append one line. A disk that is full must not stop the tick: the logging module says so on stderr."""
        self._handler.emit(logging.LogRecord("decisions", logging.INFO, "", 0, line, None, None))


def new_source(fleet: Fleet, settings: Settings) -> Both:
    """The source of signals that the settings name.

    Raises:
        ValueError: a matcher of Prometheus that the label contract owns.
    """
    signals = settings.signals
    if signals.source == "podScrape":
        return PodScrape(fleet)
    asked = signals.prometheus
    options = Options(
        url=asked.url,
        namespaces=settings.watch_namespaces,
        matchers=asked.matchers,
        headers=asked.headers,
        token_file=asked.token_file,
        ca_file=asked.ca_file,
        certificate_file=asked.certificate_file,
        key_file=asked.key_file,
        recorded=asked.recorded,
    )
    return Prometheus(fleet, options)
