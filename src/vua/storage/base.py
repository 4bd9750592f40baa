"""What a store needs from a place to keep files: a few verbs, each with its guarantee.

A storage knows names and bytes, nothing about tokens or tensors. Integrity does not live here: the
store verifies whatever a storage hands out, so a new storage cannot forget to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from vua.format.layout import Shard
from vua.io.posix import Iovecs
from vua.native import Batch

__all__ = ["Reader", "Storage"]


class Reader(Protocol):
    """One open file. It stays readable when the file is removed or replaced meanwhile."""

    nbytes: int
    """Size of the file when it was opened."""

    def read_into(self, iovecs: int, count: int, nbytes: int, offset: int) -> int:
        """Fill the memory named by ``count`` iovecs at address ``iovecs``, ``nbytes`` in all.

        Reads from ``offset`` of the file on. :func:`vua.io.posix.iovecs_at` gives them as an array.

        Returns the number of bytes read, short only at the end of the file. Raises OSError.
        """
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class Storage(Protocol):
    """Keeps the files of one namespace. All methods are safe for threads, processes and hosts."""

    @property
    def gone(self) -> bool:
        """Whether the place itself was deleted since it was opened."""
        ...

    def publish(self, chunk: str, shard: Shard, iovecs: Iovecs) -> None:
        """Write a file from memory, all or nothing: no reader ever sees a part of it.

        Replaces a file of that name. A crash leaves either the file as it was or the whole new
        file under its name (and perhaps a temporary one). Raises StorageError.
        """
        ...

    @property
    def writes_files(self) -> bool:
        """Whether there is any use in calling :meth:`write_files`."""
        ...

    def write_files(
        self,
        chunks: Sequence[str],
        shard: Shard,
        batch: Batch,
        place: int,
        headers: int,
        check_offset: int,
    ) -> Sequence[int]:
        """Hash and write the files of several chunks at once, as far as that is to be had.

        The first one lies at chunk place ``place`` of the batch's memory, their headers, with zeros
        for checksums and check, at the address ``headers``.

        A short cut for ``exists`` and ``publish`` in a loop, see :func:`vua.native.save`. Returns
        what became of each: PRESENT, WRITTEN, or LEFT to the caller, who goes on with these file by
        file; nothing at all where none can be written in this way, which is always a right answer.
        """
        ...

    def open(self, chunk: str, shard: Shard) -> Reader:
        """Open a file for reading.

        Raises FileNotFoundError, or another OSError; UntrustedError for another user's file.
        """
        ...

    def read_files(
        self, chunks: Sequence[str], shard: Shard, batch: Batch, place: int, headers: int
    ) -> int:
        """Read and hash the files of several chunks at once, as far as that is to be had.

        The first one goes to chunk place ``place`` of the batch's memory, their headers to the
        address ``headers``.

        A short cut for ``open`` and ``read_into`` in a loop, see :func:`vua.native.load`. Returns
        how many from the first on are in memory and agree with their own checksums; the caller
        goes on file by file from there. 0 is always a right answer.
        """
        ...

    def exists(self, chunk: str, shard: Shard, nbytes: int | None = None) -> bool:
        """Whether a file is there now, and of that size: a hint, never a promise to be readable."""
        ...

    def shards(self, chunk: str) -> Sequence[Shard]:
        """Return the shards stored for a chunk, none when the chunk is absent."""
        ...

    def remove(self, chunk: str, shard: Shard, reader: Reader | None = None) -> bool:
        """Take a file out of sight; with ``reader``, only if it is still the very file read.

        Returns whether it is gone. Never raises for a file that is already gone.
        """
        ...

    def scan(self) -> Iterator[tuple[str, Shard, int]]:
        """Yield (chunk, shard, nbytes) of every file, in no order, while others may write."""
        ...
