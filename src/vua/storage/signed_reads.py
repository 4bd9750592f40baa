"""Requests to S3 by signed URLs: bodies read straight into reused memory, and odd requests.

:class:`SignedReads`: obstore collects bodies in its own memory, which takes twice the CPU time.
Here it only signs a URL, which is then read over a plain connection. Only the usual answer is
accepted. For anything else the result is None, and the caller uses the other client, which retries,
waits and knows errors.

:class:`SignedRequests`: requests that obstore signs but cannot send. One is a listing with encoded
keys, so that any key comes through: obstore gives up a listing with a key that is not a path
(``kv//x``, ``..``, a control character). The other is a write with a checksum in a header, which
buckets with object lock require. A URL is signed for one object; with a question mark at the end of
the endpoint it is signed with a query.
"""

from __future__ import annotations

import base64
import email.utils
import functools
import hashlib
import http.client
import logging
import socket
import ssl
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Final, NamedTuple
from urllib.parse import quote, unquote_plus, urlsplit
from xml.etree import ElementTree as ET

log = logging.getLogger(__name__)

_VALID: Final = timedelta(minutes=15)
"""Validity of a signed URL: as wrong as a clock may be for other requests."""
_CONNECT_S: Final = 2.0
_READ_S: Final = 3.0
"""A connection with nothing received for so long is dead."""
_TOTAL_S: Final = 60.0
_IDLE_S: Final = 20.0
"""A connection idle for longer is not reused: a middlebox may have dropped it."""
_PAUSE_S: Final = 5.0
"""After anything unusual, requests use the other client for so long."""
_HEAD_NBYTES: Final = 64 << 10
_HEAD_STEP_NBYTES: Final = 4 << 10
_HEAD_ENDS: Final = b"\r\n\r\n"
_REFUSAL_NBYTES: Final = 64 << 10
_OK, _PART, _NOT_FOUND = "200", "206", "404"


class Meta(NamedTuple):
    """An object as its server describes it."""

    key: str
    """Relative to the bucket's URL."""
    nbytes: int
    modified_s: float
    """Seconds since 1970 of the last write; some servers return whole seconds."""
    tag: bytes
    """Distinguishes these bytes from any others that ever have this name (an ETag)."""


class SignedReads:
    """Reads objects of one bucket by signed URLs. Thread-safe; not usable across a fork."""

    def __init__(
        self,
        sign: Callable[[str, timedelta], str],
        memory: Callable[[int], memoryview],
        bundle: str | None,
        *,
        allow_http: bool,
    ) -> None:
        """Send nothing. ``sign`` makes an object's URL from its key, valid for some time.

        ``memory`` allocates a body's memory. ``bundle`` is a file of certificates that are trusted
        beside the system's.
        """
        self._sign, self._memory, self._bundle = sign, memory, bundle
        self._allow_http = allow_http
        self._idle: list[tuple[float, str, _Connection]] = []
        self._resume_s = 0.0

    def get(self, key: str, part: tuple[int, int] | None) -> tuple[Meta, memoryview] | None:
        """Return an object, or its bytes ``part[0]`` to ``part[1]``; None: use the other client.

        Raises FileNotFoundError.
        """
        if time.monotonic() < self._resume_s:
            return None
        try:
            found = self._get(key, part)
        except FileNotFoundError:
            raise
        except Exception as problem:  # noqa: BLE001 - a server may send anything; asked otherwise
            log.debug("not read by a signed address: %s", type(problem).__name__)  # no address
            found = None
        if found is None:
            self._resume_s = time.monotonic() + _PAUSE_S
        return found

    def _get(self, key: str, part: tuple[int, int] | None) -> tuple[Meta, memoryview]:
        """As :meth:`get`; raises FileNotFoundError, and other exceptions for an unusual answer."""
        scheme, _, rest = self._sign(key, _VALID).partition("://")
        host, _, path = rest.partition("/")
        origin = f"{scheme}://{host}"
        connection, is_read = self._connection(origin), False
        try:
            status, headers = connection.ask(f"/{path}", part)
            nbytes, body_nbytes = _lengths(status, headers, part)
            data = self._memory(body_nbytes)
            connection.read_into(data)
            is_read = True
        finally:
            if not is_read:
                connection.close()
        if headers.get("connection", "").lower() == "close":
            connection.close()
        else:
            self._idle.append((time.monotonic(), origin, connection))
        if status == _NOT_FOUND:
            raise FileNotFoundError(key)
        modified_s = _seconds(headers["last-modified"])
        return Meta(key, nbytes, modified_s, headers.get("etag", "").encode()), data

    def _connection(self, origin: str) -> _Connection:
        """Return a reused or a new connection. Raises OSError, ValueError."""
        while self._idle:
            try:
                since_s, its_origin, connection = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if its_origin == origin and time.monotonic() - since_s < _IDLE_S:
                return connection
            connection.close()
        to = urlsplit(origin)
        if _has_proxy(to.scheme, to.netloc) or not (self._allow_http or to.scheme == "https"):
            raise ValueError(origin)
        port = to.port or {"http": 80, "https": 443}[to.scheme]
        stream = socket.create_connection((str(to.hostname), port), _CONNECT_S)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if to.scheme == "https":
            stream = trust(self._bundle).wrap_socket(stream, server_hostname=to.hostname)
        stream.settimeout(None)
        # Limits of the system, not of Python: a body is then received by one call.
        limit = struct.pack("ll", *divmod(int(_READ_S * 1e6), 10**6))
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        return _Connection(stream, to.netloc)


class _Connection:
    """One connection to a server; HTTP/1.1, one request at a time."""

    def __init__(self, connected: socket.socket, host: str) -> None:
        """Own a socket whose every wait has a time limit."""
        self._socket, self._host = connected, host
        self._flags = 0 if isinstance(connected, ssl.SSLSocket) else socket.MSG_WAITALL
        self._body = b""
        """The part of a body that arrived with its head."""

    def close(self) -> None:
        self._socket.close()

    def __del__(self) -> None:
        self.close()

    def ask(self, path: str, part: tuple[int, int] | None) -> tuple[str, dict[str, str]]:
        """Request an object or a part of it; return the answer's status and headers.

        Header names are in lower case. Raises OSError, ValueError.
        """
        wanted = "" if part is None else f"Range: bytes={part[0]}-{part[1] - 1}\r\n"
        self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: {self._host}\r\n{wanted}\r\n".encode())
        first, *lines = self._head().decode("latin-1").split("\r\n")
        version, status, *_ = first.split(" ", 2)
        split = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in split}
        if version != "HTTP/1.1" or "transfer-encoding" in headers:
            raise ValueError(version)
        return status, headers

    def _head(self) -> bytes:
        """Receive an answer up to its body. Raises as :meth:`read_into` does."""
        until_s, head = time.monotonic() + _TOTAL_S, self._body
        while (stop := head.find(_HEAD_ENDS)) < 0:
            seen = self._socket.recv(_HEAD_STEP_NBYTES)
            head += seen
            if not seen or len(head) > _HEAD_NBYTES or time.monotonic() > until_s:
                raise ValueError(len(head))
        self._body = head[stop + len(_HEAD_ENDS) :]
        return head[:stop]

    def read_into(self, data: memoryview) -> None:
        """Receive a body. Raises OSError; ValueError if it is short or too slow."""
        until_s, place = time.monotonic() + _TOTAL_S, len(self._body)
        data[:place], self._body = self._body, b""  # ValueError where that is more
        while place < len(data):
            count = self._socket.recv_into(data[place:], 0, self._flags)
            if not count or time.monotonic() > until_s:
                raise ValueError(place)
            place += count


def _lengths(status: str, headers: dict[str, str], part: tuple[int, int] | None) -> tuple[int, int]:
    """Return the object's length, and the number of bytes sent.

    Raises ValueError or KeyError if that was not requested.
    """
    nbytes = total = int(headers["content-length"])
    if status == _PART and part is not None:
        span, _, text = headers["content-range"].partition("/")
        total, is_wanted = int(text), span == f"bytes {part[0]}-{part[0] + nbytes - 1}"
    elif status == _NOT_FOUND:
        is_wanted = nbytes <= _REFUSAL_NBYTES
    else:
        is_wanted = status == _OK and part is None
    if not is_wanted:
        raise ValueError(status)
    return total, nbytes


@functools.lru_cache(16)  # head and body may arrive in one packet
def _seconds(date: str) -> float:
    return email.utils.parsedate_to_datetime(date).timestamp()


def _has_proxy(scheme: str, host: str) -> bool:
    """Whether the environment names a proxy, which only the other client supports."""
    proxies = urllib.request.getproxies()
    return bool(proxies.keys() & {scheme, "all"}) and not urllib.request.proxy_bypass(host)


@functools.cache
def trust(bundle: str | None) -> ssl.SSLContext:
    """Return the trusted certificates: the system's, and those of a file."""
    context = ssl.create_default_context()
    if bundle is not None:
        context.load_verify_locations(bundle)
    return context


_TIMEOUT_S: Final = 10.0
_TRIES: Final = 3
_RETRY_PAUSE_S: Final = 0.2
_MAX_PAGE_NBYTES: Final = 32 << 20


class RefusedError(Exception):
    """A server's answer, as status and body, in obstore's wording."""


class SignedRequests:
    """Requests to one prefix in a bucket. Thread-safe."""

    def __init__(
        self,
        sign: Callable[[str, str, timedelta], str],
        sign_at: Callable[[str, str, timedelta], str],
        prefix: str,
        bundle: str | None,
        sent: Callable[[], None],
    ) -> None:
        """Send nothing.

        ``sign`` makes the URL of an object from a method and its key. ``sign_at`` makes one of an
        endpoint. ``prefix`` is the key prefix in the bucket, ``bundle`` a file of additionally
        trusted certificates. ``sent`` is called before each further page.
        """
        self._sign, self._sign_at, self._prefix = sign, sign_at, prefix
        self._bundle, self._sent = bundle, sent

    def put(self, key: str, data: bytes | memoryview, *, create: bool) -> None:
        """Write an object with a checksum in a header. Raises RefusedError, OSError.

        With ``create``, FileExistsError if there is one.
        """
        digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        headers = {"Content-MD5": digest, "Content-Type": "application/octet-stream"}
        if create:
            headers["If-None-Match"] = "*"
        try:
            self._ask("PUT", self._sign("PUT", key, _VALID), bytes(data), headers)
        except RefusedError as problem:
            if str(problem).startswith("412 "):
                raise FileExistsError(key) from None
            raise

    def pages(
        self, folder: str, after: str = "", delimiter: str = ""
    ) -> Iterator[tuple[list[str], list[Meta]]]:
        """Yield folders (with a ``delimiter``) and objects below ``folder``, one request at a time.

        Keys are relative to the prefix, folders end with the delimiter. Only keys after ``after``.
        Raises RefusedError, OSError.
        """
        whole = "/".join(part for part in (self._prefix, folder) if part)
        query = {
            "list-type": "2",
            "encoding-type": "url",
            "prefix": f"{whole}/" if whole else "",
            "delimiter": delimiter,
            "start-after": "/".join(part for part in (self._prefix, after) if part and after),
        }
        origin = self._origin()
        while True:
            asked = "&".join(f"{name}={quote(text, '')}" for name, text in query.items() if text)
            url = self._sign_at(f"{origin}?{asked}&x-id=", "GET", _VALID)
            page = _parsed(self._ask("GET", url, None, {}))
            if page.findtext("{*}EncodingType") == "url":
                decode: Callable[[str], str] = _decoded
            else:
                decode = str
            named = page.iterfind("{*}CommonPrefixes/{*}Prefix")
            folders = [decode(one.text or "") for one in named]
            metas = [_meta(one, decode) for one in page.iterfind("{*}Contents")]
            yield (
                [self._relative(one) for one in folders],
                [one._replace(key=self._relative(one.key)) for one in metas],
            )
            token = page.findtext("{*}NextContinuationToken")
            if page.findtext("{*}IsTruncated") != "true" or not token:
                return
            query["continuation-token"] = token
            self._sent()

    def _origin(self) -> str:
        """Return the bucket's address: an object's, without its key."""
        address = self._sign("GET", "x", _VALID).partition("?")[0]
        return address[: -len("/x") - (len(quote(self._prefix)) + 1 if self._prefix else 0)]

    def _relative(self, key: str) -> str:
        return key.removeprefix(f"{self._prefix}/") if self._prefix else key

    def _ask(self, method: str, url: str, data: bytes | None, headers: Mapping[str, str]) -> bytes:
        """Send a request; retry if the server has trouble. Raises RefusedError, OSError."""
        context = trust(self._bundle) if url.startswith("https:") else None
        for left in reversed(range(_TRIES)):
            asked = urllib.request.Request(  # noqa: S310 - an address of ours
                url, data, dict(headers), method=method
            )
            try:
                with urllib.request.urlopen(  # noqa: S310
                    asked, timeout=_TIMEOUT_S, context=context
                ) as answer:
                    body: bytes = answer.read(_MAX_PAGE_NBYTES)
                    return body
            except urllib.error.HTTPError as problem:
                text = problem.read(2000).decode(errors="replace")
                if problem.code < 500 or problem.code == 501 or not left:
                    raise RefusedError(f"{problem.code} {problem.reason}: {text}") from None
            except (OSError, http.client.HTTPException) as problem:
                if not left:
                    raise OSError(f"error sending request: {type(problem).__name__}") from None
            time.sleep(_RETRY_PAUSE_S)
        raise AssertionError


def _decoded(key: str) -> str:
    return unquote_plus(key, errors="backslashreplace")


def _parsed(body: bytes) -> ET.Element:
    try:
        return ET.fromstring(body)  # noqa: S314 - expat bounds what entities make of it
    except ET.ParseError as problem:
        raise OSError(f"error decoding a listing: {problem}") from None


def _meta(one: ET.Element, decode: Callable[[str], str]) -> Meta:
    """Parse an object's description. Raises OSError if it is not one."""
    try:
        time_text = (one.findtext("{*}LastModified") or "").replace("Z", "+00:00")
        modified_s = datetime.fromisoformat(time_text).timestamp()
        nbytes = int(one.findtext("{*}Size") or 0)
    except ValueError as problem:
        raise OSError(f"error decoding a listing: {problem}") from None
    tag = (one.findtext("{*}ETag") or "").encode()
    return Meta(decode(one.findtext("{*}Key") or ""), nbytes, modified_s, tag)
