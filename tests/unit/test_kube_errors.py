"""Errors of the API server by class."""

from __future__ import annotations

import json

import aiohttp
import pytest

from pd_operator.kube.errors import ApiError, Conflict, Forbidden, Gone, Invalid, NotFound, Unauthorized, from_status, is_retryable
from pd_operator.kube.kinds import KINDS


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (400, ApiError, False),
        (401, Unauthorized, True),
        (403, Forbidden, False),
        (404, NotFound, False),
        (408, ApiError, True),
        (409, Conflict, True),
        (410, Gone, True),
        (415, ApiError, False),
        (422, Invalid, False),
        (429, ApiError, True),
        (500, ApiError, True),
        (503, ApiError, True),
        (504, ApiError, True),
    ],
)
def test_a_status_becomes_a_class(status: int, kind: type[ApiError], retryable: bool) -> None:
    body = json.dumps({"kind": "Status", "reason": "Because", "message": "text"}).encode()
    error = from_status(status, "Reason", body)
    assert type(error) is kind
    assert (error.status, error.reason, error.message, error.retry_after) == (status, "Because", "text", None)
    assert str(error) == f"{status} Because: text"
    assert is_retryable(error) is retryable


@pytest.mark.parametrize("body", [b"", b"<html>bad gateway</html>", b"[1]", b"\xff\xfe", b"null"])
def test_a_body_that_is_no_status_is_kept_as_text(body: bytes) -> None:
    error = from_status(502, "Bad Gateway", body)
    assert error.reason == "Bad Gateway"
    assert error.message == body.decode("utf-8", "replace")


def test_a_long_message_is_cut() -> None:
    assert len(from_status(500, "", b"x" * 100_000).message) == 1024
    assert len(from_status(500, "", json.dumps({"message": "x" * 100_000}).encode()).message) == 1024


@pytest.mark.parametrize(
    ("headers", "details", "expected"),
    [
        ({"Retry-After": "7"}, {}, 7.0),
        ({}, {"retryAfterSeconds": 3}, 3.0),
        ({"Retry-After": "7"}, {"retryAfterSeconds": 3}, 7.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, {}, None),
        ({"Retry-After": "-1"}, {}, None),
        ({"Retry-After": "999999"}, {}, None),
        ({}, {}, None),
    ],
)
def test_the_servers_wish_to_wait_is_read(headers: dict[str, str], details: dict[str, int], expected: float | None) -> None:
    body = json.dumps({"reason": "TooManyRequests", "details": details}).encode()
    assert from_status(429, "", body, headers).retry_after == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [(TimeoutError(), True), (aiohttp.ServerDisconnectedError(), True), (ConnectionResetError(), True), (ValueError(), False)],
)
def test_transport_errors_are_retryable(error: Exception, expected: bool) -> None:
    assert is_retryable(error) is expected


@pytest.mark.parametrize(
    ("kind", "namespace", "name", "path"),
    [
        ("Pod", "ns", "p", "/api/v1/namespaces/ns/pods/p"),
        ("Pod", None, None, "/api/v1/pods"),
        ("Pod", "ns", None, "/api/v1/namespaces/ns/pods"),
        ("Node", None, "n", "/api/v1/nodes/n"),
        ("PDPool", "ns", "p", "/apis/pdserve.dev/v1alpha1/namespaces/ns/pdpools/p"),
        ("PDDeployment", None, None, "/apis/pdserve.dev/v1alpha1/pddeployments"),
        ("CustomResourceDefinition", None, "c", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/c"),
    ],
)
def test_paths(kind: str, namespace: str | None, name: str | None, path: str) -> None:
    assert KINDS[kind].path(namespace, name) == path


def test_a_namespaced_object_needs_a_namespace() -> None:
    with pytest.raises(ValueError, match="Pod 'p': a namespace is required"):
        KINDS["Pod"].path(None, "p")
