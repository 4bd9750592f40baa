"""The catalog of a bucket. Every request costs money: listings name 1,000 objects, headers one.

What a bucket does by itself is its lifecycle rule; see docs/object-stores.md.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from vua.capacity.bucket import (
    pin_in_bucket,
    read_bucket_bounds,
    unpin_in_bucket,
    write_bucket_bounds,
)
from vua.capacity.limits import Limits
from vua.capacity.removal import Freed
from vua.capacity.scan import AFTER, TTL_FOLDER, Show
from vua.catalog.base import (
    MAX_FILE_NBYTES,
    SHORT,
    Adoption,
    Content,
    Counted,
    Finding,
    Item,
    OpenFile,
    Rules,
)
from vua.catalog.check import Check, Checker, Place, Verification, sampled
from vua.catalog.listed import ListedCatalog, ListedChunk, ListedNamespace, seals
from vua.errors import ConfigError, CorruptEntryError
from vua.format.codecs import AUTO
from vua.format.compressed import PACKAGE, Compressed, decompressed
from vua.format.header import MAX_HEADER_NBYTES
from vua.format.parse import EntryInfo, parse_entry
from vua.security.keyring import KnownKeys
from vua.security.settings import Security
from vua.storage.base import entry_name, parse_name
from vua.storage.bucket import Bucket
from vua.storage.bucket_cost import DOLLARS_PER_GB_MONTH
from vua.storage.bucket_mark import (
    adopted_bucket,
    bucket_contents,
    bucket_descriptions,
    claim_bucket,
)
from vua.storage.bucket_path import BucketPath
from vua.storage.description import DESCRIPTION, Description
from vua.storage.names import (
    COMPRESSED_SUFFIX,
    entry_at,
    is_compressed,
    is_renewing,
    kind_at,
    plain_path,
)
from vua.storage.object import ObjectStorage
from vua.store.far import at
from vua.store.opening import locate

__all__ = ["BucketCatalog", "BucketNamespace"]

_HEADER_NBYTES: Final = 32 << 10
"""What is read of an object first to find its parent: most headers are shorter."""
_AT_ONCE: Final = 256
"""Headers that are read at a time."""
_HELD: Final = 64
"""Objects that are held in memory at a time at most."""
_LEFTOVER_S: Final = 3600.0
_LOOK_S: Final = 60.0
_GB: Final = 10**9
_MARK: Final = re.compile(r"[0-9a-f]{2}/([0-9a-f]{64})/(after|pin)-([0-9a-f]{64})")
_OURS: Final = b'{\n "format": "vua.'
"""How a description begins."""


class BucketNamespace(ListedNamespace):
    """A namespace in a bucket."""

    def __init__(self, description: Description, place: BucketPath, show: Show) -> None:
        """List what is there. Raises StorageError."""
        super().__init__(description)
        self.place = place
        self.leftovers: list[str] = []
        """Paths of copies that a renewal left when it was killed, by their names and times; see
        :meth:`of_ours`."""
        self.beside: list[str] = []
        """Paths of what else is of VUA, by their names: marks, times to live, what was copied."""
        self.strays: list[str] = []
        """Paths of what is not."""
        marked: dict[str, ListedChunk] = {}
        for number, item in enumerate(walk(place)):
            if item.kind == "entry":
                chunk = self.chunks.setdefault(item.chunk, ListedChunk(item.chunk))
                chunk.add(item.path, item.nbytes, item.modified_s, item.shard)
            elif item.kind == "stray":
                self.strays.append(item.path)
            elif match := _MARK.fullmatch(item.path):
                beside = marked.setdefault(match[1], ListedChunk(match[1]))
                beside.marks.append(item.path)
                if f"{match[2]}-" == AFTER:
                    beside.before = match[3]
                else:
                    beside.pins.append(match[3])
            else:
                self._note(item)
            if number % 1000 == 0:
                show(self.name[:SHORT], amount=len(self.chunks), unit="chunks")
        for name, beside in marked.items():
            if here := self.chunks.get(name):
                here.marks, here.pins, here.before = beside.marks, beside.pins, beside.before
            else:
                self.beside += beside.marks

    def _note(self, item: Item) -> None:
        """Note what is of VUA and neither a chunk's entry nor its mark."""
        self.beside.append(item.path)
        if item.kind == "temporary" and item.modified_s < time.time() - _LEFTOVER_S:
            self.leftovers.append(item.path)
            self.leftover_nbytes += item.nbytes
        self.quarantine_nbytes += item.nbytes if item.kind == "quarantined" else 0

    @property
    def is_ours(self) -> bool:
        """Whether it is a namespace of VUA: it says so, or chunks are in it, as in a directory."""
        said = self.description
        return said.identity is not None or bool(said.later) or bool(self.chunks)

    def read_header(self, chunk: ListedChunk, path: str) -> EntryInfo | None:
        """Send a request, or two where the header is long."""
        del chunk
        key, bucket = (self.place / path).key, self.place.bucket
        with contextlib.suppress(OSError, CorruptEntryError):
            data = bucket.get(key, 0, _HEADER_NBYTES)[1]
            try:
                return _parsed(path, data)
            except CorruptEntryError:
                return _parsed(path, bucket.get(key, 0, 2 * MAX_HEADER_NBYTES)[1])
        return None

    def each(self, work: Callable[[ListedChunk], None], chunks: Sequence[ListedChunk]) -> None:
        """Send some requests at a time."""
        Bucket.each(work, chunks)

    def write_pin(self, chunk: str, held: Sequence[str]) -> None:
        """Write an empty object beside each."""
        pin_in_bucket(self.place, chunk, held)

    def remove_pin(self, chunk: str, held: Sequence[str]) -> None:
        """Delete these."""
        unpin_in_bucket(self.place, chunk, held)

    def listed(self, chunk: str) -> list[str]:
        """Return the names of entries, in their plain form, and marks."""
        one = self.chunks[chunk]
        names = (path.rpartition("/")[2] for path in (*one.paths, *one.marks))
        return sorted({plain_path(name) for name in names})

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[OpenFile]:
        """Read it into memory, in its plain form."""
        chunk = self.chunks.get(path[3:].partition("/")[0])
        paths = [] if chunk is None else sorted(chunk.paths)
        found = next((one for one in paths if plain_path(one) == path), path)
        data = (self.place / found).read(MAX_FILE_NBYTES)
        try:
            plain = decompressed(memoryview(data)) if is_compressed(found) else data
        except ImportError as problem:
            raise OSError(errno.ENOPKG, f"{found}: compressed; pip install {PACKAGE}") from problem
        yield OpenFile(io.BytesIO(plain))

    def keys(self, paths: Sequence[str]) -> list[str]:
        """Return the keys of objects, by their paths."""
        return [(self.place / path).key for path in paths]

    def of_ours(self, paths: Sequence[str]) -> list[str]:
        """Return the keys of those of these paths that are of VUA, also by what is in them."""
        return [
            key
            for path, key in zip(paths, self.keys(paths), strict=True)
            if not is_renewing(path) or _holds_entry(self.place.bucket, key)
        ]

    def every_key(self) -> list[str]:
        """Return the keys of all that is of VUA, the description last.

        That stays with what is not of VUA, as in a directory.
        """
        beside = self.of_ours(self.beside)
        chunks = self.chunks.values()
        keys = [key for one in chunks for key in self.keys([*one.paths, *one.marks])] + beside
        if not self.strays and len(beside) == len(self.beside):
            keys += self._description_key()
        return keys

    def _description_key(self) -> list[str]:
        key = (self.place / DESCRIPTION).key
        if self.description.identity is not None:
            return [key]
        with contextlib.suppress(OSError):  # a damaged one of VUA begins as a sound one
            if bytes(self.place.bucket.get(key, 0, len(_OURS))[1]) == _OURS:
                return [key]
        return []


class BucketCatalog(ListedCatalog[BucketNamespace]):
    """A cache in a bucket."""

    look_s = _LOOK_S

    def __init__(self, where: str, place: BucketPath) -> None:
        """Take a place; nothing is sent."""
        super().__init__(where, place)
        self.root = place
        self._is_asked = False

    @classmethod
    def open(cls, where: str, *, create: bool = False) -> BucketCatalog:
        """Return the catalog of a URL, and send nothing yet."""
        del create
        return cls(where, at(where))

    @property
    def counts(self) -> Mapping[str, int]:
        """Count all requests of this process to the bucket."""
        return self.root.bucket.counts

    def monthly_dollars(self, nbytes: int) -> float:
        """Return S3's list price."""
        return round(nbytes / _GB * DOLLARS_PER_GB_MONTH, 6)

    # -- what lies in it --------------------------------------------------------------------------

    def contents(self) -> tuple[list[Description], list[str]]:
        """Send a listing, and a request for each namespace."""
        return bucket_contents(self.root)

    def state(self, description: Description) -> str:
        """Ask for the object where nothing sound was read."""
        if description.layout is not None:
            return "ok"
        if description.later:
            return "later"
        return "damaged" if (self._path(description) / DESCRIPTION).exists() else "missing"

    def _path(self, description: Description) -> BucketPath:
        return self.root / description.name

    def content(self, description: Description, show: Show, *, long: bool = False) -> Content:
        """List it."""
        del show
        content = Content(description, self.state(description))
        content.add(Counted.of(walk(self._path(description)), long=long))
        return content

    def list_namespaces(self, show: Show) -> tuple[Sequence[BucketNamespace], Sequence[str]]:
        """List all objects, once the place has shown that it is a cache."""
        if not self._is_asked:
            locate(self.where, create=False)
            self._is_asked = True
        found, strays = bucket_contents(self.root)
        spaces = [BucketNamespace(one, self._path(one), show) for one in found]
        strays += [space.name for space in spaces if not space.is_ours]
        ours = [space for space in spaces if space.is_ours]
        strays += [f"{space.name}/{path}" for space in ours for path in space.strays]
        return ours, strays

    # -- what may be done to it -------------------------------------------------------------------

    def claim(self) -> None:
        """Ask for the mark."""
        claim_bucket(self.root, tool=True)

    def adopt(self, ask: Callable[[Adoption], None]) -> Adoption:
        """Make the mark without a question: listing what is there costs money."""
        del ask
        there, mine, others = adopted_bucket(self.root)
        return Adoption(there, mine, others, None, None)

    def bounds(self) -> Limits:
        """Read the object."""
        return read_bucket_bounds(self.root)

    def write_bounds(self, bounds: Limits) -> None:
        """Write the object."""
        write_bucket_bounds(self.root, bounds)

    def own_ttls(self) -> int:
        """List them; nothing keeps to them here."""
        return sum(
            kind_at(each.key.removeprefix(f"{place.key}/")) == "ttl"
            for one in bucket_descriptions(self.root)
            for place in [self._path(one)]
            for each in place.bucket.walk((place / TTL_FOLDER).key)
        )

    def delete(
        self,
        chunks: Sequence[tuple[BucketNamespace, ListedChunk]],
        whole: Sequence[BucketNamespace] = (),
        *,
        dry_run: bool = False,
    ) -> int:
        """Delete objects, those of a chunk with its entries first."""
        keys: dict[str, None] = {}
        for space in whole:
            keys.update(dict.fromkeys(space.every_key()))
        for space, chunk in chunks:
            keys.update(dict.fromkeys(space.keys([*chunk.paths, *chunk.marks])))
        if not dry_run:
            self.root.bucket.delete(list(keys))
        return len(keys)

    def sweep(self, namespaces: Sequence[BucketNamespace], *, dry_run: bool) -> Freed:
        """Delete copies that renewals have left."""
        if dry_run:
            return Freed(0, 0)
        left = [key for space in namespaces for key in space.of_ours(space.leftovers)]
        self.root.bucket.delete(left)
        return Freed(0, sum(space.leftover_nbytes for space in namespaces) if left else 0)

    def renew(self, chunks: Sequence[tuple[BucketNamespace, ListedChunk]]) -> None:
        """Copy objects at the server: a lifecycle rule goes by their times."""
        keys = [key for space, chunk in chunks for key in space.keys(chunk.paths)]
        if keys:
            Bucket.each(self.root.bucket.try_renew, keys)

    def find_key_ids(
        self, chunks: Sequence[tuple[BucketNamespace, ListedChunk]], show: Show
    ) -> list[set[str]]:
        """Read a header of each entry, some at a time."""
        found: list[set[str]] = []
        for first in range(0, len(chunks), _AT_ONCE):
            show("reading headers", first, len(chunks))
            found += Bucket.each(lambda one: seals(*one), chunks[first : first + _AT_ONCE])
        return found

    # -- whether it is sound ----------------------------------------------------------------------

    def verify(
        self, description: Description, keys: KnownKeys, share: float, show: Show, *, repair: bool
    ) -> Verification:
        """Check the objects of a namespace, some at a time."""
        result, checker = Verification.of(description, self.state(description)), Checker(keys)
        place = self._path(description)
        storage = ObjectStorage(place, codec=AUTO)

        def check(item: Item) -> tuple[str, Check, bool]:
            try:
                meta, data = place.bucket.get((place / item.path).key)
            except OSError as problem:
                return item.path, Check("error", (str(problem),), 0), False
            where, compressed = Place(place.name, item.chunk, item.shard), is_compressed(item.path)
            done = checker.check_bytes(memoryview(bytearray(data)), where, compressed=compressed)
            removed = False
            if repair and done.outcome in ("corrupt", "foreign") and item.shard is not None:
                removed = storage.delete(entry_name(item.chunk, item.shard), meta.tag or None)
            return item.path, done, removed

        fans = sampled([f"{fan:02x}" for fan in range(256)], share)
        run: list[Item] = []
        for item in itertools.chain(walk(place), [None]):
            if item is not None and item.kind != "entry":
                result.add_other(item)
            elif item is not None and item.chunk[:2] in fans:
                run.append(item)
            if run and (item is None or len(run) == _HELD):
                for path, done, removed in Bucket.each(check, run):
                    result.add(path, done)
                    result.removed += removed
                run = []
                show(description.name[:SHORT], amount=result.nbytes)
        if wrong := result.wrong_description():
            reason = f"{wrong}; the next save writes it anew"
            result.problems.append((DESCRIPTION, "corrupt", reason))
        return result

    def findings(self, security: Security) -> Iterator[Finding]:
        """Try the server out with an object."""
        from vua.catalog.bucket_probes import tried  # noqa: PLC0415 - of `vua doctor` alone

        del security
        return tried(self.root)

    def rules(self) -> tuple[Rules | None, list[Finding]]:
        """Make rules from `vua ttl` for what is of VUA alone."""
        from vua.catalog.bucket_probes import rules_at  # noqa: PLC0415 - likewise

        with contextlib.suppress(OSError, ConfigError):
            return rules_at(self.root)
        return None, []


def walk(place: BucketPath) -> Iterator[Item]:
    """Yield what lies in a namespace, but its description. Raises StorageError."""
    for meta in place.bucket.walk(place.key):
        path = meta.key.removeprefix(f"{place.key}/")
        entry, kind, chunk, shard = entry_at(path), kind_at(path), "", None
        if entry:
            chunk, shard = parse_name(entry)
        if kind != "description":
            yield Item(path, kind, meta.nbytes, meta.modified_s, chunk=chunk, shard=shard)


def _holds_entry(bucket: Bucket, key: str) -> bool:
    """Whether an object holds an entry, plain or compressed. Its name is not looked at."""
    with contextlib.suppress(OSError):
        data = bucket.get(key, 0, _HEADER_NBYTES)[1]
        for name in ("", COMPRESSED_SUFFIX):
            with contextlib.suppress(CorruptEntryError):
                _parsed(name, data)
                return True
    return False


def _parsed(path: str, data: memoryview) -> EntryInfo:
    """Read the header of an object of either form. Raises CorruptEntryError."""
    return parse_entry(Compressed.parse(data).header if is_compressed(path) else bytes(data))
