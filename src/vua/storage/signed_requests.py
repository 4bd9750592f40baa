"""Requests to S3 that the package `obstore` signs and cannot send.

A listing in which keys are encoded, so that any key comes through: obstore gives a whole listing up
for one that is no path of its own (``kv//x``, ``..``, a control character). And a write with a
checksum in a header, which buckets with object lock ask for. An address is signed for
one object; with a question mark at the end of the endpoint it is signed with a query.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Final
from urllib.parse import quote, unquote_plus
from xml.etree import ElementTree as ET

from vua.storage.signed_reads import Meta, trust

__all__ = ["RefusedError", "SignedRequests"]

_VALID: Final = timedelta(minutes=15)
_TIMEOUT_S: Final = 10.0
_TRIES: Final = 3
_PAUSE_S: Final = 0.2
_MAX_PAGE_NBYTES: Final = 32 << 20


class RefusedError(Exception):
    """What a server answered, as status and body: obstore words it so, too."""


class SignedRequests:
    """Requests to one place in a bucket. Safe for threads."""

    def __init__(
        self,
        sign: Callable[[str, str, timedelta], str],
        sign_at: Callable[[str, str, timedelta], str],
        prefix: str,
        bundle: str | None,
        sent: Callable[[], None],
    ) -> None:
        """Send nothing.

        ``sign`` makes the address of an object in the place from a method and its key. ``sign_at``
        makes one of an endpoint instead. ``prefix`` is the place's key in the bucket, ``bundle`` a
        file of certificates that are trusted, too. ``sent`` is called before each further page.
        """
        self._sign, self._sign_at, self._prefix = sign, sign_at, prefix
        self._bundle, self._sent = bundle, sent

    def put(self, key: str, data: bytes | memoryview, *, create: bool) -> None:
        """Write an object with a checksum in a header. Raises RefusedError, OSError.

        With ``create`` FileExistsError where there is one.
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
        """Yield folders (with a ``delimiter``) and objects below ``folder``, a request at a time.

        Keys are relative to the place, folders end with the delimiter. Only what follows the key
        ``after``. Raises RefusedError, OSError.
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
        """Return the address of the bucket: that of an object, less its key."""
        address = self._sign("GET", "x", _VALID).partition("?")[0]
        return address[: -len("/x") - (len(quote(self._prefix)) + 1 if self._prefix else 0)]

    def _relative(self, key: str) -> str:
        return key.removeprefix(f"{self._prefix}/") if self._prefix else key

    def _ask(self, method: str, url: str, data: bytes | None, headers: Mapping[str, str]) -> bytes:
        """Send a request, again where the server has trouble. Raises RefusedError, OSError."""
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
            time.sleep(_PAUSE_S)
        raise AssertionError


def _decoded(key: str) -> str:
    return unquote_plus(key, errors="backslashreplace")


def _parsed(body: bytes) -> ET.Element:
    try:
        return ET.fromstring(body)  # noqa: S314 - expat bounds what entities make of it
    except ET.ParseError as problem:
        raise OSError(f"error decoding a listing: {problem}") from None


def _meta(one: ET.Element, decode: Callable[[str], str]) -> Meta:
    """Raise OSError for what is no object's description."""
    try:
        time_text = (one.findtext("{*}LastModified") or "").replace("Z", "+00:00")
        modified_s = datetime.fromisoformat(time_text).timestamp()
        nbytes = int(one.findtext("{*}Size") or 0)
    except ValueError as problem:
        raise OSError(f"error decoding a listing: {problem}") from None
    tag = (one.findtext("{*}ETag") or "").encode()
    return Meta(decode(one.findtext("{*}Key") or ""), nbytes, modified_s, tag)
