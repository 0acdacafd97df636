"""HTTP of the canary: every wait has a bound, and an error says which address was waited for, and how long."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import requests

from pd_operator.core.diagnosis import SECRETS
from pd_operator.signals.exposition import CONTENT
from pd_operator.signals.http import BoundedSession

MAX_BYTES: Final = 8 * 2**20
PAUSE: Final = 0.5  # seconds between two tries
CONNECT: Final = 5.0  # seconds for one connection


class NoAnswer(Exception):
    """Something that the canary needs does not answer; the text says what, and how long it waited."""


class Http:
    """A session a call: calls run in several threads, and each address is asked a few times only."""

    def __init__(self, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        # An engine or a router may repeat what it was sent, and an error quotes a key that ends with a line break.
        forms = {key.strip(), json.dumps(key.strip())[1:-1]} - {""}
        self._hidden = sorted(forms, key=len, reverse=True)
        self._clock = clock

    def page(self, url: str, limit: float) -> bytes:
        """Body of a page, asked again until it is there. Raises NoAnswer after `limit` seconds."""
        end = self._clock() + limit
        while True:
            try:
                with self._session(max(1.0, end - self._clock())) as session:
                    answer = session.get(url, timeout=(CONNECT, limit), headers={**self._headers, "Accept": CONTENT})
                if answer.status_code == 200:
                    return answer.content
                last = f"status {answer.status_code}"
            except requests.RequestException as error:
                last = self.told(error)
            if self._clock() > end:
                raise NoAnswer(f"waited {limit:.0f} s for {url}: {last}")
            time.sleep(PAUSE)

    def post(self, url: str, body: Mapping[str, Any], limit: float, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Status and body. Raises requests.RequestException."""
        with self._session(limit) as session:
            answer = session.post(url, json=body, timeout=(CONNECT, limit), headers={**self._headers, **(headers or {})})
        return answer.status_code, answer.content.decode("utf-8", "replace")

    def post_patiently(
        self, url: str, body: Mapping[str, Any], limit: float, connect: float, headers: Mapping[str, str]
    ) -> tuple[int, str]:
        """As `post`, and tries again for `connect` seconds while nothing accepts the connection: no request was sent then.

        Raises NoAnswer when nothing ever does, requests.RequestException when an answer does not come or breaks off.
        """
        end = self._clock() + connect
        while True:
            try:
                return self.post(url, body, limit, headers)
            except (requests.ConnectTimeout, requests.ConnectionError) as error:
                if not _refused(error):
                    raise
                if self._clock() > end:
                    raise NoAnswer(f"waited {connect:.0f} s for {url} to accept a connection: {self.told(error)}") from error
            time.sleep(PAUSE)

    def told(self, error: object) -> str:
        """One line of somebody's words, without the key and without what else looks like a credential (invariant I10)."""
        text = str(error) or type(error).__name__
        for secret in self._hidden:
            text = text.replace(secret, "[redacted]")
        return SECRETS.sub(r"\1[redacted]", " ".join(text.split()))

    def _session(self, limit: float) -> BoundedSession:
        session = BoundedSession(MAX_BYTES)
        session.trust_env = False  # no proxy, no netrc: the addresses are the cluster's own
        session.limit = time.monotonic() + limit
        return session


def _refused(error: requests.RequestException) -> bool:
    """Whether the connection was never made; then nothing was sent, and another try sends no second request."""
    words = str(error)
    return (
        isinstance(error, requests.ConnectTimeout) or "Failed to establish a new connection" in words or "NameResolution" in words
    )
