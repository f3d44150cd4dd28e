"""The session as a web page on this machine: it shows, and cannot change anything.

The session's thread publishes a view, which is turned into bytes at once; the server's threads give out those bytes and
know nothing of the session. The address is a loopback address, and a request whose Host header is another name is
refused: a web site that lets its own name point here (DNS rebinding) gets nothing.
"""

from __future__ import annotations

import json
import math
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, Self

from tailguard.errors import ConfigError
from tailguard.live.view import View

ADDRESS = "127.0.0.1"
FILES = {
    "/": ("live_page.html", "text/html; charset=utf-8"),
    "/live_page.css": ("live_page.css", "text/css; charset=utf-8"),
    "/live_page.js": ("live_page.js", "text/javascript; charset=utf-8"),
}
STATE = "/state.json"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class PageServer:
    """Serves the page on a port; 0: any free one. Close it, or use it as a context."""

    def __init__(self, port: int) -> None:
        if not 0 <= port <= 65_535:
            raise ConfigError(f"--page {port}: a port is a number from 0 to 65535; 0 takes any free one")
        try:
            self._server = _Server((ADDRESS, port), _Handler)
        except OSError as error:
            raise ConfigError(f"--page {port}: {error.strerror}. Choose another port, or 0 for any free one") from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="live page", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}/"

    def publish(self, view: View) -> None:
        """Show this from now on."""
        content = finite({**view, "published_ms": round(1000 * time.time())})
        self._server.state = json.dumps(content, separators=(",", ":")).encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def finite(content: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    state = b"null"
    """The last view, as JSON."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        folder = resources.files("tailguard.live")
        self.files = {path: (folder.joinpath(name).read_bytes(), kind) for path, (name, kind) in FILES.items()}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that hangs up is no event."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "tailguard", ""
    timeout = 10  # seconds for a request to arrive: a connection that says nothing is closed

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{ADDRESS}:{port}", f"localhost:{port}"):
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, b"this address belongs to nobody else\n", "text/plain")
        elif self.path == STATE:
            self._answer(HTTPStatus.OK, self.server.state, "application/json")
        elif self.path in self.server.files:
            self._answer(HTTPStatus.OK, *self.server.files[self.path])
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"not here\n", "text/plain")

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self.close_connection = True  # a body that nobody has read may follow
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, b"this page only shows\n", "text/plain")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """The terminal belongs to the session."""
