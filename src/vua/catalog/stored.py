"""The catalog of any :class:`vua.storage.base.Storage`: what lists and deletes entries is enough.

A new storage gets `vua ls`, `du`, `gc`, `rm`, `ttl`, `top`, `verify` and `explain`'s names by it,
and `vua pin` where it is a :class:`PinnedStorage`, too::

    def opened(where: str, *, create: bool) -> Catalog:
        storages = {"<64 hex>": MyStorage(where)}  # by namespace
        return StorageCatalog(where, storages, describe=..., limits=MyLimits(where))

    register("mine", opened)  # now `vua gc mine://...` works
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from vua.capacity.limits import Limits
from vua.capacity.scan import Show
from vua.catalog.base import Adoption, Content, Counted, Item, OpenFile
from vua.catalog.check import Check, Checker, Place, Verification
from vua.catalog.listed import ListedCatalog, ListedChunk, ListedNamespace
from vua.errors import ConfigError, EntryError
from vua.format.header import MAX_HEADER_NBYTES
from vua.format.parse import EntryInfo, parse_entry
from vua.io.header_plan import header_plan
from vua.native import Transfer
from vua.security.keyring import KnownKeys
from vua.storage.base import Batch, Storage, parse_name
from vua.storage.description import Description
from vua.storage.local import SUFFIX

__all__ = ["LimitStore", "PinnedStorage", "StorageCatalog", "StorageNamespace"]


@runtime_checkable
class PinnedStorage(Protocol):
    """A storage that keeps pins: pairs of a chunk that is held and of the chunk that was pinned."""

    def pins(self) -> Sequence[tuple[str, str]]:
        """Return all of them."""
        ...

    def add_pins(self, pins: Sequence[tuple[str, str]]) -> None:
        """Keep some. Raises OSError."""
        ...

    def remove_pins(self, pins: Sequence[tuple[str, str]]) -> None:
        """Forget some, where they are there. Raises OSError."""
        ...


class LimitStore(Protocol):
    """Keeps what ``bounds.json`` says in a directory."""

    def read(self) -> Limits:
        """Return the limits. Raises OSError."""
        ...

    def write(self, limits: Limits) -> None:
        """Replace them. Raises OSError."""
        ...


class StorageNamespace(ListedNamespace):
    """The entries of one storage. A path is an entry's name here, with the suffix of files."""

    def __init__(self, description: Description, storage: Storage) -> None:
        """List them."""
        super().__init__(description)
        self.storage = storage
        self._nbytes: dict[str, int] = {}
        for entry in storage.list():
            name, shard = parse_name(entry.name)
            chunk = self.chunks.setdefault(name, ListedChunk(name))
            chunk.add(entry.name, entry.nbytes, entry.last_used_s, shard)
            self._nbytes[entry.name] = entry.nbytes
        for held, pinned in storage.pins() if isinstance(storage, PinnedStorage) else ():
            if held in self.chunks:
                self.chunks[held].pins.append(pinned)

    def read(self, name: str, most: int | None = None) -> tuple[bytes, bytes | None]:
        """Return an entry's first bytes, by default all, and its version. Raises OSError."""
        nbytes = self._nbytes[name]
        plan = header_plan(nbytes, nbytes if most is None else min(nbytes, most))
        batch = Batch.of([name], Transfer(plan, (), (), ()))
        filled = self.storage.read(batch)
        if isinstance(filled.problem, EntryError):
            raise OSError(str(filled.problem)) from filled.problem
        if filled.problem is not None:
            raise filled.problem
        return bytes(batch.headers[0]), filled.version(0)

    def read_header(self, chunk: ListedChunk, path: str) -> EntryInfo | None:
        """Read as many bytes as a header may have."""
        del chunk
        with contextlib.suppress(OSError, EntryError):
            return parse_entry(self.read(path, MAX_HEADER_NBYTES)[0])
        return None

    def listed(self, chunk: str) -> list[str]:
        """Name its entries as files of a directory."""
        return sorted(f"{path.partition('/')[2]}{SUFFIX}" for path in self.chunks[chunk].paths)

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[OpenFile]:
        """Read an entry, by the path that its file would have."""
        name = path[3:].removesuffix(SUFFIX)
        if name not in self._nbytes:
            raise FileNotFoundError(path)
        yield OpenFile(io.BytesIO(self.read(name)[0]))

    def write_pin(self, chunk: str, held: Sequence[str]) -> None:
        """Tell the storage. Raises ConfigError for one that keeps no pins."""
        self._pinned_storage().add_pins([(one, chunk) for one in held])

    def remove_pin(self, chunk: str, held: Sequence[str]) -> None:
        """Tell the storage. Raises ConfigError for one that keeps no pins."""
        self._pinned_storage().remove_pins([(one, chunk) for one in held])

    def _pinned_storage(self) -> PinnedStorage:
        if isinstance(self.storage, PinnedStorage):
            return self.storage
        raise ConfigError(f"{type(self.storage).__name__} keeps no pins")


class StorageCatalog(ListedCatalog[StorageNamespace]):
    """A cache whose namespaces are in storages."""

    def __init__(
        self,
        where: str,
        storages: Mapping[str, Storage],
        describe: Callable[[str], Description],
        limits: LimitStore | None = None,
    ) -> None:
        """Take what is open.

        Args:
            where: what the operator calls the cache.
            storages: by namespace, 64 hex.
            describe: returns what a namespace says of itself.
            limits: keeps limits; by default they are told to each `vua gc`.
        """
        super().__init__(where, Path(where.partition("://")[2] or where))
        self._storages, self._describe, self._limit_store = storages, describe, limits

    def contents(self) -> tuple[list[Description], list[str]]:
        """Describe each."""
        return [self._describe(name) for name in sorted(self._storages)], []

    def state(self, description: Description) -> str:
        """Go by what was described."""
        return "ok" if description.layout is not None else "missing"

    def list_namespaces(self, show: Show) -> tuple[Sequence[StorageNamespace], Sequence[str]]:
        """List the entries of each."""
        del show
        found, others = self.contents()
        return [StorageNamespace(one, self._storages[one.name]) for one in found], others

    def content(self, description: Description, show: Show, *, long: bool = False) -> Content:
        """List the entries."""
        del show
        content = Content(description, self.state(description))
        items = []
        for entry in self._storages[description.name].list():
            chunk, shard = parse_name(entry.name)
            path = f"{chunk[:2]}/{entry.name}{SUFFIX}"
            items.append(
                Item(path, "entry", entry.nbytes, entry.last_used_s, chunk=chunk, shard=shard)
            )
        content.add(Counted.of(items, long=long))
        return content

    def claim(self) -> None:
        """Nothing else lies in a storage."""

    def adopt(self, ask: Callable[[Adoption], None]) -> Adoption:
        """Nothing else lies in a storage."""
        del ask
        return Adoption(was_marked=True, namespaces=sorted(self._storages), others=(), chunks=None,
                        nbytes=None)  # fmt: skip

    def bounds(self) -> Limits:
        """Ask the store of limits."""
        return Limits() if self._limit_store is None else self._limit_store.read()

    def write_bounds(self, bounds: Limits) -> None:
        """Tell the store of limits. Raises ConfigError without one."""
        if self._limit_store is None:
            raise ConfigError(f"{self.where} keeps no limits; give them to each `vua gc`")
        self._limit_store.write(bounds)

    def delete(
        self,
        chunks: Sequence[tuple[StorageNamespace, ListedChunk]],
        whole: Sequence[StorageNamespace] = (),
        *,
        dry_run: bool = False,
    ) -> int:
        """Delete entries, and what is pinned with them."""
        every = [*chunks, *((space, one) for space in whole for one in space.chunks.values())]
        objects = 0
        for space, chunk in every:
            for name in chunk.paths if not dry_run else ():
                space.storage.delete(name)
            if not dry_run and chunk.pins and isinstance(space.storage, PinnedStorage):
                space.storage.remove_pins([(chunk.name, one) for one in chunk.pins])
            objects += len(chunk.paths)
        return objects

    def verify(
        self, description: Description, keys: KnownKeys, share: float, show: Show, *, repair: bool
    ) -> Verification:
        """Read entries one after the other."""
        space = StorageNamespace(description, self._storages[description.name])
        result, checker = Verification.of(description, self.state(description)), Checker(keys)
        names = sorted(space.chunks)
        picked = random.sample(names, max(1, round(share * len(names)))) if names else []
        for number, name in enumerate(sorted(picked), 1):
            chunk = space.chunks[name]
            for path, shard in zip(chunk.paths, chunk.shards, strict=True):
                version = None
                try:
                    data, version = space.read(path)
                    place = Place(description.name, name, shard)
                    check = checker.check_bytes(memoryview(bytearray(data)), place)
                except OSError as problem:
                    check = Check("error", (str(problem),), 0)
                result.add(path, check)
                if repair and check.outcome in ("corrupt", "foreign"):
                    result.removed += space.storage.delete(path, version)
            show(description.name[:12], number, len(picked), amount=result.nbytes)
        if wrong := result.wrong_description():
            result.problems.append(("", "corrupt", wrong))
        return result
