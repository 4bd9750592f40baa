"""Requests to a bucket: S3, GCS, Azure and compatible stores.

Everything that goes to an object store goes through :class:`Bucket`. It counts requests, bounds the
bytes in flight, retries failures for some seconds with random pauses, and stops asking a store that
keeps failing. A failure is an OSError, as with files, and never contains a secret.

Credentials, regions and endpoints are found as the providers' own tools find them: environment, web
identity, instance metadata. Plain http is refused unless the environment allows it
(``AWS_ALLOW_HTTP=true``). The package `obstore` (extra ``object``) speaks to the servers.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from vua.errors import ConfigError, NotWritableError, StorageError
from vua.io.forks import watch
from vua.io.memory import BufferPool
from vua.io.pool import Breaker, Pool
from vua.io.words import counted
from vua.storage import REQUESTS_AT_ONCE, requests
from vua.storage.bucket_client import (
    explained,
    is_denied,
    is_panic,
    is_refusal,
    library,
    make_client,
)


class Meta(NamedTuple):
    """An object as its server describes it."""

    key: str
    """Relative to the bucket's URL."""
    nbytes: int
    modified_s: float
    """Seconds since 1970 of the last write; some servers return whole seconds."""
    tag: bytes
    """Distinguishes these bytes from all that ever have this name (an ETag)."""


SCHEMES: Final = ("s3", "gs", "az", "file", "memory")
"""Schemes of a cache's URL. ``memory`` is private to this process, for tests."""

_SMALL_REQUESTS: Final = 64
"""Concurrent requests without a body; with a body there are `REQUESTS_AT_ONCE`."""
_IN_FLIGHT_NBYTES: Final = 160 << 20
"""Bytes of bodies in flight, over all buckets of this process; a larger body goes alone. Enough for
16 entries of 8 MiB with headers, in somewhat larger buffers."""
_KEPT_NBYTES: Final = _IN_FLIGHT_NBYTES
"""Memory of bodies kept for reuse: fresh memory costs as much as receiving them."""
_PART_NBYTES: Final = 8 << 20
"""Most bytes of one request: obstore takes three times the CPU time per byte for 32 MiB at once."""
_PAGE: Final = 1000
"""Objects per request of a listing, as many as S3 allows."""
_WAYS: Final = ((False, True), (True, True), (False, False), (True, False))
"""Ways of a PUT to S3: with a checksum in a header, as buckets with object lock ask for; with a
condition, which some servers refuse. The first that a server accepts is used from then on."""
_ASIDE: Final = ".tmp-"
"""Name prefix of an object that is being renewed; also of files that are being written."""

T = TypeVar("T")
A = TypeVar("A")


class Bucket:
    """The objects below one URL. Thread-safe.

    A forked child may not use its parent's connections: if the parent has sent any request, every
    request of the child fails at once.
    """

    _open: Final[dict[str, Bucket]] = {}
    _opening: Final = threading.Lock()

    def __init__(self, url: str) -> None:
        """Prepare to speak to a server, and send nothing; :meth:`at` shares open buckets."""
        self.url = url
        """Contains no secret: a URL with one is refused."""
        self.scheme = url.partition(":")[0]
        self.counts: Counter[str] = Counter()
        """So far: requests by kind (get, head, put, list, copy, delete), failures, bytes. Bytes are
        ``read_nbytes`` and ``written_nbytes``."""
        self.marked: set[str] = set()
        """Prefixes in it that had VUA's mark when this process looked, see `vua.storage.mark`."""
        self.stuck: set[str] = set()
        """Keys of damaged objects that must not be deleted (object lock): they are overwritten."""
        self.breaker = Breaker()
        self._library = library()
        self._client = client = make_client(url)
        self._reads, self._writes = client.reads, client.writes
        self._last = ""
        self._way = 0
        self._checked: Any = None

    @classmethod
    def at(cls, url: str) -> Bucket:
        """Return the bucket of a URL; one per URL and process.

        Raises ConfigError for a URL that is not a bucket's, or that contains a secret; and if the
        package `obstore` is missing.
        """
        try:
            parts = urlsplit(url)
        except ValueError as problem:
            raise ConfigError(f"{url}: not a URL of a cache ({problem})") from None
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigError(
                f"{parts.scheme}://{parts.hostname or ''}...: a cache's URL is a bucket and a "
                "prefix, nothing else; credentials and endpoints belong into the environment"
            )
        if parts.scheme not in SCHEMES:
            raise ConfigError(f"{url}: a cache's URL begins with one of {', '.join(SCHEMES)}")
        if parts.scheme in ("s3", "gs", "az") and not parts.hostname:
            raise ConfigError(f"{url} names no bucket")
        url = f"{parts.scheme}://{parts.netloc}/{parts.path.strip('/')}".rstrip("/")
        with cls._opening:
            if url not in cls._open:
                cls._open[url] = cls(url)
            return cls._open[url]

    def __repr__(self) -> str:
        return f"Bucket({self.url!r})"

    # -- requests -----------------------------------------------------------------------------

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> tuple[Meta, memoryview]:
        """Return an object's description, and its bytes or ``nbytes`` of them from ``offset`` on.

        Returns fewer bytes at the end of the object. The caller owns the bytes while it holds them.
        Raises FileNotFoundError, StorageError.
        """
        if nbytes is None or nbytes <= _PART_NBYTES:
            return self._get(key, {} if nbytes is None else {"range": (offset, offset + nbytes)})
        first, part = self._get(key, {"range": (offset, offset + _PART_NBYTES)})
        nbytes = min(nbytes, first.nbytes - offset)
        if nbytes <= len(part):
            return first, part
        data, place = _runtime.buffers.take(nbytes).data, len(part)
        data[:place] = part
        while place < nbytes:
            stop = min(place + _PART_NBYTES, nbytes)
            meta, part = self._get(key, {"range": (offset + place, offset + stop)})
            if meta.tag != first.tag or len(part) != stop - place:
                raise FileNotFoundError(errno.ENOENT, "replaced between two requests", key)
            data[place:stop], place = part, stop
        return first, data[:nbytes]

    def _get(self, key: str, options: Any) -> tuple[Meta, memoryview]:
        with self._request("get", key):
            answer = self._library.get(self._reads, key, options=options)
            data = memoryview(answer.bytes())
        self._count("read_nbytes", len(data))
        return _meta(answer.meta), data

    def head(self, key: str) -> Meta:
        """Return an object's description. Raises FileNotFoundError, StorageError."""
        with self._request("head", key):
            return _meta(self._library.head(self._reads, key))

    def put(self, key: str, data: bytes | memoryview, *, create: bool = False) -> None:
        """Write an object: visible as a whole, or not at all.

        With ``create`` only a new one. Raises FileExistsError (some servers ignore the
        condition, and overwrite), StorageError.
        """
        ways = _WAYS if self.scheme == "s3" else _WAYS[:1]
        with self._request("put", key):
            while True:
                way = self._way
                try:
                    self._put(key, data, create, *ways[way])
                    break
                except self._library.exceptions.BaseError as problem:
                    if not is_refusal(problem):
                        raise
                    if way + 1 == len(ways):
                        self._way = 0
                        raise
                    self._way = max(self._way, way + 1)
                    self._count("put")
        self._count("written_nbytes", len(data))

    def _put(self, key: str, data: Any, create: bool, checked: bool, conditional: bool) -> None:  # noqa: FBT001
        if create and not conditional:
            with suppress(FileNotFoundError):
                self._count("head")
                self._library.head(self._reads, key)
                raise FileExistsError(key)
        if checked and self._checked is None:
            self._checked = self._client.remade(checksum_algorithm="SHA256")
        store = self._checked if checked else self._writes
        mode: Any = "create" if create and conditional else "overwrite"
        self._library.put(store, key, data, mode=mode, use_multipart=False)

    def walk(self, prefix: str = "") -> Iterator[Meta]:
        """Yield all objects whose key begins with the folder ``prefix``, in order of their keys.

        Raises StorageError, also for a key that is not a path, such as ``a//b``, which another tool
        has written.
        """
        batches: Iterator[Any] | None = None
        while True:
            with self._request("list", prefix):
                batches = batches or self._library.list(
                    self._reads, prefix or None, chunk_size=_PAGE
                )
                batch = next(batches, None)
            if not batch:
                return
            yield from map(_meta, batch)

    def folders(self, prefix: str = "") -> tuple[Sequence[str], Sequence[Meta]]:
        """Return the folders directly below a folder, and the objects.

        Raises StorageError, also for odd keys as :meth:`walk` does.
        """
        with self._request("list", prefix):
            found = self._library.list_with_delimiter(self._reads, prefix or None)
        return list(found["common_prefixes"]), [_meta(one) for one in found["objects"]]

    def renew(self, key: str) -> None:
        """Set an object's time to now: the server copies it aside and back.

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
        """Delete objects that exist.

        Raises StorageError if some stay, after all were tried.
        """
        problems: list[tuple[str, Exception]] = []
        for first in range(0, len(keys), 1000):
            some = list(keys[first : first + 1000])
            with self._request("delete", some[0]):
                problems += self._delete(some)
        if problems:
            key, problem = problems[0]
            error = self._error(problem, "delete", f"{self.url}/{key}")
            if len(keys) > 1:
                error = type(error)(
                    error.errno,
                    f"{error.strerror}; {counted(len(problems), 'object', 'stays', 'stay')}",
                )
            raise error

    def _delete(self, keys: list[str]) -> list[tuple[str, Exception]]:
        try:
            self._library.delete(self._writes, keys)
        except FileNotFoundError:  # some stores stop there
            return [] if len(keys) == 1 else self._delete_singly(keys)
        except self._library.exceptions.BaseError as problem:
            if not (is_refusal(problem) or is_denied(problem)):
                raise
            return self._delete_singly(keys)
        return []

    def _delete_singly(self, keys: list[str]) -> list[tuple[str, Exception]]:
        """Delete objects by one request each; return the remaining ones with reasons."""
        more = {"disable_bulk_delete": True} if self.scheme == "s3" else {}
        store = self._client.remade(**more)

        def delete(key: str) -> Exception | None:
            self._count("delete")
            try:
                self._library.delete(store, key)
            except FileNotFoundError:
                return None
            except self._library.exceptions.BaseError as problem:
                return cast("Exception", problem)
            return None

        found = self.each(delete, keys, small=True)
        return [(key, problem) for key, problem in zip(keys, found, strict=True) if problem]

    @contextmanager
    def _request(self, kind: str, key: str) -> Iterator[None]:
        where = f"{self.url}/{key}".rstrip("/")
        if _runtime.is_forked:
            msg = f"{where}: this process was forked from one that had used a bucket; start it anew"
            raise StorageError(errno.ECHILD, msg)
        if not self.breaker.allows():
            last = f" ({self._last})" if self._last else ""
            msg = f"{self.url} did not answer, so it is not asked again for a while{last}"
            raise StorageError(errno.EHOSTDOWN, msg)
        _runtime.is_used = True
        errors = self._library.exceptions
        self._count(kind)
        try:
            yield
        except FileNotFoundError:
            self.breaker.went(well=True)
            if kind == "put":
                msg = f"{where}: no such bucket; check the bucket and the endpoint"
                raise StorageError(errno.ENOENT, msg) from None
            raise FileNotFoundError(errno.ENOENT, "no such object", where) from None
        except (FileExistsError, errors.AlreadyExistsError, errors.PreconditionError):
            self.breaker.went(well=True)
            raise FileExistsError(errno.EEXIST, "object exists", where) from None
        except BaseException as problem:
            is_ours = isinstance(problem, ConfigError)
            if is_ours or not (isinstance(problem, Exception) or is_panic(problem)):
                raise
            error = self._failed(problem, kind, where)
            raise error from None
        self.breaker.went(well=True)

    def _failed(self, problem: BaseException, kind: str, where: str) -> StorageError:
        self._count("failed")
        error = self._error(problem, kind, where)
        self._last = str(error.strerror)
        # It answers a process that may only read, and one that lists another tool's odd keys.
        odd = isinstance(problem, self._library.exceptions.InvalidPathError)
        self.breaker.went(well=odd or isinstance(error, NotWritableError))
        return error

    def _error(self, problem: BaseException, kind: str, where: str) -> StorageError:
        return explained(problem, kind, where, self._client.endpoint, self._client.identity)

    def _count(self, what: str, by: int = 1) -> None:
        self.counts[what] += by
        requests[what] += by

    # -- many at once -------------------------------------------------------------------------

    @staticmethod
    def each(work: Callable[[A], T], items: Sequence[A], *, small: bool = False) -> list[T]:
        """Return ``[work(item) for item in items]``, several at a time; ``small`` allows more.

        ``work`` raises nothing.
        """
        if len(items) == 1:
            return [work(items[0])]
        threads = _runtime.small if small else _runtime.threads
        return threads.map(lambda job: work(job.what), items)

    @staticmethod
    def memory(nbytes: int) -> memoryview:
        """Return memory as for bodies; it is reused once it is free."""
        return _runtime.buffers.take(nbytes).data

    @staticmethod
    def in_flight(nbytes: int) -> AbstractContextManager[None]:
        """Return a context for a body of ``nbytes`` in flight; entering waits until it fits."""
        return _runtime.hold(nbytes)


class _Runtime:
    """What all buckets of this process share. Thread-safe; a forked child has no body in flight."""

    def __init__(self) -> None:
        self.threads = Pool[None](REQUESTS_AT_ONCE, "vua-bucket")
        self.small = Pool[None](_SMALL_REQUESTS, "vua-bucket-small")
        self.buffers = BufferPool(_KEPT_NBYTES)
        self.is_used = False
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        self.is_forked = self.is_used
        self._changed, self._held_nbytes = threading.Condition(), 0

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Wait until a body of ``nbytes`` may be in flight, and hold its place."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._held_nbytes or self._held_nbytes + nbytes <= _IN_FLIGHT_NBYTES
            )
            self._held_nbytes += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._held_nbytes -= nbytes
                self._changed.notify_all()


_runtime: Final = _Runtime()


def _meta(found: Mapping[str, Any]) -> Meta:
    modified: datetime = found["last_modified"]
    return Meta(found["path"], found["size"], modified.timestamp(), (found["e_tag"] or "").encode())
