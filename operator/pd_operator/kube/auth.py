"""Where the API server is and who we are: one source for our own client and for kopf.

Order: an explicit path or $KUBECONFIG, then the pod's service account, then ~/.kube/config. Tokens are read again every
minute (projected service account tokens rotate, kubeconfigs may name a token file or an exec plugin).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
from aiohttp.client_middlewares import ClientHandlerType
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import ApiClient, Configuration

from pd_operator import __version__

TOKEN_PERIOD = 60.0  # seconds a token read from a file is used, as in kubernetes.aio.config.incluster_config
USER_AGENT = f"pd-operator/{__version__}"
ResponseHook = Callable[[aiohttp.ClientRequest, aiohttp.ClientResponse], None]


class NoCluster(Exception):
    """Neither a kubeconfig nor a service account was found, or it cannot be read."""


async def load_configuration(kubeconfig: str | None = None) -> Configuration:
    """Read the connection settings.

    Raises:
        NoCluster: nothing usable was found; the message names the places searched.
    """
    configuration = Configuration()
    # The default of 100 counts watches too: with many watched namespaces, calls would wait for ever behind them.
    configuration.connection_pool_maxsize = 0
    path = kubeconfig or os.environ.get("KUBECONFIG", "")
    in_cluster = bool(os.environ.get("KUBERNETES_SERVICE_HOST"))
    home = Path.home() / ".kube" / "config"
    try:
        if path or (not in_cluster and home.exists()):
            await _load_kubeconfig(configuration, path or str(home))
        else:
            kube_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (kube_config.ConfigException, OSError, ValueError) as exc:
        where = path or ("the pod's service account" if in_cluster else f"$KUBECONFIG, the service account, {home}")
        raise NoCluster(f"no usable cluster credentials (searched {where}): {exc}") from exc
    return configuration


async def _load_kubeconfig(configuration: Configuration, path: str) -> None:
    """Load `path` now and its token again whenever the last reading is older than TOKEN_PERIOD."""
    loader = await kube_config.load_kube_config(  # type: ignore[no-untyped-call]
        config_file=path, client_configuration=configuration, persist_config=False
    )
    read_at = time.monotonic()

    async def refresh(target: Configuration) -> None:
        nonlocal read_at
        if time.monotonic() - read_at >= TOKEN_PERIOD:
            read_at = time.monotonic()
            await loader.load_and_set(target)

    configuration.refresh_api_key_hook = refresh  # type: ignore[assignment]


def new_api_client(configuration: Configuration) -> ApiClient:
    """A client on `configuration` that names us; close it when done."""
    api = ApiClient(configuration=configuration)
    api.user_agent = USER_AGENT
    return api


async def new_session(api: ApiClient, on_response: ResponseHook) -> aiohttp.ClientSession:
    """An aiohttp session for kopf on the same credentials; `on_response` sees each response once its headers are there.

    A middleware and not static headers: a static token would go stale inside a long-lived session.
    """
    configuration = api.configuration
    connector = aiohttp.TCPConnector(limit=0, ssl=api.rest_client.ssl_context)

    async def authenticate(request: aiohttp.ClientRequest, handler: ClientHandlerType) -> aiohttp.ClientResponse:
        headers: dict[str, str] = {}
        await api.update_params_for_auth(headers, [], ["BearerToken"], request.url.path, request.method, None)
        request.headers.update({name.title(): value for name, value in headers.items()})
        if configuration.tls_server_name:
            request.server_hostname = configuration.tls_server_name
        response = await handler(request)
        on_response(request, response)
        return response

    return aiohttp.ClientSession(
        connector=connector, headers={"User-Agent": USER_AGENT}, proxy=configuration.proxy, middlewares=(authenticate,)
    )
