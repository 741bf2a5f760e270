"""A server that answers what huggingface_hub asks of the Hub to list and to read a repository; nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


def blob_id(data: bytes) -> str:
    """What git, and so the Hub, calls a file's bytes."""
    return sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    """Repositories of models, each with commits and the revisions that name them."""

    def __init__(self, token: str) -> None:
        """`token`: what those need who read a private repository."""
        self.token = token
        self.private: set[str] = set()
        self.commits: dict[str, dict[str, bytes]] = {}
        self.revisions: dict[tuple[str, str], str] = {}
        self.seen: list[tuple[str, Mapping[str, str]]] = []
        """Path and headers of each request."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def commit(self, repo: str, files: Mapping[str, bytes], *, revision: str = "main") -> str:
        """Have a revision be these files; the commit."""
        sha = sha1(repr(sorted((name, blob_id(data)) for name, data in files.items())).encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.revisions[repo, revision] = self.revisions[repo, sha] = sha
        return sha

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.seen.append((handler.path, {name.lower(): own for name, own in handler.headers.items()}))
        parts = [unquote(own) for own in urlsplit(handler.path).path.strip("/").split("/")]
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        repo, what, rest = "/".join(parts[:2]), (parts[2:3] or ["revision"])[0], parts[3:]
        known = [name for name, _ in self.revisions]
        allowed = repo not in self.private or handler.headers.get("Authorization") == f"Bearer {self.token}"
        files = self.commits.get(self.revisions.get((repo, (rest or ["main"])[0]), ""))
        name = "/".join(rest[1:])
        if repo not in known or not allowed:
            self._refuse(handler, 401, "RepoNotFound")
        elif files is None:
            self._refuse(handler, 404, "RevisionNotFound")
        elif is_api and what == "revision":
            self._send(handler, 200, {"id": repo, "sha": self.revisions[repo, (rest or ["main"])[0]]})
        elif is_api and what == "tree":
            self._list(handler, files, name)
        elif what == "resolve" and name in files:
            self._read(handler, files[name])
        else:
            self._refuse(handler, 404, "EntryNotFound")

    def _list(self, handler: BaseHTTPRequestHandler, files: Mapping[str, bytes], folder: str) -> None:
        start = f"{folder}/" if folder else ""
        inside = {name: data for name, data in files.items() if name.startswith(start)}
        whole = parse_qs(urlsplit(handler.path).query).get("recursive", ["false"])[0].lower() == "true"
        found: dict[str, dict[str, object]] = {}
        for name, data in inside.items():
            first, slash, _ = name[len(start) :].partition("/")
            if slash:
                found.setdefault(first, {"type": "directory", "path": start + first, "oid": "0" * 40, "size": 0})
            if not slash or whole:
                found[name] = {"type": "file", "path": name, "oid": blob_id(data), "size": len(data)}
        if inside:
            self._send(handler, 200, list(found.values()))
        else:
            self._refuse(handler, 404, "EntryNotFound")

    def _read(self, handler: BaseHTTPRequestHandler, data: bytes) -> None:
        first, _, last = handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        headers = {"ETag": f'"{blob_id(data)}"', "Content-Range": f"bytes {first}-{last}/{len(data)}"}
        self._send(handler, 206, part, headers)

    def _refuse(self, handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
        self._send(handler, status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, body: object, headers: Mapping[str, str] | None = None
    ) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)
