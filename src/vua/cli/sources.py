"""The namespaces that `vua export` and `vua warm` read, in a directory or in a bucket."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from vua.capacity.lru import mtime_ns_of
from vua.capacity.prefix_tree import ancestors, read_prefix_tree
from vua.capacity.scan import Show, Space, listed, spaces
from vua.cli import bucket_chunks, names
from vua.cli.archive import MAX_FILE_NBYTES
from vua.cli.bucket_chunks import BucketSpace, listed_spaces, opened_bucket
from vua.cli.check import Check, Checker, Place
from vua.cli.spread import over_fans
from vua.errors import CorruptEntryError
from vua.format.compressed import PACKAGE, decompressed
from vua.format.header import MAX_HEADER_NBYTES
from vua.format.parse import EntryInfo, parse_entry
from vua.io import posix
from vua.io.posix import close_quietly
from vua.storage.description import Description, read_description
from vua.storage.local import SUFFIX, chunk_path
from vua.storage.names import is_compressed, plain_path
from vua.storage.urls import is_url
from vua.store.evidence import settled
from vua.store.namespace import check_root

__all__ = ["Source", "SourceFile", "resolved", "sources"]


class SourceFile:
    """A file that is open, or an object that was read."""

    def __init__(self, stream: BinaryIO) -> None:
        """Take what was opened; it is closed by whoever opened it."""
        self.stream = stream
        self.nbytes = stream.seek(0, os.SEEK_END)
        stream.seek(0)

    def state(self) -> object:
        """Return what tells whether it was written to: no writer of ours does that."""
        if isinstance(self.stream, io.BytesIO):
            return self.nbytes
        status = os.fstat(self.stream.fileno())
        return status.st_size, status.st_mtime_ns

    def check(self, place: Place) -> Check:
        """Say whether it is what it has to be."""
        if isinstance(self.stream, io.BytesIO):
            return Checker().check_bytes(self.stream.getbuffer(), place)
        return Checker().check(self.stream.fileno(), place)


class Source(ABC):
    """A namespace."""

    def __init__(self, description: Description) -> None:
        """Take what it says of itself."""
        self.description, self.name = description, description.name

    @abstractmethod
    def in_order(self, show: Show) -> list[str]:
        """Return all chunks that have their whole prefix, parents before children."""

    @abstractmethod
    def ancestors(self, chunk: str) -> Iterator[str]:
        """Yield a chunk and what comes before it, up to the first one or a gap."""

    @abstractmethod
    def descendants(self, chunk: str, show: Show) -> list[str]:
        """Return a chunk and all that follow it, parents before children."""

    @abstractmethod
    def holds(self, chunk: str) -> bool:
        """Whether a chunk is there."""

    @abstractmethod
    def header(self, chunk: str) -> EntryInfo | None:
        """Return what an entry of a chunk says; None where none is there or it cannot be read."""

    @abstractmethod
    def listed(self, chunk: str) -> list[str]:
        """Return the names of what lies in a chunk's folder, in order."""

    @abstractmethod
    def opened(self, path: str) -> contextlib.AbstractContextManager[SourceFile]:
        """Return a file, open for reading, by its path in the namespace. Raises OSError."""


class _Directory(Source):
    def __init__(self, description: Description, space: Space) -> None:
        super().__init__(description)
        self.space = space

    def in_order(self, show: Show) -> list[str]:
        return read_prefix_tree(self.space, show, over_fans).in_order()

    def ancestors(self, chunk: str) -> Iterator[str]:
        return ancestors(self.space, chunk)

    def descendants(self, chunk: str, show: Show) -> list[str]:
        return read_prefix_tree(self.space, show, over_fans).descendants(chunk)

    def holds(self, chunk: str) -> bool:
        return mtime_ns_of(self.space.fd, chunk) is not None

    def header(self, chunk: str) -> EntryInfo | None:
        with contextlib.suppress(OSError, CorruptEntryError):
            for name in self.listed(chunk):
                if name.endswith(SUFFIX):
                    with self.opened(f"{chunk_path(chunk)}/{name}") as file:
                        return parse_entry(file.stream.read(MAX_HEADER_NBYTES))
        return None

    def listed(self, chunk: str) -> list[str]:
        with listed(self.space.fd, chunk_path(chunk)) as entries:
            return sorted(entry.name for entry in entries)

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[SourceFile]:
        fd = posix.open_beneath(self.space.fd, path)
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # a FIFO does not hang it
            close_quietly(fd)
            raise OSError(errno.EINVAL, "not a regular file")
        with open(fd, "rb", buffering=0) as stream:  # noqa: PTH123 - a descriptor
            yield SourceFile(stream)


class _InBucket(Source):
    def __init__(self, space: BucketSpace) -> None:
        super().__init__(space.description)
        self.space = space

    def in_order(self, show: Show) -> list[str]:
        return self.space.in_order(show)

    def ancestors(self, chunk: str) -> Iterator[str]:
        return self.space.ancestors(chunk)

    def descendants(self, chunk: str, show: Show) -> list[str]:
        return self.space.descendants(chunk, show)

    def holds(self, chunk: str) -> bool:
        return chunk in self.space.chunks

    def header(self, chunk: str) -> EntryInfo | None:
        one = self.space.chunks.get(chunk)
        return None if one is None else bucket_chunks.header(one, one.paths[0])

    def listed(self, chunk: str) -> list[str]:
        one = self.space.chunks[chunk]
        names = (path.rpartition("/")[2] for path in (*one.paths, *one.marks))
        return sorted({plain_path(name) for name in names})

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[SourceFile]:
        chunk = self.space.chunks.get(path[3:].partition("/")[0])
        paths = [] if chunk is None else sorted(chunk.paths)
        found = next((one for one in paths if plain_path(one) == path), path)
        data = (self.space.place / found).read(MAX_FILE_NBYTES)
        try:
            plain = decompressed(memoryview(data)) if is_compressed(found) else data
        except ImportError as problem:
            raise OSError(errno.ENOPKG, f"{found}: compressed; pip install {PACKAGE}") from problem
        yield SourceFile(io.BytesIO(plain))


@contextlib.contextmanager
def sources(where: str, show: Show) -> Iterator[Sequence[Source]]:
    """Give the namespaces of a directory or of a place in a bucket.

    Raises ConfigError, StorageError, OSError.
    """
    if is_url(where):
        place = opened_bucket(where)
        yield [_InBucket(space) for space in listed_spaces(place, show)]
        return
    root = check_root(where, create=False)
    with spaces(root) as found:
        yield [_Directory(settled(read_description(root / space.name)), space) for space in found]


def resolved(found: Sequence[Source], text: str) -> tuple[Source, str]:
    """Find the one thing whose name begins so. Raises ConfigError for none or several."""
    in_bucket = {one.space.name: one for one in found if isinstance(one, _InBucket)}
    if in_bucket:
        space, chunk = bucket_chunks.resolve([one.space for one in in_bucket.values()], text)
        return in_bucket[space.name], chunk
    directories = {one.space.name: one for one in found if isinstance(one, _Directory)}
    target = names.resolve([one.space for one in directories.values()], text)
    return directories[target.space.name], target.chunk
