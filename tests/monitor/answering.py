"""A server in place of Prometheus that misbehaves as told, and remembers what it was asked."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs

from monitor.listening import Handler, Listening

Rows = list[tuple[Mapping[str, str], float | str]]


class Answering:
    """As a context. `answer` makes the rows of a query; `faults` are taken one a request, None for none, the last one stays."""

    def __init__(self, answer: Callable[[str], Rows], *faults: str | None, context: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self.faults = list(faults)
        self.requests: list[tuple[str, Mapping[str, str], str]] = []  # path, headers, query
        self.evaluated = 0.0
        self._stop = threading.Event()
        outer = self

        class Asked(Handler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
                query = parse_qs(self.path.partition("?")[2] or body).get("query", [""])[0]
                outer.requests.append((self.path, dict(self.headers), query))
                fault = outer.faults.pop(0) if len(outer.faults) > 1 else next(iter(outer.faults), None)
                outer._serve(self, query, fault)

        self._server = Listening(Asked, context)
        self.url = self._server.url

    def __enter__(self) -> Answering:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._server.stop()

    def _serve(self, handler: BaseHTTPRequestHandler, query: str, fault: str | None) -> None:
        status, rows = 200, self.answer(query)
        if fault == "hang":
            self._stop.wait(20)
            return
        if fault == "reset":
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
            return
        if fault == "empty":
            rows = []
        if fault in ("nan", "inf"):
            rows = [(metric, "NaN" if fault == "nan" else "+Inf") for metric, _ in rows]
        at = self.evaluated or time.time()
        result: Any = [{"metric": dict(metric), "value": [at, str(value)]} for metric, value in rows]
        body = json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()
        if fault == "scalar":
            body = json.dumps({"status": "success", "data": {"resultType": "scalar", "result": 5}}).encode()
        if fault == "html":
            body = b"<html>sign in</html>"
        if fault and fault.isdigit():
            status, body = int(fault), json.dumps({"status": "error", "errorType": "bad_data", "error": "told to"}).encode()
        handler.send_response(status)
        if fault and fault.startswith("3"):
            handler.send_header("Location", "http://127.0.0.1:1/elsewhere")
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body) + (100 if fault in ("cut", "drip") else 0)))
        handler.end_headers()
        handler.wfile.write(body)
        while fault == "drip" and not self._stop.wait(0.05):
            handler.wfile.write(b" ")
            handler.wfile.flush()
        if fault == "cut":
            handler.wfile.flush()
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
