"""Errors of the Kubernetes API as types: what to do about one is decided by its class, never by its text."""

from __future__ import annotations

import json
from collections.abc import Mapping

import aiohttp


class ApiError(Exception):
    """The API server answered with an error status.

    Attributes:
        status: HTTP status code.
        reason: machine-readable reason of the `Status` object (e.g. `AlreadyExists`), or the HTTP reason.
        message: text for humans; never contains a request body of ours.
        retry_after: seconds that the server asks to wait, if it does.
    """

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after


class NotFound(ApiError):
    """404: the object, its namespace or its kind does not exist."""


class Conflict(ApiError):
    """409: it exists already, another writer was faster, or a precondition does not hold."""


class Forbidden(ApiError):
    """403: RBAC, admission or quota refuses."""


class Gone(ApiError):
    """410: the resourceVersion or the `continue` token is too old."""


class Invalid(ApiError):
    """422: the object breaks the schema or a validation rule. Also the 500 of UNTYPED."""


class Unauthorized(ApiError):
    """401: the credentials are not accepted."""


_CLASSES: dict[int, type[ApiError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
}
# Server-side apply answers 500 where other writes answer 400 or 422: an unknown field, a wrong type, a key twice in a list
# (k8s.io/apimachinery pkg/util/managedfields/internal/structuredmerge.go, Apply). Nothing but another object mends that.
UNTYPED = "failed to create typed patch object"
MAX_MESSAGE = 1024  # characters kept of a server's message


def from_status(status: int, reason: str, body: bytes, headers: Mapping[str, str] | None = None) -> ApiError:
    """The error of a response: `body` is a `Status` object, or anything when a proxy answered."""
    message = body[:MAX_MESSAGE].decode("utf-8", "replace")
    details: object = None
    try:
        parsed = json.loads(body)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        message = str(parsed.get("message") or message)[:MAX_MESSAGE]
        reason = str(parsed.get("reason") or reason)
        details = parsed.get("details")
    retry_after = _seconds((headers or {}).get("Retry-After"))
    if retry_after is None and isinstance(details, dict):
        retry_after = _seconds(details.get("retryAfterSeconds"))
    if status == 500 and message.startswith(UNTYPED):
        return Invalid(422, "Invalid", message)
    return _CLASSES.get(status, ApiError)(status, reason, message, retry_after)


def _seconds(value: object) -> float | None:
    """Seconds of a Retry-After; None for absence and for the date form, which the API server never sends."""
    try:
        seconds = float(str(value))
    except ValueError:
        return None
    return seconds if 0 < seconds < 3600 else None


def is_retryable(exc: BaseException) -> bool:
    """Whether the same call can succeed later without anybody changing an object.

    Transport errors, timeouts, 401 (tokens rotate), 408, 409, 410, 429 and 5xx are; 400, 403, 404 and 422 are not.
    """
    if isinstance(exc, ApiError):
        return exc.status in {401, 408, 409, 410, 429} or exc.status >= 500
    return isinstance(exc, aiohttp.ClientError | TimeoutError | ConnectionError)


class NotLeading(Exception):
    """A write was attempted by a replica that does not hold the lease; nothing was sent."""
