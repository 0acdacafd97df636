"""A front before real Prometheus servers, as for several tenants: TLS, a bearer token, a tenant header, and a namespace scope."""

from __future__ import annotations

import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from monitor.listening import Handler, Listening, tls


def certificate(folder: Path) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key, in one file."""
    file, alone = folder / "both.pem", folder / "certificate.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    argv += [
        "-subj",
        "/CN=127.0.0.1",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(file),
        "-out",
        str(alone),
    ]
    subprocess.run(argv, check=True, capture_output=True, timeout=30)
    file.write_text(file.read_text() + alone.read_text())
    return file


class Front:
    """As a context. `tenants`: what X-Scope-OrgID says -> URL of a Prometheus; `namespace`: every selector must name it, as a proxy
    that enforces a label asks for."""

    def __init__(self, pem: Path, token: str, tenants: Mapping[str, str], namespace: str = "") -> None:
        self.refused: list[int] = []
        self.passed = 0
        outer = self

        class Asked(Handler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
                query = urllib.parse.parse_qs(self.path.partition("?")[2] or body).get("query", [""])[0]
                url = tenants.get(self.headers.get("X-Scope-OrgID", ""), "")
                if self.headers.get("Authorization") != f"Bearer {token}":
                    return self._answer(401, b"no")
                if not url or (namespace and not _scoped(query, namespace)):
                    return self._answer(403, b"not yours")
                outer.passed += 1
                data = urllib.parse.urlencode({"query": query}).encode()
                try:
                    with urllib.request.urlopen(f"{url}/api/v1/query", data=data, timeout=10) as answer:
                        return self._answer(answer.status, answer.read())
                except urllib.error.HTTPError as error:
                    return self._answer(error.code, error.read())

            def _answer(self, status: int, body: bytes) -> None:
                if status in (401, 403):
                    outer.refused.append(status)
                self.answer(status, body)

        self._server = Listening(Asked, tls(pem))
        self.url = self._server.url

    def __enter__(self) -> Front:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()


def _scoped(query: str, namespace: str) -> bool:
    """Whether every selector of a query names the namespace."""
    selectors = re.findall(r"\{[^{}]*\}", query)
    return bool(selectors) and all(f'namespace=~"{namespace}"' in selector for selector in selectors)
