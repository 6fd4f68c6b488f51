"""The server of the page: on loopback only, and for pages of its own only.

A page elsewhere on the web can make the browser send requests here, even under a name of its own that it lets resolve
to 127.0.0.1. So requests must name this machine in `Host`, and a POST must be JSON from this page, which no other page
can send without asking first.
"""

import json
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tinypod.errors import UserError
from tinypod.runs.release import Release
from tinypod.view.runs import Runs, UnknownRunError
from tinypod.view.solver import Solver

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost")
PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/app.css": ("app.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
MAX_BODY_BYTES = 64 * 1024
PORTS = 20  # tried one after the other


class RefusedError(Exception):
    """A request that is not answered: the status, and why."""

    def __init__(self, code: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.code = code


class Server(ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False  # Ctrl-C does not wait for a browser, nor for a puzzle

    def __init__(self, folders: list[Path], port: int, releases: list[Release] | None = None) -> None:
        self.runs, self.solver = Runs(folders, releases), Solver()
        super().__init__((HOST, port), Handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"


def open_server(folders: list[Path], port: int, releases: list[Release] | None = None) -> Server:
    """At this port, or at the next one that is free; 0: at any."""
    last = min(port + PORTS - 1, 65535) if port else 0
    for number in range(port, last + 1):
        try:
            return Server(folders, number, releases)
        except PermissionError as error:
            raise UserError(f"--port {port}: {error.strerror}; choose one above 1023") from None
        except OSError:
            continue
    raise UserError(f"--port {port}: none from {port} to {last} is free; choose another")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that an idle connection stays open
    server: Server

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _get(self, path: str, query: dict[str, list[str]]) -> tuple[bytes, str]:
        if path in FILES:
            name, kind = FILES[path]
            return (PAGE / name).read_bytes(), kind
        runs, solver = self.server.runs, self.server.solver
        run = query.get("run", [""])[0]
        match path:
            case "/api/runs":
                return _json({"folders": [str(folder) for folder in runs.folders], "runs": runs.listing()})
            case "/api/metrics":
                return _json(runs.metrics(run, _count(query, "generation"), _count(query, "since")))
            case "/api/health":
                return _json(runs.health(run))
            case "/api/differences":
                return _json({"rows": runs.differences(query.get("run", []))})
            case "/api/board":
                return _json(solver.board(runs.source(run)))
            case "/api/example":
                return _json(solver.example(runs.source(run), _count(query, "number")))
        raise RefusedError(HTTPStatus.NOT_FOUND, "there is nothing at this address")

    def _post(self, path: str, query: dict[str, list[str]]) -> tuple[bytes, str]:
        body = self._body()
        if path != "/api/solve":
            raise RefusedError(HTTPStatus.NOT_FOUND, "there is nothing at this address")
        run, puzzle = body.get("run"), body.get("puzzle")
        if not isinstance(run, str) or not isinstance(puzzle, str):
            raise RefusedError(HTTPStatus.BAD_REQUEST, 'expected {"run": an id, "puzzle": its characters}')
        return _json(self.server.solver.solve(self.server.runs.source(run), puzzle))

    def _body(self) -> dict[str, Any]:
        """Of a request that this page itself has sent."""
        origin, host = self.headers.get("Origin"), self.headers.get("Host")
        if origin is not None and origin != f"http://{host}":
            raise RefusedError(HTTPStatus.FORBIDDEN, "only this page may ask for that")
        if self.headers.get_content_type() != "application/json":
            raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected at most {MAX_BODY_BYTES:,} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "expected a JSON object")
        return body

    def _answer(self, make: Callable[[str, dict[str, list[str]]], tuple[bytes, str]]) -> None:
        code = HTTPStatus.OK
        try:
            if urlsplit(f"//{self.headers.get('Host', '')}").hostname not in NAMES:
                raise RefusedError(HTTPStatus.FORBIDDEN, f"this page is at {self.server.url} only")
            address = urlsplit(self.path)
            content, kind = make(address.path, parse_qs(address.query))
        except RefusedError as error:
            code, (content, kind) = error.code, _json({"error": str(error)})
        except UnknownRunError:
            code, (content, kind) = HTTPStatus.NOT_FOUND, _json({"error": "there is no such run (any more)"})
        except (UserError, OSError) as error:
            code, (content, kind) = HTTPStatus.UNPROCESSABLE_ENTITY, _json({"error": str(error)})
        except Exception as error:  # a page that says what broke is better than one that waits
            logger.exception("%s", self.path)
            code, (content, kind) = (
                HTTPStatus.INTERNAL_SERVER_ERROR,
                _json({"error": f"{type(error).__name__}: {error}"}),
            )
        self._send(code, content, kind)

    def _send(self, code: HTTPStatus, content: bytes, kind: str) -> None:
        if code != HTTPStatus.OK:
            self.close_connection = True  # the rest of a body that was not read must not pass for a request
        with suppress(ConnectionError):  # the browser has gone
            self.send_response(code)
            for name, value in (HEADERS | {"Content-Type": kind, "Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(content)

    def handle(self) -> None:
        with suppress(ConnectionError, socket.timeout):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """A page that polls would fill the terminal."""


def _count(query: dict[str, list[str]], name: str) -> int:
    text = query.get(name, ["0"])[0]
    if not text.isdecimal() or len(text) > 15:
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"{name}: expected a number")
    return int(text)


def _json(value: Any) -> tuple[bytes, str]:
    return json.dumps(value).encode(), "application/json"
