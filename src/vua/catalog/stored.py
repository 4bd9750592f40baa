"""The catalog of any storage that can list its entries, and that of a bucket.

A new storage (:class:`vua.storage.base.Storage`) gets `vua ls`, `du`, `gc`, `rm`, `top`, `verify`
and `explain` by it::

    def opened(where: str, *, create: bool) -> Catalog:
        storages = {"<64 hex>": MyStorage(where)}  # by namespace
        return StorageCatalog(where, storages, describe=...)

    register("mine", opened)  # now `vua gc mine://...` works

In a bucket every request costs money: listings name 1,000 objects, headers one. A bucket deletes by
itself by its lifecycle rule; see docs/object-stores.md.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from vua.capacity.bucket import pin_in_bucket, read_bucket_bounds, unpin_in_bucket
from vua.capacity.limits import Limits, bounds_text
from vua.capacity.listing import ListedChunk, Listing
from vua.capacity.spaces import Show
from vua.catalog.base import (
    Catalog,
    Demand,
    Finding,
    NamespaceCatalog,
    Removal,
    Verdict,
    probed,
    timed,
)
from vua.catalog.check import Check, Checker, ExpectedEntry, Verification, check_all, sampled
from vua.catalog.contents import Item
from vua.errors import ConfigError, CorruptEntryError, EntryError
from vua.format.parse import EntryInfo, parse_entry
from vua.security.keyring import KnownKeys
from vua.security.settings import Security
from vua.storage.base import Batch, Storage, parse_name
from vua.storage.bucket import Bucket
from vua.storage.description import DESCRIPTION, Description
from vua.storage.location import BucketPath
from vua.storage.mark import LIMITS_FILE, bucket_contents, claim, claimable
from vua.storage.names import (
    SUFFIX,
    entry_at,
    is_renewing,
    kind_at,
)
from vua.storage.object import FULL, ObjectStorage, parents_in, write_parents
from vua.store.place import at

_ERASED: Final = 1 << 14
"""Chunks whose objects are deleted by one call."""
_HELD: Final = 64
"""Most entries in memory at a time."""
_HEADER_NBYTES: Final = 32 << 10
"""First bytes read of an object to find its parent: most headers are shorter."""
_WORTH: Final = 16
"""Fewer headers than that are read again: writing down what they told costs more."""
_SMALL: Final = 64
"""Objects that tell the order are put together when more of them are small, and sixteen times as
many as the others."""
_SMALL_NBYTES: Final = 1 << 20
_LOOK_S: Final = 60.0
_OURS: Final = b'{\n "format": "vua.'


def _item(path: str, nbytes: int, used_s: float) -> Item:
    entry = entry_at(path)
    chunk, shard = parse_name(entry) if entry else ("", None)
    return Item(
        *(path, kind_at(path), nbytes, used_s),
        chunk=chunk, shard=shard, used_ns=int(used_s * 1e9),
    )  # fmt: skip


class StorageNamespace(NamespaceCatalog):
    """The entries of one storage."""

    def __init__(self, description: Description, storage: Storage, show: Show) -> None:
        super().__init__(description, show)
        self.storage = storage

    def has_description(self) -> bool:
        return self.stated.layout is not None

    def items(self) -> Iterator[Item]:
        """Yield the entries, as files of a directory."""
        for entry in sorted(self.storage.list(), key=lambda one: one.name):
            yield _item(f"{entry.name[:2]}/{entry.name}{SUFFIX}", entry.nbytes, entry.last_used_s)

    def read(self, path: str, most: int) -> bytes | memoryview:
        return self._read(path, most)[0]

    def _read(self, path: str, most: int | None = None) -> tuple[bytes | memoryview, bytes | None]:
        """Return an entry's first bytes, by default all, and its version. Raises OSError."""
        name = entry_at(path)
        sizes = {one.name: one.nbytes for one in self.storage.list(name[:64])} if name else {}
        if name not in sizes:
            raise FileNotFoundError(path)
        batch = Batch.of_bytes(name, sizes[name], most)
        filled = self.storage.read(batch)
        if isinstance(filled.problem, EntryError):
            raise OSError(str(filled.problem)) from filled.problem
        if filled.problem is not None:
            raise filled.problem
        return bytes(batch.headers[0]), filled.version(0)

    def checked(
        self, keys: KnownKeys, share: float, *, repair: bool
    ) -> Iterator[tuple[int, Verification]]:
        checker, fans = Checker(keys), sampled([f"{fan:02x}" for fan in range(256)], share)

        def judge(item: Item) -> tuple[Check | None, bytes | None, bool]:
            try:
                data, version = self._read(item.path)
            except OSError as problem:
                return Check("error", (str(problem),), 0), None, False
            where = ExpectedEntry(self.name, item.chunk, item.shard)
            check = checker.check_bytes(memoryview(bytearray(data)), where)
            return check, version, check.outcome in ("corrupt", "foreign")

        chosen = (one for one in self.items() if one.kind != "entry" or one.chunk[:2] in fans)
        while some := list(itertools.islice(chosen, _HELD)):
            yield (
                0,
                check_all(self.stated, some, judge, self.storage, repair=repair, each=self.each),
            )

    def pin(self, chunk: str, *, on: bool = True) -> int:
        """Raise ConfigError."""
        del chunk, on
        raise ConfigError(f"{type(self.storage).__name__} keeps no pins")

    def erase(self, chunks: Iterable[ListedChunk], done: Removal) -> None:
        for chunk in chunks:
            done.count([chunk])
            done.objects = (done.objects or 0) + len(chunk.paths)
            for path in chunk.paths:
                self.storage.delete(entry_at(path))


class StorageCatalog(Catalog):
    """A cache whose namespaces are in storages. It keeps no limits: each `vua gc` is given them."""

    def __init__(
        self, where: str, storages: Mapping[str, Storage], describe: Callable[[str], Description]
    ) -> None:
        """Use open storages.

        Args:
            where: the operator's name of the cache.
            storages: by namespace, 64 hex.
            describe: returns a namespace's description.
        """
        super().__init__(where, Path(where.partition("://")[2] or where))
        self._storages, self._describe = storages, describe

    @contextlib.contextmanager
    def namespaces(self, show: Show) -> Iterator[tuple[Sequence[StorageNamespace], Sequence[str]]]:
        found = sorted(self._storages.items())
        yield [StorageNamespace(self._describe(name), one, show) for name, one in found], []

    def claim(self) -> None:
        """Do nothing: a storage holds nothing else."""

    def bounds(self) -> Limits:
        return Limits()

    def write_bounds(self, bounds: Limits) -> None:
        del bounds
        raise ConfigError(f"{self.where} keeps no limits; give them to each `vua gc`")


# -- a bucket -------------------------------------------------------------------------------------


class BucketNamespace(StorageNamespace):
    """A namespace in a bucket."""

    each = staticmethod(Bucket.each)

    def __init__(self, description: Description, bucket_path: BucketPath, show: Show) -> None:
        super().__init__(description, ObjectStorage(bucket_path), show)
        self.bucket_path = bucket_path
        self._is_told = False

    @property
    def is_ours(self) -> bool:
        return self.stated.identity is not None or self.stated.is_unknown or len(self.chunks) > 0

    def has_description(self) -> bool:
        return (self.bucket_path / DESCRIPTION).exists()

    # -- what is in it ----------------------------------------------------------------------------

    def items(self) -> Iterator[Item]:
        for meta in self.bucket_path.bucket.walk(self.bucket_path.key):
            path = meta.key.removeprefix(f"{self.bucket_path.key}/")
            item = _item(path, meta.nbytes, meta.modified_s)
            if item.kind != "description":
                yield item

    def header(self, path: str) -> EntryInfo | None:
        """Read a header by one request, or two if it is long."""
        with suppress(OSError, CorruptEntryError):
            return parse_entry(bytes(self.read(path, _HEADER_NBYTES)))
        return super().header(path)

    def _read(self, path: str, most: int | None = None) -> tuple[memoryview, bytes | None]:
        part = () if most is None else (0, most)
        meta, data = self.bucket_path.bucket.get((self.bucket_path / path).key, *part)
        return data, meta.tag or None

    def listing(self, show: Show, past: Listing | None = None) -> Listing:
        """Ask the objects that tell the order, and headers for what these do not tell."""
        if not self._is_told:
            self._is_told = True
            Bucket.each(self._learn, self._notes())
        return super().listing(show, past)

    def _notes(self) -> list[Item]:
        return [one for one in self.beside if one.kind == "parents"]

    def _learn(self, item: Item) -> None:
        with suppress(OSError, CorruptEntryError):
            data = self.bucket_path.bucket.get((self.bucket_path / item.path).key)[1]
            self.chunks.tell_befores(parents_in(data), told=True)

    def note_befores(self) -> None:
        """Write down the order of chunks where no object tells it yet. Raises StorageError."""
        notes = self._notes()
        small = sum(one.nbytes < _SMALL_NBYTES for one in notes)
        whole = small > max(_SMALL, 16 * (len(notes) - small))
        todo = self.chunks.befores(untold=not whole)
        while len(some := list(itertools.islice(todo, FULL))) >= _WORTH:
            write_parents(self.bucket_path, some)
        if whole:
            self.bucket_path.bucket.delete(self._keys([one.path for one in notes]))

    # -- what may be done to it -------------------------------------------------------------------

    def renew(self, chunks: Sequence[ListedChunk]) -> None:
        """Copy objects at the server: a lifecycle rule uses their times."""
        keys = [key for chunk in chunks for key in self._keys(chunk.paths)]
        Bucket.each(self.bucket_path.bucket.try_renew, keys)

    def pin(self, chunk: str, *, on: bool = True) -> int:
        held = list(self.ancestors(chunk))
        (pin_in_bucket if on else unpin_in_bucket)(self.bucket_path, chunk, held)
        return len(held)

    def erase(self, chunks: Iterable[ListedChunk], done: Removal) -> None:
        rest = iter(chunks)
        while some := list(itertools.islice(rest, _ERASED)):
            done.count(some)
            self._erase([key for one in some for key in self._keys([*one.paths, *one.marks])], done)

    def _erase(self, keys: Sequence[str], done: Removal) -> None:
        self.bucket_path.bucket.delete(keys)
        done.objects = (done.objects or 0) + len(keys)

    def drop(self, done: Removal) -> None:
        """Delete all other files of VUA, the description last.

        The description stays if other files stay, as in a directory.
        """
        beside = self._of_ours(self.beside)
        done.nbytes += self.quarantined()
        self._erase(beside, done)
        if not self.strays and len(beside) == len(self.beside):
            self._erase(self._description_key(), done)

    def sweep(self) -> tuple[int, int]:
        """Delete remains of a crash; return how many, and their bytes."""
        some = [one for one in self.beside if one.is_leftover]
        left = self._of_ours(some)
        self.bucket_path.bucket.delete(left)
        return 0, sum(one.nbytes for one in some) if left else 0

    def _keys(self, paths: Sequence[str]) -> list[str]:
        return [(self.bucket_path / path).key for path in paths]

    def _of_ours(self, items: Sequence[Item]) -> list[str]:
        """Return the keys of those files that are VUA's, also by their content."""
        return [
            key
            for one, key in zip(items, self._keys([one.path for one in items]), strict=True)
            if not is_renewing(one.path) or self.header(one.path) is not None
        ]

    def _description_key(self) -> list[str]:
        key = (self.bucket_path / DESCRIPTION).key
        if self.stated.identity is not None:
            return [key]
        with suppress(OSError):  # a damaged description of VUA begins like a sound one
            if bytes(self.bucket_path.bucket.get(key, 0, len(_OURS))[1]) == _OURS:
                return [key]
        return []


class BucketCatalog(Catalog):
    """A cache in a bucket."""

    look_s = _LOOK_S

    root: BucketPath

    def __init__(self, where: str) -> None:
        """Send nothing yet."""
        super().__init__(where, at(where))

    @property
    def counts(self) -> Mapping[str, int]:
        return self.root.bucket.counts

    @contextlib.contextmanager
    def namespaces(self, show: Show) -> Iterator[tuple[Sequence[BucketNamespace], Sequence[str]]]:
        """Send a listing, and one request per namespace."""
        found, others = bucket_contents(self.root)
        yield [BucketNamespace(one, self.root / one.name, show) for one in found], others

    def claim(self) -> None:
        claim(self.root, tool=True)

    def bounds(self) -> Limits:
        return read_bucket_bounds(self.root)

    def write_bounds(self, bounds: Limits) -> None:
        self.root.bucket.put((self.root / LIMITS_FILE).key, bounds_text(bounds))

    def sweep(self, found: Sequence[BucketNamespace], *, dry_run: bool) -> tuple[int, int]:
        freed = [(0, 0), *(one.sweep() for one in found if not dry_run)]
        return 0, sum(nbytes for _, nbytes in freed)

    def findings(self, security: Security, demand: Demand) -> Iterator[Finding]:
        """Run all probes with an object of their own, which is deleted again."""
        del security
        try:
            claimable(self.root, tool=True)
            refused = None
        except OSError as problem:
            yield Finding("reach", "bad", str(problem))
            return
        except ConfigError as problem:
            refused = Finding("mark", "bad", f"engines do not start here: {problem}")
        yield Finding("reach", "ok", "it answers, and these credentials may list it")
        if refused is not None:
            yield refused
        bucket, key = self.root.bucket, (self.root / f".doctor-{secrets.token_hex(6)}").key
        probes = {
            "write": partial(_write, bucket),
            "speed": partial(_speed, bucket, demand),
            "deletion": partial(_deletion, bucket),
        }
        try:
            yield from probed(probes, key)
        finally:
            with suppress(OSError):
                bucket.delete([key])


_NBYTES: Final = 2 << 20
_AT_ONCE: Final = 8
_ROUNDS: Final = 4
"""Requests after each other of a load: three rounds of a lookup, and the first object."""


def _write(bucket: Bucket, key: str) -> Verdict:
    data = np.random.default_rng(0).bytes(_NBYTES)
    bucket.put(key, data)
    if (
        bytes(bucket.get(key)[1]) != data
        or bytes(bucket.get(key, 4096, 8192)[1]) != data[4096:12288]
    ):
        return "bad", "what was written came back otherwise, or a part of it"
    return "ok", "what is written is there at once, byte for byte, and so are parts of it"


def _speed(bucket: Bucket, demand: Demand, key: str) -> Verdict:
    head_s = statistics.median(timed(partial(bucket.head, key)) for _ in range(_AT_ONCE))
    problems: list[OSError] = []

    def read(_: int) -> None:
        try:
            bucket.get(key)
        except OSError as problem:
            problems.append(problem)

    took_s = min(timed(partial(bucket.each, read, range(_AT_ONCE))) for _ in range(2))
    if problems:
        raise problems[0]
    nbytes_s = _AT_ONCE * _NBYTES / took_s
    text = (
        f"a request takes {head_s * 1e3:.1f} ms, {_AT_ONCE} at once read {nbytes_s / 1e9:.2f} GB/s"
    )
    return "ok", f"{text}; {demand.judge(nbytes_s, _ROUNDS * head_s)}"


def _deletion(bucket: Bucket, key: str) -> Verdict:
    bucket.delete([key])
    try:
        bucket.head(key)
    except FileNotFoundError:
        return "ok", "what is deleted is gone"
    return "note", "what is deleted is still seen for a while"
