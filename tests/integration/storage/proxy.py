"""A proxy in front of a store: slows answers down, breaks them, and counts what was asked for.

Bandwidth is shared by all requests, as that of a network card is; latency is that of each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

Fault = Literal["", "500", "503", "403", "cut", "hang"]
CHUNK = 256 << 10
KEPT = ("content-length", "transfer-encoding", "connection", "expect")


@dataclass
class Request:
    """One request as the proxy saw it."""

    method: str
    path: str
    headers: dict[str, str]
    began: float = 0.0
    ended: float = 0.0
    nbytes: int = 0

    @property
    def is_read(self) -> bool:
        """Whether it is for bytes of an object."""
        return self.method == "GET" and "range" in self.headers

    @property
    def is_write(self) -> bool:
        """Whether it brings bytes of an object: S3 has them put, Google's store posted."""
        return self.method == "PUT" or (self.method == "POST" and self.path.startswith("/upload/"))

    @property
    def is_part(self) -> bool:
        """Whether these are some of several parts of an object."""
        return self.is_write and bool(self._query.keys() & {"partNumber", "upload_id"})

    @property
    def key(self) -> str:
        """Key of the object."""
        path = urlsplit(self.path).path
        named = path.partition("/o/")[2] if "/b/" in path else path.lstrip("/").partition("/")[2]
        return unquote(named) or self._query.get("name", [""])[0]

    @property
    def version(self) -> str:
        """The version of the object that is asked for; empty: any."""
        return self.headers.get("if-match", "").strip('"') or self._query.get("ifGenerationMatch", [""])[0]

    @property
    def _query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query)


@dataclass
class Behaviour:
    """What is done to requests; changed by tests as they go."""

    latency: float = 0.0
    bandwidth: float = 0.0
    fault: Callable[[Request], Fault] = lambda request: ""
    before: Callable[[Request], None] = lambda request: None
    objects: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    """Key to bytes and version of what the proxy answers itself: the server copies the whole object each time."""
    seen: list[Request] = field(default_factory=list)


class Proxy:
    """Listens on a port of its own, and passes on to `port`."""

    def __init__(self, port: int) -> None:
        self.behaviour = Behaviour()
        self._lock = threading.Lock()
        self._free_at = 0.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def do_GET(self) -> None:
                outer.pass_on(self, port)

            def log_message(self, *_: object) -> None:
                pass

        for method in ("HEAD", "PUT", "POST", "DELETE"):
            setattr(Handler, f"do_{method}", Handler.do_GET)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def reset(self) -> None:
        """Behave, and forget what was seen."""
        self.behaviour = Behaviour()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def pass_on(self, handler: BaseHTTPRequestHandler, port: int) -> None:
        """Do with one request what `behaviour` says."""
        does = self.behaviour
        request = Request(handler.command, handler.path, {k.lower(): v for k, v in handler.headers.items()})
        request.began = time.monotonic()
        body = handler.rfile.read(int(request.headers.get("content-length", 0)))
        does.seen.append(request)
        does.before(request)
        time.sleep(does.latency)
        fault = does.fault(request)
        if fault == "hang":
            time.sleep(60)
        if fault in ("500", "503", "403"):
            code = {"500": "InternalError", "503": "SlowDown", "403": "AccessDenied"}[fault]
            self._answer(handler, int(fault), f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())
            return
        if request.is_read and request.key in does.objects:
            self._send_range(handler, request, *does.objects[request.key])
            return
        connection = HTTPConnection("127.0.0.1", port)
        connection.request(
            handler.command, handler.path, body, {k: v for k, v in handler.headers.items() if k.lower() not in KEPT}
        )
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in KEPT:
                handler.send_header(name, value)
        length = answer.headers.get("Content-Length", "0") if handler.command == "HEAD" else str(len(data))
        handler.send_header("Content-Length", length)
        handler.end_headers()
        if fault == "cut":
            handler.wfile.write(data[: len(data) // 2])
            handler.close_connection = True
            return
        if handler.command != "HEAD":
            self._send(handler, data, request)
        request.ended = time.monotonic()

    def _send_range(self, handler: BaseHTTPRequestHandler, request: Request, data: bytes, version: str) -> None:
        first, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
        assert request.version == version
        part = data[int(first) : int(last) + 1]
        handler.send_response(206)
        handler.send_header("ETag", f'"{version}"')
        handler.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        handler.send_header("Content-Length", str(len(part)))
        handler.end_headers()
        self._send(handler, part, request)
        request.ended = time.monotonic()

    def _send(self, handler: BaseHTTPRequestHandler, data: bytes, request: Request) -> None:
        for low in range(0, len(data), CHUNK):
            part = data[low : low + CHUNK]
            if self.behaviour.bandwidth:
                with self._lock:
                    now = time.monotonic()
                    self._free_at = max(self._free_at, now) + len(part) / self.behaviour.bandwidth
                    wait = self._free_at - now
                time.sleep(wait)
            handler.wfile.write(part)
            request.nbytes += len(part)

    @staticmethod
    def _answer(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", "application/xml")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
