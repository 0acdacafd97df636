"""A requests session whose answers end: within a time for the whole of them, not for each read, and within a size."""

from __future__ import annotations

import time
from typing import Any

import requests


class TooMuch(requests.RequestException):
    """An answer larger than allowed."""


class BoundedSession(requests.Session):
    """Reads every answer in full before it is given back. `limit` is the monotonic time by which it must be there."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.limit = float("inf")
        self._max_bytes = max_bytes

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        """See Session. Raises Timeout or TooMuch; redirects are not followed, since they would carry the token elsewhere."""
        kwargs |= {"stream": True, "allow_redirects": False}
        response = super().request(*args, **kwargs)
        parts, size = [], 0
        try:
            # read1 gives what has come: reads of a fixed size would wait on a server that sends a byte now and then.
            while chunk := response.raw.read1(2**18, decode_content=True):
                parts.append(chunk)
                size += len(chunk)
                if size > self._max_bytes:
                    raise TooMuch(f"the answer is larger than {self._max_bytes} bytes")
                if time.monotonic() > self.limit:
                    raise requests.Timeout("the answer did not end in time")
        except requests.RequestException:
            response.close()
            raise
        except Exception as error:
            response.close()
            raise requests.ConnectionError(f"the answer broke off: {error}") from error
        response._content = b"".join(parts)
        return response
