"""A small synchronous client for tests: plain JSON, any kind of `pd_operator.kube.kinds`, one pooled connection a thread.

kubectl costs a process a call; a test that polls fast cannot afford that. It shares the table of kinds with the operator and
nothing else.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import requests
from kubernetes import config

from pd_operator.kube.kinds import KINDS

Object = dict[str, Any]
TIMEOUT = 30.0  # seconds, one request
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


class Refused(RuntimeError):
    """The API server answered with an error; `code` is the HTTP status."""

    def __init__(self, what: str, code: int, text: str) -> None:
        super().__init__(f"{what}: {code} {text[:800]}")
        self.code = code


class Api:
    """Calls as the user of a kubeconfig."""

    def __init__(self, kubeconfig: Path, *, agent: str = "pdd-tests") -> None:
        self._configuration = config.new_client_from_config(str(kubeconfig)).configuration
        self._agent = agent
        self._local = threading.local()

    @property
    def session(self) -> requests.Session:
        """The connection of this thread."""
        if not hasattr(self._local, "session"):
            known = self._configuration
            session = requests.Session()
            session.trust_env = False
            session.verify = known.ssl_ca_cert if known.verify_ssl and known.ssl_ca_cert else known.verify_ssl
            if known.cert_file:
                session.cert = (known.cert_file, known.key_file)
            session.headers["User-Agent"] = self._agent
            self._local.session = session
        return self._local.session

    def get(self, kind: str, namespace: str | None, name: str, subresource: str = "") -> Object | None:
        """The object, None when it does not exist."""
        try:
            return self._call("GET", KINDS[kind].path(namespace, name) + subresource)
        except Refused as refused:
            if refused.code == 404:
                return None
            raise

    def must_get(self, kind: str, namespace: str | None, name: str, subresource: str = "") -> Object:
        """The object; raises LookupError when it does not exist."""
        found = self.get(kind, namespace, name, subresource)
        if found is None:
            raise LookupError(f"{kind} {namespace}/{name} does not exist")
        return found

    def list(self, kind: str, namespace: str | None, selector: str = "") -> list[Object]:
        """All objects that a label selector matches; none of an optional kind whose CRD is not installed."""
        try:
            return list(self.page(kind, namespace, selector)["items"])
        except Refused as refused:
            if refused.code == 404 and KINDS[kind].optional:
                return []
            raise

    def page(self, kind: str, namespace: str | None, selector: str = "") -> Object:
        """The list object itself, for its resourceVersion."""
        return self._call("GET", KINDS[kind].path(namespace), params={"labelSelector": selector} if selector else {})

    def create(self, obj: Mapping[str, Any]) -> Object:
        """Create an object in the namespace of its metadata."""
        return self._call("POST", KINDS[obj["kind"]].path(obj["metadata"].get("namespace")), body=obj)

    def merge(self, kind: str, namespace: str | None, name: str, patch: Mapping[str, Any], *, manager: str = "a-user") -> Object:
        """Merge patch under a field manager, as `kubectl edit` does."""
        path = KINDS[kind].path(namespace, name)
        return self._call("PATCH", path, params={"fieldManager": manager}, body=patch, content_type=MERGE_PATCH)

    def json_patch(self, kind: str, namespace: str | None, name: str, *operations: Mapping[str, Any]) -> Object:
        """JSON patch."""
        path = KINDS[kind].path(namespace, name)
        return self._call("PATCH", path, params={"fieldManager": "a-user"}, body=list(operations), content_type=JSON_PATCH)

    def apply(self, obj: Mapping[str, Any], *, manager: str = "a-user") -> Object:
        """Server-side apply, forced."""
        path = KINDS[obj["kind"]].path(obj["metadata"].get("namespace"), obj["metadata"]["name"])
        return self._call("PATCH", path, params={"fieldManager": manager, "force": "true"}, body=obj, content_type=APPLY_PATCH)

    def delete(self, kind: str, namespace: str | None, name: str, *, propagation: str = "Background") -> bool:
        """Delete; False when it does not exist."""
        try:
            self._call("DELETE", KINDS[kind].path(namespace, name), body={"propagationPolicy": propagation})
        except Refused as refused:
            if refused.code == 404:
                return False
            raise
        return True

    def watch(self, kind: str, namespace: str | None, version: str, *, seconds: int) -> Iterator[Object]:
        """Events from a resourceVersion on, for at most `seconds`."""
        params = {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(seconds)}
        url = self._configuration.host + KINDS[kind].path(namespace)
        with self.session.get(url, params=params, headers=self._headers(), stream=True, timeout=(5, seconds + 5)) as response:
            if response.status_code != 200:
                raise Refused(f"watch {kind}", response.status_code, response.text)
            for line in response.iter_lines(chunk_size=None):
                if line:
                    yield json.loads(line)

    def _headers(self, content_type: str = "") -> dict[str, str]:
        headers = {"Accept": "application/json"}
        token = self._configuration.get_api_key_with_prefix("BearerToken")
        if token:
            headers["Authorization"] = token
        return headers | ({"Content-Type": content_type} if content_type else {})

    def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Object:
        response = self.session.request(
            method,
            self._configuration.host + path,
            params=dict(params or {}),
            data=None if body is None else json.dumps(body),
            headers=self._headers(content_type if body is not None else ""),
            timeout=TIMEOUT,
        )
        if response.status_code >= 300:
            raise Refused(f"{method} {path}", response.status_code, response.text)
        parsed: Object = response.json()
        return parsed
