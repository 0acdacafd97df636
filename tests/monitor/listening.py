"""An HTTP server of a test on a free port of loopback, with TLS where it has a certificate."""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    """Of one connection, which stays open; says nothing on standard error."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for the client's delayed ACK

    def answer(self, status: int, body: bytes) -> None:
        """Send a whole answer of JSON."""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Listening:
    """Its port is taken when it is made; it answers from `start` to `stop`."""

    def __init__(self, handler: type[Handler], context: ssl.SSLContext | None = None) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        self.url = f"http{'s' if context else ''}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Answer, in threads that end with this process."""
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        """Answer no more, and give the port back."""
        self._server.shutdown()
        self._server.server_close()


def tls(pem: Path) -> ssl.SSLContext:
    """A server's context from a file with a certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return context
