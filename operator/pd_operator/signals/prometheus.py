"""prometheus: about twenty queries a tick for the whole cluster, whatever the number of pods. For fleets beyond podScrape.

prometheus-api-client asks, tenacity asks once more when the server could not be reached or failed, and all of it happens in a
thread, within one deadline for the tick. Nothing is believed of a group that is not fully there: each ready pod must have been
scraped lately, and a pod that only claims to be ours makes its group unknown.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import requests
from prometheus_api_client import PrometheusConnect
from prometheus_api_client.exceptions import PrometheusApiClientException
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from pd_operator.core.evidence.counters import Counters
from pd_operator.signals.answers import PODS, Answers, Query, Reader, Row, queries
from pd_operator.signals.fleet import Fleet, Key
from pd_operator.signals.formulas import load
from pd_operator.signals.http import BoundedSession
from pd_operator.signals.load import Load
from pd_operator.signals.pages import page_queries, pages_of
from pd_operator.signals.roll import Roll
from pd_operator.upstream import signals_labels as labels
from pd_operator.upstream.signals_promql import FRESH, WINDOW, Expressions

LOG = logging.getLogger(__name__)
DEADLINE: Final = 10.0  # seconds for all queries of a tick, of 15
TIMEOUT: Final = 5.0  # seconds for one query
MAX_BYTES: Final = 64 * 2**20  # of one answer; tests/bench/signals.py has what 10,000 pods take
TRIES: Final = 2
PAUSE: Final = 0.2  # seconds between them


@dataclass(frozen=True, slots=True)
class Options:
    """Where Prometheus is and how to ask. Credentials are files, read at each tick, so that they may rotate."""

    url: str
    namespaces: tuple[str, ...] = ()  # empty = all
    matchers: Mapping[str, str] = field(default_factory=dict)  # external labels, e.g. cluster
    headers: Mapping[str, str] = field(default_factory=dict)  # e.g. X-Scope-OrgID of the tenant
    token_file: str = ""
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    recorded: bool = False  # read the chart's recording rules
    window: int = WINDOW
    fresh: int = FRESH
    timeout: float = TIMEOUT
    deadline: float = DEADLINE


class Prometheus:
    """Asks Prometheus at each read. See Source."""

    def __init__(self, fleet: Fleet, options: Options) -> None:
        """Raises ValueError for a matcher that the label contract owns."""
        matchers = labels.matchers(options.namespaces, options.matchers)
        self._fleet = fleet
        self._options = options
        self._expressions = Expressions(matchers, options.window, options.fresh, options.recorded)
        self._roll = Roll(options.fresh)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prometheus")
        self._last: asyncio.Future[Answers] | None = None
        # Counters of pods are asked for in a thread of their own: a slow answer must not hold up a scaling tick.
        self._pages_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prometheus-pages")
        self._last_pages: asyncio.Future[Answers] | None = None

    async def run(self) -> None:
        """Nothing goes on between reads."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Let the thread end; a query in flight ends by its own time limit."""
        for thread in (self._thread, self._pages_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    async def read(self, now: float) -> Mapping[Key, Load]:
        """See Source. Takes at most the deadline, and a second for the rest."""
        fleet = self._fleet()
        self._roll.call(fleet, now)
        asked = queries(self._expressions, {d.percentile for d in fleet})
        answers = await self._answers(asked)
        for name, why in answers.failures.items():
            LOG.info("query %s to %s: %s", name, self._options.url, why)
        reader = Reader(asked, answers, self._roll, f"Prometheus {self._options.url}", now)
        return {deployment.key: load(deployment, reader.groups(deployment)) for deployment in fleet if deployment.scales}

    async def counters(self, now: float) -> Mapping[Key, tuple[Counters, ...]]:
        """See Pages. Takes at most the deadline, and a second for the rest."""
        fleet = self._fleet()
        asked = page_queries(self._expressions)
        if self._last_pages is not None and not self._last_pages.done():
            answers = Answers(failures={q.name: "the queries of the last look still run" for q in asked})
        else:
            self._last_pages = asyncio.get_running_loop().run_in_executor(self._pages_thread, self._ask, asked)
            answers = await self._waited(self._last_pages, asked)
        for name, why in answers.failures.items():
            LOG.info("query %s of each pod to %s: %s", name, self._options.url, why)
        return pages_of(fleet, asked, answers)

    async def _answers(self, asked: Sequence[Query]) -> Answers:
        if self._last is not None and not self._last.done():
            return Answers(failures={q.name: "the queries of the last tick still run" for q in asked})
        self._last = asyncio.get_running_loop().run_in_executor(self._thread, self._ask, asked)
        return await self._waited(self._last, asked)

    async def _waited(self, answers: asyncio.Future[Answers], asked: Sequence[Query]) -> Answers:
        limit = self._options.deadline + 1
        try:
            return await asyncio.wait_for(asyncio.shield(answers), limit)
        except TimeoutError:
            return Answers(failures={q.name: f"no answer within {limit:g} s" for q in asked})

    def _ask(self, asked: Sequence[Query]) -> Answers:
        """All queries, one after the other. In the thread."""
        end = time.monotonic() + self._options.deadline
        rows: dict[str, list[Row]] = {}
        failures: dict[str, str] = {}
        evaluated = 0.0
        try:
            session = self._session()
        except OSError as error:
            return Answers(failures={q.name: f"{error.filename}: {error.strerror}" for q in asked})
        # No retries of its own: they would not know of the deadline.
        with PrometheusConnect(self._options.url, session=session, retry=0, method="POST") as client:
            for query in asked:
                try:
                    answer = self._query(client, session, query.expression, end)
                    rows[query.name] = [(r["metric"], float(r["value"][1])) for r in answer]
                    evaluated = evaluated or next((float(r["value"][0]) for r in answer), 0.0)
                except _FAILURES as error:
                    failures[query.name] = _told(error)
                    if query.name == PODS:  # without the roll call nothing is known, whatever the others say
                        break
        return Answers(rows, failures, evaluated)

    def _session(self) -> BoundedSession:
        """A session with the credentials as their files are now. Raises OSError for a file that cannot be read."""
        options = self._options
        session = BoundedSession(MAX_BYTES)
        session.trust_env = False  # a proxy or a .netrc of the image must not get the token
        session.headers.update(options.headers)
        if options.token_file:
            session.headers["Authorization"] = f"Bearer {Path(options.token_file).read_text(encoding='utf-8').strip()}"
        for path in filter(None, (options.ca_file, options.certificate_file, options.key_file)):
            Path(path).read_bytes()  # requests' own message for a missing file names no reason
        session.verify = options.ca_file or True
        if options.certificate_file:
            session.cert = (options.certificate_file, options.key_file or options.certificate_file)
        return session

    def _query(self, client: PrometheusConnect, session: BoundedSession, query: str, end: float) -> list[Any]:
        """One query, tried twice as long as there is time."""

        def once() -> list[Any]:
            left = min(self._options.timeout, end - time.monotonic())
            if left <= 0:
                raise requests.Timeout(f"the {self._options.deadline:g} s of a tick are over")
            session.limit = time.monotonic() + left
            try:
                found = client.custom_query(query, timeout=left)
            except PrometheusApiClientException as error:
                raise (_ServerError if "Code 5" in str(error) else _Refused)(str(error)[:300]) from error
            if not isinstance(found, list):
                raise _Refused(f"a vector is expected and the answer is {str(found)[:100]}")
            return found

        retrying = Retrying(
            stop=stop_after_attempt(TRIES),
            wait=wait_fixed(PAUSE),
            retry=retry_if_exception_type((requests.ConnectionError, _ServerError)),
            reraise=True,
        )
        return retrying(once)


class _ServerError(Exception):
    """A 5xx answer."""


class _Refused(Exception):
    """An answer that no second try would change."""


_FAILURES = (requests.RequestException, _ServerError, _Refused, ValueError, KeyError, TypeError, IndexError, OSError)


def _told(error: Exception) -> str:
    if isinstance(error, requests.Timeout):
        return f"no answer in time ({error})"[:300]
    # urllib3 puts the whole URL, and so the query, before what was wrong.
    cause = getattr(next(iter(error.args), None), "reason", None) or error
    return f"{type(error).__name__.lstrip('_')}: {cause}"[:300]
