"""`vua ui` and its HTTP server: one page and its requests, for holders of the token.

Any page in a browser may send requests to this port, under any host name that resolves to it. So a
request is answered only under a loopback name (DNS can map other names here), and content is sent
only with the token. The page loads nothing from elsewhere.

:class:`State` answers the page: from reports of the processes that look and verify, and by reading.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from socket import SHUT_RDWR
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import click

from vua import __version__
from vua.catalog.base import Catalog
from vua.catalog.check import NO_KEYS
from vua.catalog.opening import open_catalog
from vua.cli.command import command
from vua.cli.explain import Question, explain_ids
from vua.cli.looks import Child, Talk, watch
from vua.cli.output import SOUND, Output, Report, plain
from vua.cli.prompt import Tokenizer, parse_ids
from vua.cli.verify import verify
from vua.errors import ConfigError, VUAError
from vua.security.settings import Security

log = logging.getLogger(__name__)

_LOOKS: Final = 600
"""Looks remembered: at least twenty minutes."""
_PROBLEMS: Final = 100
"""Damaged files named per namespace."""
_FEW: Final = 10_000
"""With at most so many chunks all headers are read, to say what a missing one's place has."""


@dataclass(slots=True)
class _VerifyState:
    """The progress of a verification, and the last one's result."""

    running: bool = False
    progress: dict[str, object] | None = None
    problem: str = ""
    finished_s: float | None = None
    report: dict[str, Any] | None = None


@dataclass(slots=True)
class _WatchState:
    """The reports of the looks."""

    namespaces: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, object] | None = None
    saved: str = ""
    """The savings of today's loads; "": nothing was looked up."""
    progress: dict[str, object] | None = None
    looks: deque[dict[str, object]] = field(default_factory=lambda: deque(maxlen=_LOOKS))
    looked_s: float | None = None
    """Time of the last complete look; None: not yet."""
    problem: str = ""


class State:
    """Thread-safe. Starts two processes: make it before any thread."""

    def __init__(self, directory: str, security: Security, tokenize: Tokenizer | None) -> None:
        """Start looking at ``directory``; ``tokenize`` makes token ids of a text."""
        self._directory, self._security, self._tokenize = directory, security, tokenize
        self._lock = threading.Lock()
        self._watched, self._verified = _WatchState(), _VerifyState()
        self._children = [Child(partial(watch, directory), self._hear_watch)]
        self._verifier = Child(partial(_verify, directory, security), self._hear_verify)
        self._children.append(self._verifier)
        for child in self._children:
            child.listen()

    def close(self) -> None:
        for child in self._children:
            child.close()

    def _catalog(self) -> Catalog:
        return open_catalog(self._directory)

    def _hear_watch(self, what: str, value: Any) -> None:
        with self._lock:
            watched = self._watched
            if what == "look":
                watched.looked_s, watched.progress, watched.problem = time.time(), None, ""
                if value is not None:
                    watched.looks.append({"at_s": watched.looked_s, **value})
            elif what == "ended":
                watched.problem = watched.problem or "the process that looks has ended"
            else:
                setattr(watched, what, value)

    def _hear_verify(self, what: str, value: Any) -> None:
        with self._lock:
            verified = self._verified
            if what == "progress":
                verified.progress = value
                return
            verified.running, verified.progress = False, None
            if what == "report":
                verified.report, verified.finished_s, verified.problem = value, time.time(), ""
            else:
                verified.problem = value or "the process that verifies has ended"

    def overview(self) -> dict[str, object]:
        """Return what is known of the whole directory."""
        with self._lock:
            watched = self._watched
            return {
                "directory": self._directory,
                "vua": __version__,
                "tokenizer": self._tokenize is not None,
                "usage": watched.usage,
                "progress": watched.progress,
                "looked_s": watched.looked_s,
                "now_s": time.time(),
                "problem": watched.problem,
                "namespaces": watched.namespaces,
                "saved": watched.saved,
                "looks": list(watched.looks),
                "verify": asdict(self._verified),
            }

    def health(self) -> list[dict[str, object]]:
        """Return the findings of `vua doctor` that need no writing; none for a bucket."""
        return [asdict(one) for one in self._catalog().findings_at_rest(self._security)]

    def explain(self, asked: dict[str, object]) -> dict[str, object]:
        """Return why a prompt hits or misses, given ``tokens`` or, with a tokenizer, ``text``."""
        given = {name: str(asked.get(name) or "") for name in ("tokens", "text", "salt")}
        if given["text"] and self._tokenize is None:
            raise ConfigError("a text needs a tokenizer: start with --tokenizer MODELDIR")
        salt = given["salt"]
        if given["text"] and self._tokenize is not None:
            prompts = self._tokenize.prompts(given["text"], "the prompt")
            if len(prompts) != 1:
                raise ConfigError(f"explain takes one prompt here, found {len(prompts)}")
            ids, salt = prompts[0].ids, salt or prompts[0].salt
        else:
            ids = parse_ids(given["tokens"], "the prompt")
        with self._lock:
            chunks = sum(one["chunks"] for one in self._watched.namespaces)
        question = Question(salt=salt, quick=chunks > _FEW, security=self._security)
        return explain_ids(self._directory, ids, question).describe()

    def verify(self) -> None:
        """Start verifying everything, unless that is in progress."""
        with self._lock:
            if not self._verified.running:
                self._verified.running, self._verified.problem = True, ""
                self._verifier.ask()


def _verify(directory: str, security: Security, talk: Talk) -> None:
    """Verify at each request, and send the report."""
    while talk.wait():
        try:
            report: Any = verify(directory, security=security, show=talk.show).describe()
        except (VUAError, OSError) as problem:
            talk.tell("problem", str(problem))
            continue
        for namespace in report["namespaces"]:
            namespace["damaged"] = len(namespace["problems"])
            del namespace["problems"][_PROBLEMS:]
        talk.tell("report", report)


_PAGE: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/ui.css": ("ui.css", "text/css; charset=utf-8"),
    "/ui.js": ("ui.js", "text/javascript; charset=utf-8"),
}
"""They reveal nothing about the directory, so they need no token."""
_ASKED: Final[dict[str, tuple[str, Callable[[State, dict[str, Any]], object]]]] = {
    "/api/overview": ("GET", lambda state, _: state.overview()),
    "/api/health": ("GET", lambda state, _: state.health()),
    "/api/explain": ("POST", State.explain),
    "/api/verify": ("POST", lambda state, _: state.verify()),
}  # fmt: skip
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
_MOST_BODY_NBYTES: Final = 16 << 20
_PATIENCE_S: Final = 60.0
"""Longest time between two parts of a request."""
_MOST_WAITING: Final = 64
"""Connections that wait for a request, or send one. One more ends the oldest of them."""


class Server(ThreadingHTTPServer):
    """Serves on loopback, each connection in a thread."""

    daemon_threads = True
    request_queue_size = 2 * _MOST_WAITING

    def __init__(self, port: int, state: State) -> None:
        """Bind ``port``, 0 for any free one. Raises OSError if it is taken."""
        super().__init__(("127.0.0.1", port), _Handler)
        self.state, self.token = state, secrets.token_urlsafe(24)
        self._lock, self._waiting = threading.Lock(), dict[Any, None]()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own."""
        self.await_request(request)
        super().process_request(request, client_address)

    def await_request(self, connection: Any) -> None:
        """Count a connection as waiting, and end the oldest of too many."""
        with self._lock:
            self._waiting[connection] = None
            if len(self._waiting) > _MOST_WAITING:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(SHUT_RDWR)

    def has_request(self, connection: Any) -> None:
        """Count a connection as waiting no more."""
        with self._lock:
            self._waiting.pop(connection, None)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.has_request(request)
        super().shutdown_request(request)

    def handle_error(self, *_: object) -> None:
        """Log what a connection met; the other connections stay."""
        log.debug("a request failed", exc_info=True)  # noqa: LOG014 - called by a handler

    @property
    def url(self) -> str:
        """The page's address. Browsers neither send nor log what follows the #."""
        return f"http://127.0.0.1:{self.server_port}/#token={self.token}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "vua", ""
    timeout = _PATIENCE_S

    def log_message(self, *_: object) -> None:
        """Log nothing: stderr is for errors."""

    def do_GET(self) -> None:
        """Send the page, or answer it; POST is for prompts and long work."""
        try:
            where = urlsplit(self.path)
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError as problem:
            self._send(HTTPStatus.BAD_REQUEST, {"error": plain(str(problem))})
            return
        method, work = _ASKED.get(where.path, ("GET", None))
        if host not in _HOSTS:
            self._send(HTTPStatus.FORBIDDEN, {"error": "this host name is not served"})
        elif self.command == method and where.path in _PAGE:
            name, kind = _PAGE[where.path]
            content = files("vua.cli.ui").joinpath("page", name).read_bytes()
            self._send_bytes(HTTPStatus.OK, content, kind)
        elif not hmac.compare_digest(
            self.headers.get("Authorization", "").encode(), f"Bearer {self.server.token}".encode()
        ):
            self._send(HTTPStatus.FORBIDDEN, {"error": "open the link that `vua ui` has printed"})
        elif self.command != method:
            self.do_PUT()
        elif work is None:
            self._send(HTTPStatus.NOT_FOUND, {"error": "no such page"})
        else:
            self._run(work, {name: given[0] for name, given in parse_qs(where.query).items()})

    do_POST = do_GET  # noqa: N815 - the name that http.server calls

    def do_PUT(self) -> None:
        """Refuse every other method: nothing here changes the directory."""
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "only GET, and POST for some paths"})

    do_DELETE = do_HEAD = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = do_PUT  # noqa: N815

    def _run(self, work: Callable[[State, dict[str, Any]], object], asked: dict[str, Any]) -> None:
        self.server.has_request(self.connection)
        try:
            if self.command == "POST":
                asked = self._body()
            self._send(HTTPStatus.OK, work(self.server.state, asked))
        except (VUAError, OSError, ValueError, RecursionError) as problem:
            self._send(HTTPStatus.BAD_REQUEST, {"error": plain(str(problem))})
        finally:
            self.server.await_request(self.connection)

    def _body(self) -> dict[str, Any]:
        """Return the JSON object that was sent. Raises ValueError."""
        nbytes = int(self.headers.get("Content-Length", ""))
        if not 0 <= nbytes <= _MOST_BODY_NBYTES:
            self.close_connection = True
            raise ValueError(f"at most {_MOST_BODY_NBYTES >> 20} MiB can be sent")
        given = json.loads(self.rfile.read(nbytes))
        if not isinstance(given, dict):
            raise ValueError("expected a JSON object")  # noqa: TRY004 - of values, as json raises
        return given

    def _send(self, status: HTTPStatus, value: object) -> None:
        self._send_bytes(status, json.dumps(value).encode(), "application/json")

    def _send_bytes(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        if status != HTTPStatus.OK:
            self.close_connection = True  # a body that was not read is no further request
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, POST")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


# -- the command ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UiReport(Report):
    """The page's address."""

    directory: str
    url: str

    def describe(self) -> object:
        return {"directory": self.directory, "url": self.url}

    def show(self) -> None:
        print(f"{self.directory}: open {self.url}\nCtrl-C ends it", flush=True)


@command("ui", as_owner_of=True)
@click.option(
    "--port", metavar="N", type=int, default=0, help="of 127.0.0.1; default one that is free"
)
@click.option(
    "--tokenizer", "model", metavar="MODELDIR", help="whose tokenizer.json takes texts to explain"
)
def ui(
    directory: str,
    *,
    port: int,
    model: str | None,
    security: Security = NO_KEYS,
    output: Output,
) -> int:
    """Serve the page until Ctrl-C; ``model`` is the directory of a tokenizer for pasted texts.

    Raises ConfigError if the port is taken or there is no tokenizer, StorageError without such a
    directory.
    """
    # Forks: before this process speaks to a bucket, whose connections no child may have.
    state = State(directory, security, None if model is None else Tokenizer(model))
    try:
        open_catalog(directory).contents()
        try:
            server = Server(port, state)
        except (OSError, OverflowError) as problem:
            text = f"port {port} of 127.0.0.1 cannot be taken: {problem}"
            raise ConfigError(f"{text}; leave out --port for another") from problem
        with server:
            output.show(UiReport(directory, server.url))
            server.serve_forever()
    finally:
        state.close()
    return SOUND
