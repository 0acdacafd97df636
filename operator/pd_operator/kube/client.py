"""A facade of a few calls on `kubernetes.aio`: raw JSON in and out, server-side apply, bounded in time.

The generated models are not used: they cost ten times the memory and CPU of a dict and refuse fields they do not know.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient

from pd_operator.kube.auth import ResponseHook, load_configuration, new_api_client, new_session
from pd_operator.kube.errors import Conflict, Gone, NotFound, NotLeading, from_status
from pd_operator.kube.kinds import KINDS, Kind

FIELD_MANAGER = "pd-operator"
REQUEST_TIMEOUT = 30.0  # seconds, one request
CONNECT_TIMEOUT = 5.0  # seconds, TCP
PAGE = 500  # objects a list request asks for, as client-go's pager
LIST_ATTEMPTS = 3  # whole lists begun anew when a `continue` token expires half-way
MAX_PAGES = 10_000

JSON = "application/json"
APPLY_PATCH = "application/apply-patch+yaml"  # JSON is YAML
MERGE_PATCH = "application/merge-patch+json"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_KEPT_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "labels",
    "ownerReferences",
)

Object = dict[str, Any]
Objects = list[Object]  # the class below has a method called `list`
Keys = list[tuple[str, str]]  # (namespace, name)
CallHook = Callable[[str, str, str, float], None]  # verb, kind, status code or error class, seconds
Query = Sequence[tuple[str, str]]


class KubeClient:
    """All reads and writes of the operator, by kind name (see `kinds.KINDS`).

    Every method raises `errors.ApiError` (by status), `aiohttp.ClientError` or `TimeoutError`. Nothing is retried here but
    a request on a kept-alive connection that the server had closed: retries belong to the workqueue.
    """

    def __init__(self, api: ApiClient, *, request_timeout: float = REQUEST_TIMEOUT, on_call: CallHook | None = None) -> None:
        self._api = api
        self._limits = aiohttp.ClientTimeout(total=request_timeout, sock_connect=CONNECT_TIMEOUT)
        self.may_write: Callable[[], bool] = lambda: True  # the lease's fence: asked right before each write
        self._on_call = on_call or (lambda verb, kind, code, seconds: None)

    @classmethod
    async def connect(
        cls, kubeconfig: str | None = None, *, request_timeout: float = REQUEST_TIMEOUT, on_call: CallHook | None = None
    ) -> KubeClient:
        """A client from `kubeconfig`, $KUBECONFIG or the pod's service account.

        Raises:
            auth.NoCluster: no usable credentials.
        """
        return cls(new_api_client(await load_configuration(kubeconfig)), request_timeout=request_timeout, on_call=on_call)

    @property
    def host(self) -> str:
        """URL of the API server."""
        return str(self._api.configuration.host)

    async def new_session(self, on_response: ResponseHook) -> aiohttp.ClientSession:
        """Another connection pool to the same server with the same credentials, for kopf; the caller closes it."""
        return await new_session(self._api, on_response)

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """The object as stored now (not from a cache), or None."""
        try:
            return await self._json("get", KINDS[kind], "GET", KINDS[kind].path(namespace, name))
        except NotFound:
            return None

    async def exists(self, kind: str, namespace: str, name: str) -> Object | None:
        """`{"metadata": {...}}` of an object, or None.

        The server sends metadata only, so a Secret's data never reaches us; annotations are dropped too, because kubectl
        keeps a copy of an applied Secret in one.
        """
        try:
            found = await self._json("get", KINDS[kind], "GET", KINDS[kind].path(namespace, name), accept=METADATA)
        except NotFound:
            return None
        return {"metadata": _kept(found["metadata"])}

    async def list(self, kind: str, namespace: str | None, label_selector: str = "") -> Objects:
        """All matching objects, in pages; `namespace=None` = all namespaces. Items carry apiVersion and kind."""
        known = KINDS[kind]
        items = await self._all(known, namespace, label_selector, JSON)
        for item in items:  # lists of built-in kinds leave these out
            item.setdefault("apiVersion", known.api_version)
            item.setdefault("kind", known.kind)
        return items

    async def list_keys(self, kind: str, namespace: str | None, label_selector: str = "") -> Keys:
        """(namespace, name) of all matching objects; the server sends metadata only."""
        items = await self._all(KINDS[kind], namespace, label_selector, METADATA_LIST)
        return [(item["metadata"].get("namespace", ""), item["metadata"]["name"]) for item in items]

    async def first_page(self, kind: str, namespace: str, label_selector: str) -> Objects | None:
        """Metadata of all matching objects, as in `exists`; None when they are more than PAGE."""
        raw = await self.list_page(KINDS[kind], namespace, label_selector, accept=METADATA_LIST)
        page = json.loads(raw)
        if page["metadata"].get("continue"):
            return None
        return [_kept(item["metadata"]) for item in page["items"] or ()]

    async def apply(self, obj: Mapping[str, Any], *, force: bool = True, dry_run: bool = False) -> Object:
        """Server-side apply under FIELD_MANAGER. Fields that we applied before and leave out now are removed.

        With `force=False` a field of another manager raises `Conflict`.
        """
        return await self._apply(obj, "", force, dry_run)

    async def apply_status(self, obj: Mapping[str, Any]) -> Object:
        """Server-side apply of `obj["status"]`, forced: the whole status is ours."""
        return await self._apply(obj, "/status", True, False)

    async def create(self, obj: Mapping[str, Any]) -> Object:
        """Create; raises `Conflict` when it exists.

        Fields set here belong to an Update entry of FIELD_MANAGER, so a later `apply` that leaves them out does not remove
        them: this is how PDPool gets its first `replicas`.
        """
        kind = KINDS[obj["kind"]]
        path = kind.path(obj["metadata"].get("namespace"))
        return await self._json("create", kind, "POST", path, query=[("fieldManager", FIELD_MANAGER)], body=obj)

    async def replace(self, obj: Mapping[str, Any]) -> Object:
        """Replace (PUT); with a resourceVersion in it, raises `Conflict` when another writer was faster."""
        kind = KINDS[obj["kind"]]
        path = kind.path(obj["metadata"].get("namespace"), obj["metadata"]["name"])
        return await self._json("update", kind, "PUT", path, query=[("fieldManager", FIELD_MANAGER)], body=obj)

    async def merge(self, kind: str, namespace: str | None, name: str, patch: Mapping[str, Any]) -> Object:
        """JSON merge patch of one object."""
        path = KINDS[kind].path(namespace, name)
        query = [("fieldManager", FIELD_MANAGER)]
        return await self._json("patch", KINDS[kind], "PATCH", path, query=query, body=patch, content_type=MERGE_PATCH)

    async def scale(self, kind: str, namespace: str, name: str, replicas: int) -> None:
        """Write `replicas` through the /scale subresource."""
        path = KINDS[kind].path(namespace, name) + "/scale"
        body = {"spec": {"replicas": replicas}}
        query = [("fieldManager", FIELD_MANAGER)]
        await self._json("scale", KINDS[kind], "PATCH", path, query=query, body=body, content_type=MERGE_PATCH)

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str) -> bool:
        """Delete exactly the object with `uid`, its dependents in the background; False when it is gone or another one."""
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        try:
            await self._json("delete", KINDS[kind], "DELETE", KINDS[kind].path(namespace, name), body=body)
        except (NotFound, Conflict):
            return False
        return True

    async def server_version(self) -> tuple[int, int]:
        """(major, minor) of the API server; vendors' suffixes such as `29+` are cut."""
        found = await self._json("get", Kind("", "", "Version", "version", False), "GET", "/version")
        return int(found["major"]), int("".join(ch for ch in found["minor"] if ch.isdigit()))

    async def served(self, kind: str, namespace: str | None) -> bool:
        """Whether the API server knows the kind (its CRD is installed)."""
        try:
            await self._raw("list", KINDS[kind], "GET", KINDS[kind].path(namespace), query=[("limit", "1")], accept=METADATA_LIST)
        except NotFound:
            return False
        return True

    async def list_page(
        self,
        kind: Kind,
        namespace: str | None,
        selector: str,
        token: str = "",
        *,
        fields: str = "",
        accept: str = JSON,
        limit: int = 0,
    ) -> bytes:
        """One page of a list as raw JSON; `token` is the previous page's `metadata.continue`, `fields` a field selector."""
        query = [("limit", str(limit or PAGE))]
        if selector:
            query.append(("labelSelector", selector))
        if fields:
            query.append(("fieldSelector", fields))
        if token:
            query.append(("continue", token))
        return await self._raw("list", kind, "GET", kind.path(namespace), query=query, accept=accept)

    @asynccontextmanager
    async def watch(
        self,
        kind: Kind,
        namespace: str | None,
        selector: str,
        version: str,
        *,
        server_timeout: int,
        inactivity: float,
        fields: str = "",
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """An open watch stream of JSON lines with bookmarks, from `version` on.

        Args:
            fields: a field selector; an object that stops matching it comes as DELETED.
            server_timeout: seconds after which the server ends the stream.
            inactivity: seconds without a byte after which reading raises TimeoutError.
        """
        query = [
            ("watch", "1"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", version),
            ("timeoutSeconds", str(server_timeout)),
        ]
        if selector:
            query.append(("labelSelector", selector))
        if fields:
            query.append(("fieldSelector", fields))
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=inactivity)
        started = time.monotonic()
        code = "error"
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._request("GET", kind.path(namespace), query=query, limits=limits)
            code = str(response.status)
            if response.status != 200:
                raise from_status(response.status, response.reason or "", await response.read(), response.headers)
            self._on_call("watch", kind.kind, code, time.monotonic() - started)
            yield response.content
        except Exception:
            if code != "200":
                self._on_call("watch", kind.kind, code, time.monotonic() - started)
            raise
        finally:
            if response is not None:
                response.close()

    async def _all(self, kind: Kind, namespace: str | None, selector: str, accept: str) -> Objects:
        for attempt in range(1, LIST_ATTEMPTS + 1):
            items: Objects = []
            token = ""
            try:
                for _ in range(MAX_PAGES):
                    page = json.loads(await self.list_page(kind, namespace, selector, token, accept=accept))
                    items.extend(page["items"] or ())  # a metadata-only list of nothing says null
                    token = page["metadata"].get("continue", "")
                    if not token:
                        return items
            except Gone:
                if attempt == LIST_ATTEMPTS:
                    raise
        raise RuntimeError(f"list {kind.plural}: more than {MAX_PAGES} pages of {PAGE}")

    async def _apply(self, obj: Mapping[str, Any], subresource: str, force: bool, dry_run: bool) -> Object:
        kind = KINDS[obj["kind"]]
        query = [("fieldManager", FIELD_MANAGER), ("force", "true" if force else "false")]
        if dry_run:
            query.append(("dryRun", "All"))
        path = kind.path(obj["metadata"].get("namespace"), obj["metadata"]["name"]) + subresource
        verb = "apply_status" if subresource else "apply"
        return await self._json(verb, kind, "PATCH", path, query=query, body=obj, content_type=APPLY_PATCH)

    async def _json(self, verb: str, kind: Kind, method: str, path: str, **options: Any) -> Object:
        parsed: Object = json.loads(await self._raw(verb, kind, method, path, **options))
        return parsed

    async def _raw(
        self,
        verb: str,
        kind: Kind,
        method: str,
        path: str,
        *,
        query: Query = (),
        body: Mapping[str, Any] | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> bytes:
        if method != "GET" and kind.kind != "Lease" and not self.may_write():
            raise NotLeading(f"{verb} {kind.kind}: this replica does not lead")
        started = time.monotonic()
        code = "error"
        try:
            response = await self._request(
                method, path, query=query, body=body, content_type=content_type, accept=accept, limits=self._limits
            )
            code = str(response.status)
            async with response:
                data = await response.read()
            if response.status >= 300:
                raise from_status(response.status, response.reason or "", data, response.headers)
            return data
        finally:
            self._on_call(verb, kind.kind, code, time.monotonic() - started)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Query,
        limits: aiohttp.ClientTimeout,
        body: Mapping[str, Any] | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": accept, "Content-Type": content_type}
        verb, url, headers, payload, _ = await self._api.param_serialize(
            method, path, query_params=list(query), header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            sent = await self._api.call_api(verb, url, headers, payload, _request_timeout=limits)
        except aiohttp.ServerDisconnectedError:
            # The server closed an idle connection while we wrote. All our requests are idempotent, so once more is safe.
            sent = await self._api.call_api(verb, url, headers, payload, _request_timeout=limits)
        response: aiohttp.ClientResponse = sent.response
        return response


def _kept(metadata: Mapping[str, Any]) -> Object:
    """What is kept of metadata: never an annotation."""
    return {key: value for key, value in metadata.items() if key in _KEPT_METADATA}
