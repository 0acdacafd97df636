"""Pages of pods over HTTP on loopback: each can die, hang and be there again; and the scrape jobs of a real Prometheus for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from monitor.pods import Pod


def job(name: str, url: str, pod: Pod) -> dict[str, Any]:
    """A scrape job whose target labels are those of the contract."""
    static = {"targets": [url.removeprefix("http://")], "labels": pod.labels()}
    return {"job_name": name, "scrape_interval": "500ms", "scrape_timeout": "400ms", "static_configs": [static]}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


class Pages:
    """Pods with pages of their own, by name; what `pods` has is what they show.

    Attributes:
        hangs: names of pods whose pages never end.
    """

    def __init__(self, pods: Mapping[str, Pod]) -> None:
        self.pods = dict(pods)
        self.hangs: set[str] = set()
        self.servers: dict[str, ThreadingHTTPServer] = {}
        self._ports: dict[str, int] = {}
        self._stop = threading.Event()
        for name in self.pods:
            self.serve(name)

    def serve(self, name: str) -> None:
        """Let one pod listen, on the port that it had."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if name in outer.hangs:
                    outer._stop.wait(10)
                    return
                body = outer.pods[name].page()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = self.servers[name] = _Server(("127.0.0.1", self._ports.get(name, 0)), Handler)
        self._ports[name] = server.server_address[1]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def url(self, name: str) -> str:
        """Where a pod listens."""
        return f"http://127.0.0.1:{self._ports[name]}"

    def kill(self, name: str) -> None:
        """End one pod's page."""
        server = self.servers.pop(name)
        server.shutdown()
        server.server_close()

    def close(self) -> None:
        """End all."""
        self._stop.set()
        for name in list(self.servers):
            self.kill(name)
