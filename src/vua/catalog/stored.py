"""The catalog of any storage that can list its entries.

A new storage (:class:`vua.storage.base.Storage`) gets `vua ls`, `du`, `gc`, `rm`, `top`, `verify`
and `explain` by it::

    def opened(where: str, *, create: bool) -> Catalog:
        storages = {"<64 hex>": MyStorage(where)}  # by namespace
        return StorageCatalog(where, storages, describe=...)

    register("mine", opened)  # now `vua gc mine://...` works
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from vua.capacity.limits import Limits
from vua.capacity.listing import ListedChunk
from vua.capacity.spaces import Show
from vua.catalog.base import Catalog, NamespaceCatalog, Removal
from vua.catalog.check import Check, Checker, ExpectedEntry, Verification, check_all, sampled
from vua.catalog.contents import Item
from vua.errors import ConfigError, EntryError
from vua.security.keyring import KnownKeys
from vua.storage.base import Batch, Storage, parse_name
from vua.storage.description import Description
from vua.storage.names import SUFFIX, entry_at

_HELD: Final = 64
"""Most entries in memory at a time."""


def checked_entries(
    space: NamespaceCatalog, storage: Storage, keys: KnownKeys, share: float, *, repair: bool,
    read: Callable[[str], tuple[bytes | memoryview, bytes | None]],
) -> Iterator[tuple[int, Verification]]:  # fmt: skip
    """Check a namespace's entries as a whole; ``read`` returns one's bytes, and its version."""
    checker, fans = Checker(keys), sampled([f"{fan:02x}" for fan in range(256)], share)

    def judge(item: Item) -> tuple[Check | None, bytes | None, bool]:
        try:
            data, version = read(item.path)
        except OSError as problem:
            return Check("error", (str(problem),), 0), None, False
        where = ExpectedEntry(space.name, item.chunk, item.shard)
        check = checker.check_bytes(memoryview(bytearray(data)), where)
        return check, version, check.outcome in ("corrupt", "foreign")

    chosen = (one for one in space.items() if one.kind != "entry" or one.chunk[:2] in fans)
    while some := list(itertools.islice(chosen, _HELD)):
        yield 0, check_all(space.stated, some, judge, storage, repair=repair, each=space.each)


class StorageNamespace(NamespaceCatalog):
    """The entries of one storage."""

    def __init__(self, description: Description, storage: Storage, show: Show) -> None:
        super().__init__(description, show)
        self.storage = storage

    def has_description(self) -> bool:
        return self.stated.layout is not None

    def items(self) -> Iterator[Item]:
        """Yield the entries and pins, as files of a directory."""
        for entry in sorted(self.storage.list(), key=lambda one: one.name):
            chunk, shard = parse_name(entry.name)
            path = f"{chunk[:2]}/{entry.name}{SUFFIX}"
            used_ns = int(entry.last_used_s * 1e9)
            yield Item(
                *(path, "entry", entry.nbytes, entry.last_used_s),
                chunk=chunk, shard=shard, used_ns=used_ns,
            )  # fmt: skip

    def read(self, path: str, most: int) -> bytes:
        return self._read(path, most)[0]

    def _read(self, path: str, most: int | None = None) -> tuple[bytes, bytes | None]:
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
        return checked_entries(self, self.storage, keys, share, repair=repair, read=self._read)

    def pin(self, chunk: str, *, on: bool = True) -> int:
        """Raise ConfigError."""
        del chunk, on
        raise ConfigError(f"{type(self.storage).__name__} keeps no pins")

    def erase(self, chunks: Sequence[ListedChunk], done: Removal) -> None:
        done.count(chunks)
        done.objects = (done.objects or 0) + sum(len(one.paths) for one in chunks)
        for path in (path for chunk in chunks for path in chunk.paths):
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
