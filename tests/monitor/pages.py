"""Pages of /metrics of pods that a test makes up, each at an address of its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from monitor.pods import Pod


class Pages:
    """Pods with pages of their own, that can die."""

    def __init__(self, pods: Mapping[str, Pod]) -> None:
        self.servers: dict[str, ThreadingHTTPServer] = {}
        self.pods = pods
        outer = self
        for name in self.pods:

            class Handler(BaseHTTPRequestHandler):
                pod = name

                def do_GET(self) -> None:
                    body = outer.pods[self.pod].page()
                    self.send_response(200)
                    self.send_header("Content-Type", "text/plain; version=0.0.4")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

                def log_message(self, *_: object) -> None:
                    pass

            self.servers[name] = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            threading.Thread(target=self.servers[name].serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def url(self, name: str) -> str:
        """Where a pod listens."""
        return f"http://127.0.0.1:{self.servers[name].server_address[1]}"

    def kill(self, name: str) -> None:
        """End one pod."""
        server = self.servers.pop(name)
        server.shutdown()
        server.server_close()
