"""`vua ui` and its HTTP server: one page and what it shows, for holders of the token.

Any page in a browser may send requests to this port, under any host name that resolves to it. So a
request is answered only under a loopback name (DNS can map other names here), and content is sent
only with the token. The page loads nothing from elsewhere.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from shlex import quote
from typing import Any, Final
from urllib.parse import urlsplit

from vua.capacity.spaces import silent
from vua.capacity.upkeep import saved_today
from vua.catalog import open_catalog
from vua.catalog.base import Catalog, Finding, Use
from vua.catalog.check import NO_KEYS
from vua.catalog.contents import SHORT, Content
from vua.cli.command import command, option
from vua.cli.output import SOUND, Output, Report, dated, plain, when
from vua.cli.verify import verified
from vua.errors import ConfigError, VUAError
from vua.io.words import about, counted, size
from vua.security.keyring import KnownKeys
from vua.storage.description import is_namespace_name

log = logging.getLogger(__name__)

_SHOWN: Final = 50
_REST: Final = 5
"""Seconds of rest per second of a look."""
_LEAST_REST_S: Final = 2.0
_OLD_S: Final = 86_400
"""A model that was not used for so long may be one to delete."""
_LEVELS: Final = ("bad", "note", "ok")
_DAMAGED: Final = "damaged files"
_READ_NBYTES: Final = 256 << 20
_READ_CHUNKS: Final = 4096
"""So much is read at a time to find damaged files: a few seconds' work."""
_READ_OF_NBYTES: Final = 1 << 40
"""A larger cache is not read: `verify` reads a 256th of it or more, which takes long."""
_BETWEEN_READS_S: Final = 600


# -- what the page shows --------------------------------------------------------------------------


def overview(catalog: Catalog, files: Files) -> dict[str, Any]:
    """Return what the page shows, in words. Raises VUAError, OSError."""
    use = catalog.use(silent, exact=False)
    rows = sorted((_row(one) for one in use.namespaces), key=lambda one: -one["nbytes"])
    nbytes, usable = use.nbytes, use.usable_nbytes
    checked = files.findings()
    findings = [*catalog.findings_at_rest(NO_KEYS), *checked]
    findings.sort(key=lambda one: _LEVELS.index(one.level))
    bad = [one.name for one in findings if one.level == "bad"]
    state = f"Not healthy ({', '.join(bad)})" if bad else "Healthy" if checked else "Checking files"
    parts = [state, size(nbytes) + (" stored" if usable is None else f" of {size(usable)} usable")]
    saved = saved_today(catalog.where)
    if saved and saved.loaded_tokens:
        known = f"{saved.saved_s:,.1f} s saved today" if saved.priced_tokens else ""
        parts.append(known or "time saved today unknown")
    summary = "Nothing yet: an engine stores a prompt of 64 tokens or more while it computes it."
    if rows:
        chunks = sum(one["chunks"] for one in rows)
        exact = all(one["exact"] for one in rows)
        summary = f"{counted(chunks, 'chunk', exact=exact)} in {counted(len(rows), 'namespace')}"
        summary += "" if exact else f", {dated(use.namespaces)}"
        summary += f"; today: {saved}" if saved else ""
    return {
        "line": ", ".join(parts),
        "level": "bad" if bad else "ok" if checked else "note",
        "directory": plain(catalog.where),
        "looked": when(time.time()),
        "nbytes": nbytes,
        "usable_nbytes": usable,
        "findings": [asdict(one) | {"text": plain(one.text)} for one in findings],
        "summary": summary,
        "namespaces": rows[:_SHOWN],
        "more": max(0, len(rows) - _SHOWN),
        "todo": _todo(quote(catalog.where), rows, use, bad),
    }


def _row(use: Content) -> dict[str, Any]:
    newest_s, nbytes = max(use.times_ns, default=0) / 1e9, use.occupied_nbytes
    return {
        "namespace": use.description.name,
        "model": plain(use.description.model) or f"({use.state} description)",
        "chunks": use.chunks,
        "counted": about(use.chunks, exact=use.exact),
        "nbytes": nbytes,
        "size": about(nbytes, size, exact=use.exact),
        "exact": use.exact,
        "newest_s": newest_s,
        "used": when(newest_s)[:16] if newest_s else "unknown" if use.chunks else "never",
    }


def _todo(
    place: str, rows: Sequence[dict[str, Any]], use: Use, bad: Sequence[str]
) -> list[tuple[str, str]]:
    todo = []
    if _DAMAGED in bad:
        text = "take damaged files out of use: the next save writes them anew"
        todo.append((text, f"vua verify {place} --repair"))
    if {*bad} - {_DAMAGED}:
        todo.append(("test all that an engine needs here", f"vua doctor {place}"))
    if not rows:
        text = "start an engine with it, and ask something of 64 tokens or more"
        return todo or [(text, f"vua-vllm serve MODEL --vua-path {place}")]
    if use.usable_nbytes and use.bounds.max_bytes is None:
        most = use.usable_nbytes
        if most > use.nbytes:
            most = max(use.nbytes, most * 4 // 5)  # nothing is deleted, and some of the disk left
        given = f"{most >> 30}G" if most >= 10 << 30 else f"{max(1, most >> 20)}M"
        text = f"limit it, for all engines (now {size(use.limits['max_bytes'] or 0)})"
        todo.append((text, f"vua gc {place} --max-bytes {given} --set"))
    if use.limits["ttl_s"] is None:
        text = "delete what was not used for 30 days"
        todo.append((text, f"vua ttl {place} 30d && vua gc {place}"))
    known = [one for one in rows if one["exact"]]  # a sample may miss the last use
    oldest = min(known, key=lambda one: one["newest_s"], default=None)
    if oldest is not None and time.time() - oldest["newest_s"] > _OLD_S:
        text = f"delete {oldest['model']}, last used: {oldest['used']}"
        todo.append((text, f"vua rm {place} {oldest['namespace'][:SHORT]} --dry-run"))
    asked = f"vua explain {place} --prompt FILE --model MODELDIR"
    todo.append(("find out why a prompt misses", asked))
    return todo


class Files:
    """A sample of the files, read again and again, and the damaged ones found so far."""

    def __init__(self) -> None:
        self._read = ""
        """The last sample, in words; "": none was read yet."""
        self._damaged: dict[str, tuple[str, object]] = {}
        """By path the reason, and :func:`_stamp` of the file."""

    def read(self, catalog: Catalog) -> None:
        """Read some of the files, all if they are few. Raises as `verify`."""
        use = None if catalog.look_s is not None else catalog.use(silent, exact=False)
        if use is None or use.nbytes > _READ_OF_NBYTES:
            self._read = "none was read, as that costs; `vua verify DIR --sample 1%` reads some"
            return
        share = min(1.0, _READ_NBYTES / max(1, use.nbytes), _READ_CHUNKS / max(1, use.chunks))
        results, _ = verified(catalog, KnownKeys(NO_KEYS), share, silent)
        read = sum(one.counts.total() for one in results)
        some = ", a random part of all," if share < 1 else ""
        self._read = f"{counted(read, 'file')}{some} read at {when(time.time())}"
        if share == 1:
            self._damaged.clear()
        for one in results:
            for path, _, reason in one.problems:
                whole = f"{one.namespace.path}/{path}"
                self._damaged[whole] = reason, _stamp(whole)

    def forget(self) -> None:
        """Forget what was replaced, mended or deleted since."""
        known = self._damaged.items()
        self._damaged = {path: one for path, one in known if one[1] == _stamp(path)}

    def findings(self) -> list[Finding]:
        """Return what is known, in words; nothing if nothing was read yet."""
        if self._damaged:
            names = [f"{_short(path)}: {reason}" for path, (reason, _) in self._damaged.items()]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            text = f"{counted(len(names), 'file')}: {'; '.join(names[:3])}{more} ({self._read})"
            return [Finding(_DAMAGED, "bad", text)]
        return [Finding("files", "ok", self._read)] if self._read else []


def _stamp(path: str) -> object:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def _short(path: str) -> str:
    return "/".join(one[:SHORT] for one in path.split("/") if is_namespace_name(one)) or path


class Watch:
    """Looks at a cache again and again, in a thread; :attr:`seen` is for the page."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.seen: dict[str, Any] = {"line": "Looking", "level": "note"}
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        files, read_s, rest_s = Files(), -math.inf, 0.0
        while True:
            try:
                began_s, catalog = time.monotonic(), open_catalog(self._directory)
                files.forget()
                self.seen = overview(catalog, files)
                took_s = time.monotonic() - began_s
                rest_s = max(catalog.look_s or _LEAST_REST_S, _REST * took_s)
                if began_s > read_s + _BETWEEN_READS_S:
                    files.read(catalog)
                    read_s = began_s
                    self.seen = overview(catalog, files)
            except (VUAError, OSError) as problem:
                line = f"Cannot be looked at: {plain(str(problem))}"
                self.seen = {**self.seen, "line": line, "level": "bad"}
                rest_s = max(rest_s, _LEAST_REST_S)
            time.sleep(rest_s)


# -- the server -----------------------------------------------------------------------------------

_PAGE: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/ui.css": ("ui.css", "text/css; charset=utf-8"),
    "/ui.js": ("ui.js", "text/javascript; charset=utf-8"),
}
"""They reveal nothing about the directory, so they need no token."""
_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_PATIENCE_S: Final = 5.0
"""Longest time between two parts of a request: each waits in a thread."""


class Server(ThreadingHTTPServer):
    """Serves on loopback, each connection in a thread, for one request."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, directory: str) -> None:
        """Bind ``port``, 0 for any free one. Raises OSError if it is taken."""
        super().__init__(("127.0.0.1", port), _Handler)
        self.watch, self.token = Watch(directory), secrets.token_urlsafe(24)

    def handle_error(self, *_: object) -> None:
        """Log why a connection ended; other connections stay."""
        log.debug("a request failed", exc_info=True)  # noqa: LOG014 - called by a handler

    @property
    def url(self) -> str:
        """The page's address. Browsers neither send nor log what follows the #."""
        return f"http://127.0.0.1:{self.server_port}/#token={self.token}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "vua", ""
    timeout = _PATIENCE_S

    def log_message(self, *_: object) -> None:
        """Log nothing: stderr is for errors."""

    def do_GET(self) -> None:
        try:
            path = urlsplit(self.path).path
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError as problem:
            self._send(HTTPStatus.BAD_REQUEST, {"error": plain(str(problem))})
            return
        said = self.headers.get("Authorization", "").encode()
        if host not in _HOSTS:
            self._send(HTTPStatus.FORBIDDEN, {"error": "this host name is not served"})
        elif path in _PAGE:
            name, kind = _PAGE[path]
            content = resources.files("vua.cli").joinpath("page", name).read_bytes()
            self._send(HTTPStatus.OK, content, kind)
        elif not hmac.compare_digest(said, f"Bearer {self.server.token}".encode()):
            self._send(HTTPStatus.FORBIDDEN, {"error": "open the link that `vua ui` has printed"})
        elif path != "/api/overview":
            self._send(HTTPStatus.NOT_FOUND, {"error": "no such page"})
        else:
            self._send(HTTPStatus.OK, self.server.watch.seen)

    def _send(self, status: HTTPStatus, value: object, kind: str = "application/json") -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in _HEADERS.items():
            self.send_header(name, text)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


# -- the command ----------------------------------------------------------------------------------


@command("ui", as_owner_of=True)
@option("--port N", "of 127.0.0.1; default one that is free", type=int, default=0)
def ui(directory: str, *, port: int, output: Output) -> int:
    """Serve the page until Ctrl-C.

    Raises ConfigError if the port is taken, StorageError without such a directory.
    """
    open_catalog(directory).contents()
    try:
        server = Server(port, directory)
    except (OSError, OverflowError) as problem:
        text = f"port {port} of 127.0.0.1 cannot be taken: {problem}; leave out --port for another"
        raise ConfigError(text) from problem
    with server:
        text = f"{directory}: open {server.url}\nCtrl-C ends it"
        output.show(Report(text, directory=directory, url=server.url))
        server.serve_forever()
    return SOUND
