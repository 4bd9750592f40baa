"""A bucket, or a part of one, as a place for a cache: S3, GCS, Azure and what speaks like them.

Everything that goes to an object store goes through :class:`Bucket`. It counts requests, bounds
what is under way, repeats what failed for some seconds with random pauses, and leaves a store alone
that goes on failing. What fails is an OSError here, as with files, and says no secret.

Credentials, regions and endpoints are found as the providers' own tools find them: environment,
web identity, instance metadata. Plain http is refused unless the environment asks for it
(``AWS_ALLOW_HTTP=true``). The package `obstore` (extra ``object``) speaks to the servers.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from vua.errors import ConfigError, NotWritableError, StorageError
from vua.io.breaker import Breaker
from vua.io.buffers import BufferPool
from vua.io.byte_gate import ByteGate
from vua.io.forks import watch
from vua.io.map_on import map_on
from vua.io.threads import Threads
from vua.storage.bucket_counts import REQUESTS_AT_ONCE, requests
from vua.storage.bucket_problems import explained, told
from vua.storage.signed_reads import Meta, SignedReads

__all__ = ["SCHEMES", "Bucket", "Meta"]

SCHEMES: Final = ("s3", "gs", "az", "file", "memory")
"""What a URL of a cache may begin with. ``memory`` is of this process alone, for tests."""

_SMALL_REQUESTS: Final = 64
"""Requests under way at a time that carry no body; `REQUESTS_AT_ONCE` of the others."""
_IN_FLIGHT_NBYTES: Final = 160 << 20
"""Bytes of bodies under way at a time, of all buckets of this process; a larger one goes alone.
Room for 16 entries of 8 MiB with their headers, in buffers that are somewhat larger."""
_KEPT_NBYTES: Final = _IN_FLIGHT_NBYTES
"""Memory of bodies that is kept to be used again: fresh memory costs as much as to receive them."""
_SMALL_NBYTES: Final = 16 << 20
"""A body up to this size is taken in one piece, which costs a copy less: its memory is used again
by the allocator."""
_PIECE_NBYTES: Final = 256 << 10
"""Of a body, at least: what came is copied so often, and stays in the processor's cache."""
_RETRY: Final = {
    "max_retries": 5,
    "retry_timeout": timedelta(seconds=4),
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(seconds=1),
        "base": 2,
    },
}
"""A request is begun anew (jittered) for 4 s at most: engines give storage up after 10 s."""
_READ_TIMEOUTS: Final = {"connect_timeout": "2s", "read_timeout": "3s", "timeout": "60s"}
"""Of requests that answer with bytes: a connection on which nothing comes for 3 s is dead."""
_WRITE_TIMEOUTS: Final = {"connect_timeout": "2s", "timeout": "30s"}
"""Of those that send: nothing comes back for as long as a body is on its way."""
_ASIDE: Final = ".tmp-"
"""Name of an object that is being renewed, as of files that are being written."""

T = TypeVar("T")
A = TypeVar("A")


@functools.cache
def _library() -> Any:  # noqa: ANN401 - imported late, since most caches are directories
    """Return the package `obstore`. Raises ConfigError where it is not installed."""
    try:
        for part in ("exceptions", "store"):
            importlib.import_module(f"obstore.{part}")
        return importlib.import_module("obstore")
    except ImportError as problem:
        msg = "a cache in a bucket needs the package obstore: pip install obstore"
        raise ConfigError(msg) from problem


class Bucket:
    """The objects below one URL. Safe for threads.

    A forked child may not use the connections of its parent: there every request fails at once,
    where the parent has sent any.
    """

    _open: Final[dict[str, Bucket]] = {}
    _opening: Final = threading.Lock()

    def __init__(self, url: str) -> None:
        """Prepare to speak to a server, and send nothing; :meth:`at` shares what is open."""
        self.url = url
        """Without a secret: one that holds any is refused."""
        self.scheme = url.partition(":")[0]
        self.counts: Counter[str] = Counter()
        """So far: requests by kind (get, head, put, list, copy, delete), those that failed,
        ``read_nbytes`` and ``written_nbytes``."""
        self.marked: set[str] = set()
        """Places in it that had VUA's mark when this process looked, see `bucket_mark`."""
        self.breaker = Breaker()
        self._library = library = _library()
        from_url = library.store.from_url
        try:
            if self.scheme in ("file", "memory"):
                more = {"mkdir": True} if self.scheme == "file" else {}
                self._reads = self._writes = from_url(url, **more)
            else:
                signing = _signing(self.scheme)
                self._reads, self._writes = (
                    from_url(url, client_options=_client(one), retry_config=_RETRY, **signing)
                    for one in (_READ_TIMEOUTS, _WRITE_TIMEOUTS)
                )
        except (library.exceptions.BaseError, OSError, ValueError) as problem:
            msg = f"{url} cannot be used: {told(problem)}"
            raise ConfigError(msg) from None
        self._signed: SignedReads | None = None
        if self.scheme == "s3":  # others ask their server for each signature
            sign = functools.partial(library.sign, self._reads, "GET")
            self._signed = SignedReads(sign, self.memory, _bundle(), allow_http=_allows_http())

    @classmethod
    def at(cls, url: str) -> Bucket:
        """Return the bucket of a URL, one for all who use it in this process.

        Raises ConfigError for a URL that is none of a bucket, or that holds a secret; and without
        the package that speaks to servers.
        """
        parts = urlsplit(url)
        if parts.username or parts.password or parts.query or parts.fragment:
            msg = (
                f"{parts.scheme}://{parts.hostname or ''}...: a cache's URL is a bucket and a "
                "prefix, nothing else; credentials and endpoints belong into the environment"
            )
            raise ConfigError(msg)
        if parts.scheme not in SCHEMES:
            msg = f"{url}: a cache's URL begins with one of {', '.join(SCHEMES)}"
            raise ConfigError(msg)
        if parts.scheme in ("s3", "gs", "az") and not parts.hostname:
            msg = f"{url} names no bucket"
            raise ConfigError(msg)
        url = f"{parts.scheme}://{parts.netloc}/{parts.path.strip('/')}".rstrip("/")
        with cls._opening:
            if url not in cls._open:
                cls._open[url] = cls(url)
            return cls._open[url]

    def __repr__(self) -> str:
        """Return the place, and no credentials."""
        return f"Bucket({self.url!r})"

    # -- requests -----------------------------------------------------------------------------

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> tuple[Meta, memoryview]:
        """Return an object's description, and its bytes or ``nbytes`` of them from ``offset`` on.

        Of a shorter object what there is. The bytes are the caller's for as long as it holds them.
        Raises FileNotFoundError, StorageError.
        """
        part = None if nbytes is None else (offset, offset + nbytes)
        options: Any = {} if part is None else {"range": part}
        with self._request("get", key):
            if self._signed and (found := self._signed.get(key, part)):
                self._count("read_nbytes", len(found[1]))
                return found
            answer = self._library.get(self._reads, key, options=options)
            start, stop = answer.range
            if stop - start <= _SMALL_NBYTES:
                data = memoryview(answer.bytes())
                self._count("read_nbytes", len(data))
                return _meta(answer.meta), data
            data, place = _runtime.buffers.take(stop - start).data, 0
            for piece in answer.stream(min_chunk_size=_PIECE_NBYTES):
                room = data[place : place + len(piece)]
                if len(room) < len(piece):
                    raise OSError(errno.EIO, "more was sent than announced")
                room[:] = memoryview(piece)
                place += len(piece)
            data = data[:place]
        self._count("read_nbytes", len(data))
        return _meta(answer.meta), data

    def head(self, key: str) -> Meta:
        """Return an object's description. Raises FileNotFoundError, StorageError."""
        with self._request("head", key):
            return _meta(self._library.head(self._reads, key))

    def put(self, key: str, data: bytes | memoryview, *, create: bool = False) -> None:
        """Write an object: visible as a whole, or not at all.

        With ``create`` only where there is none. Raises FileExistsError (a server may ignore the
        condition, and overwrite), StorageError.
        """
        mode: Any = "create" if create else "overwrite"
        with self._request("put", key):
            self._library.put(self._writes, key, data, mode=mode, use_multipart=False)
        self._count("written_nbytes", len(data))

    def walk(self, prefix: str = "") -> Iterator[Meta]:
        """Yield all objects whose key begins with the folder ``prefix``. Raises StorageError."""
        batches = iter(self._library.list(self._reads, prefix or None, chunk_size=1000))
        while True:
            with self._request("list", prefix):
                batch = next(batches, None)
            if not batch:
                return
            yield from map(_meta, batch)

    def folders(self, prefix: str = "") -> tuple[Sequence[str], Sequence[Meta]]:
        """Return the folders right below a folder, and the objects. Raises StorageError."""
        with self._request("list", prefix):
            found = self._library.list_with_delimiter(self._reads, prefix or None)
        return list(found["common_prefixes"]), [_meta(one) for one in found["objects"]]

    def renew(self, key: str) -> None:
        """Give an object the time of now: it is copied aside and back, at the server.

        Raises FileNotFoundError, StorageError.
        """
        if self.scheme == "file":  # whose copies are links
            os.utime(f"{urlsplit(self.url).path}/{key}")
            return
        aside = f"{key.rpartition('/')[0]}/{_ASIDE}{secrets.token_hex(8)}"
        try:
            for one, other in ((key, aside), (aside, key)):
                with self._request("copy", one):
                    self._library.copy(self._writes, one, other)
        finally:
            with suppress(OSError):
                self.delete([aside])

    def try_renew(self, key: str) -> bool:
        """Return whether :meth:`renew` succeeded; raises nothing."""
        with suppress(OSError):
            self.renew(key)
            return True
        return False

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, where they are there. Raises StorageError."""
        for first in range(0, len(keys), 1000):
            some = list(keys[first : first + 1000])
            with self._request("delete", some[0]):
                try:
                    self._library.delete(self._writes, some)
                except FileNotFoundError:
                    if len(some) > 1:  # some stores stop there
                        for key in some:
                            self._delete_one(key)

    def _delete_one(self, key: str) -> None:
        try:
            self._library.delete(self._writes, key)
        except FileNotFoundError:
            return

    @contextmanager
    def _request(self, kind: str, key: str) -> Iterator[None]:
        """Count a request, and make an OSError of what it raises."""
        where = f"{self.url}/{key}".rstrip("/")
        if _runtime.is_forked:
            msg = f"{where}: this process was forked from one that had used a bucket; start it anew"
            raise StorageError(errno.ECHILD, msg)
        if not self.breaker.allows():
            msg = f"{self.url} did not answer, and is left alone for a while"
            raise StorageError(errno.EHOSTDOWN, msg)
        _runtime.is_used = True
        errors = self._library.exceptions
        self._count(kind)
        try:
            yield
        except FileNotFoundError:
            self.breaker.succeeded()
            if kind == "put":
                raise StorageError(errno.ENOENT, f"{where}: no such bucket") from None
            raise FileNotFoundError(errno.ENOENT, "no such object", where) from None
        except (errors.AlreadyExistsError, errors.PreconditionError):
            self.breaker.succeeded()
            raise FileExistsError(errno.EEXIST, "object exists", where) from None
        except (errors.BaseError, OSError) as problem:
            self._count("failed")
            error = explained(problem, kind, where)
            if isinstance(error, NotWritableError):
                self.breaker.succeeded()  # it answers: who may only read goes on reading
            else:
                self.breaker.failed()
            raise error from None
        self.breaker.succeeded()

    def _count(self, what: str, by: int = 1) -> None:
        self.counts[what] += by
        requests[what] += by

    # -- many at once -------------------------------------------------------------------------

    @staticmethod
    def each(work: Callable[[A], T], items: Sequence[A], *, small: bool = False) -> list[T]:
        """Return ``[work(item) for item in items]``, some at a time; ``small``: more of them.

        ``work`` raises nothing.
        """
        if len(items) == 1:
            return [work(items[0])]
        threads = _runtime.small if small else _runtime.threads
        return map_on(threads, lambda _, item: work(item), items)

    @staticmethod
    def memory(nbytes: int) -> memoryview:
        """Return memory like that of bodies, which is used again when nobody holds it."""
        return _runtime.buffers.take(nbytes).data

    @staticmethod
    def in_flight(nbytes: int) -> AbstractContextManager[None]:
        """Return what to enter while a body of ``nbytes`` is under way: it waits for room."""
        return _runtime.gate.hold(nbytes)


class _Runtime:
    """What all buckets of a process share: threads, and whether connections were inherited."""

    def __init__(self) -> None:
        self.threads = Threads(REQUESTS_AT_ONCE, "vua-bucket")
        self.small = Threads(_SMALL_REQUESTS, "vua-bucket-small")
        self.gate = ByteGate(_IN_FLIGHT_NBYTES)
        self.buffers = BufferPool(_KEPT_NBYTES)
        self.is_used = self.is_forked = False
        watch(self)

    def after_fork(self) -> None:
        """Refuse connections that the parent has made; see :mod:`vua.io.forks`."""
        self.is_forked = self.is_used


_runtime: Final = _Runtime()


def _allows_http() -> bool:
    return os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")


def _signing(scheme: str) -> dict[str, object]:
    """Leave bodies out of S3's signatures: to hash them takes half of a save's processor time.

    Readers verify them. ``AWS_UNSIGNED_PAYLOAD`` decides where it is set.
    """
    if scheme != "s3" or "AWS_UNSIGNED_PAYLOAD" in os.environ:
        return {}
    return {"unsigned_payload": True}


def _bundle() -> str | None:
    """Return the file of certificates to trust that the environment names, where there is one."""
    bundle = os.environ.get("AWS_CA_BUNDLE")
    return bundle if bundle and os.path.isfile(bundle) else None


def _client(timeouts: Mapping[str, str]) -> dict[str, object]:
    options: dict[str, object] = {**timeouts, "allow_http": _allows_http()}
    if bundle := _bundle():
        with open(bundle, "rb") as stream:
            options["root_certificate"] = stream.read()
    return options


def _meta(found: Mapping[str, Any]) -> Meta:
    modified: datetime = found["last_modified"]
    return Meta(found["path"], found["size"], modified.timestamp(), (found["e_tag"] or "").encode())
