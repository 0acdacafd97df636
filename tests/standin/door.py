"""A Service with one router of a few lines, for a canary that needs no cluster."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answering = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


@contextmanager
def door(answer: Answering) -> Iterator[tuple[str, list[str]]]:
    """Answers each request with what `answer` makes of its body; yields the URL and the ids of the requests that came."""
    ids: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            ids.append(self.headers["X-Request-Id"])
            status, content = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            raw = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", ids
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
