"""A proxy that damages or delays an object store's answers, to test how a cache copes."""

from __future__ import annotations

import http.client
import itertools
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

HARMS: Final = ("slow", "stalled", "503", "429", "reset", "truncated", "flipped")

REFUSALS: Final = {
    "503": (503, "SlowDown"),
    "429": (429, "TooManyRequests"),
    "wrong region": (400, "AuthorizationHeaderMalformed"),
    "redirected": (301, "PermanentRedirect"),
    "expired": (400, "ExpiredToken"),
    "clock": (403, "RequestTimeTooSkewed"),
    "no bucket": (404, "NoSuchBucket"),
}
"""S3's refusals, as status and code: also harms."""

QUIRKS: Final = {
    "no conditions": (501, "NotImplemented"),
    "bad conditions": (400, "InvalidArgument"),
    "failing conditions": (412, "PreconditionFailed"),
    "no bulk": (405, "MethodNotAllowed"),
    "locked": (403, "AccessDenied"),
    "no checksum": (400, "InvalidRequest"),
}
"""Refusals of single kinds of requests by some servers, as status and code. They concern PUTs with
a condition, deletions of many, all deletions, or PUTs without a checksum in a header, as AWS wants
one in a bucket with object lock. Other requests are passed on."""

_BODY_HASH: Final = "x-amz-content-sha256"
_POLL_S: Final = 0.05
_STALL_S: Final = 30.0


class FaultyProxy:
    """Passes HTTP requests on, and harms some of the answers. Thread-safe; one server each.

    ``plan`` is asked before each request, with its number from 0 on, its method and its path, and
    returns one of :data:`HARMS`, :data:`REFUSALS` or :data:`QUIRKS`, or "" for none.
    """

    def __init__(
        self,
        endpoint: str,
        plan: Callable[[int, str, str], str] = lambda *_: "",
        *,
        delay_s: float = 0.05,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Listen on a free port of the loopback, for ``endpoint`` (``http://host:port``).

        ``delay_s`` delays an answer that is ``slow``. With ``tls``, which has a certificate of
        127.0.0.1, clients speak https to the proxy.
        """
        self.plan, self.delay_s = plan, delay_s
        self.counts: Counter[str] = Counter()
        """Requests by harm, or "" if they were passed on unharmed."""
        self.unsigned: Counter[str] = Counter()
        """Requests by method whose signature leaves out the body (S3's ``UNSIGNED-PAYLOAD``)."""
        self.to = urlsplit(endpoint)
        self.numbers = itertools.count()
        self.closed = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._server.tls = tls
        scheme = "http" if tls is None else "https"
        self.endpoint = f"{scheme}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    proxy: FaultyProxy
    tls: ssl.SSLContext | None

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; its serving thread does the handshake."""
        connection, address = super().get_request()
        if self.tls is not None:
            connection = self.tls.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, address

    def handle_error(self, request: object, client_address: object) -> None:
        """Log nothing: clients disconnect in the middle here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""

    def _pass_on(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        harm = proxy.plan(next(proxy.numbers), self.command, self.path)
        proxy.counts[harm] += 1
        proxy.unsigned[self.command] += self.headers.get(_BODY_HASH) == "UNSIGNED-PAYLOAD"
        if harm == "stalled":
            proxy.closed.wait(_STALL_S)
        elif harm == "slow":
            proxy.closed.wait(proxy.delay_s)
        if harm in REFUSALS or self._has_quirk(harm):
            status, code = {**REFUSALS, **QUIRKS}[harm]
            text = f"<Error><Code>{code}</Code></Error>".encode()
            self._answer(status, [("Content-Length", str(len(text)))], text)
            return
        try:
            status, headers, data = self._ask(body)
        except OSError:
            self._cut()
            return
        if harm == "flipped":
            data = _flipped(data)
        if harm in ("reset", "truncated"):
            data = data[: len(data) // 2 if harm == "truncated" else 0]
            self._answer(status, headers, data)
            self._cut()
        else:
            self._answer(status, headers, data)

    def _has_quirk(self, harm: str) -> bool:
        """Whether a server with a quirk refuses this request."""
        if harm.endswith("conditions"):
            return "If-None-Match" in self.headers
        if harm == "no checksum":
            names = {name.lower() for name in self.headers}
            has = any(name.startswith(("x-amz-checksum-", "content-md5")) for name in names)
            return self.command == "PUT" and not has
        bulk = self.command == "POST" and "?delete" in self.path
        return (harm == "no bulk" and bulk) or (
            harm == "locked" and (bulk or self.command == "DELETE")
        )

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """Send the request unchanged, which its signature requires. Raises OSError."""
        to = self.server.proxy.to
        connection = http.client.HTTPConnection(str(to.hostname), to.port, timeout=60)
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            data = answer.read()
        except http.client.HTTPException as problem:
            raise OSError(str(problem)) from problem
        finally:
            connection.close()
        dropped = ("transfer-encoding", "connection")
        headers = [one for one in answer.getheaders() if one[0].lower() not in dropped]
        if answer.chunked or not any(one[0].lower() == "content-length" for one in headers):
            headers.append(("Content-Length", str(len(data))))
        return answer.status, headers, data

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _cut(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)


def _flipped(data: bytes) -> bytes:
    """Return the bytes with one flipped bit in the middle, if there are any."""
    middle = len(data) // 2
    return data[:middle] + bytes(one ^ 1 for one in data[middle : middle + 1]) + data[middle + 1 :]
