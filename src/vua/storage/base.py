"""The contract of a storage: a few verbs over batches of entries, each with its guarantee.

A storage keeps entries: a name and bytes. It knows nothing about tokens or tensors, and integrity
does not live here: :class:`vua.store.entry_reader.EntryReader` verifies whatever a storage hands
out, so a new storage cannot forget to. A name is ``<chunk>/<shard>``, of at most 200 characters of
``a-z0-9.-`` and that one ``/``; the chunk is 64 hexadecimal digits.

Whoever asks for bytes names the memory that they are to be in. How a file's bytes lie there is a
:class:`vua.native.Transfer`; a storage that is not made of files in a directory needs to know only
:meth:`Batch.fill` (reading), :meth:`Batch.entry` (writing) and :attr:`Batch.nbytes`.
`vua.testing.conformance` tests a storage through this contract alone.

What a failed call to the file system tells whoever runs the machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vua import native
from vua.errors import CorruptEntryError, NotWritableError, StorageError, StorageFullError
from vua.format.layout import Shard
from vua.native import FAILED, PRESENT, WRITTEN, Headers, Transfer

__all__ = [
    "FAILED",
    "PRESENT",
    "WRITTEN",
    "Batch",
    "Capabilities",
    "Entry",
    "Filled",
    "Storage",
    "Written",
    "entry_name",
    "explained",
    "explaining",
    "parse_name",
]


def entry_name(chunk: str, shard: Shard) -> str:
    """Return the name of one shard of a chunk (64 hex)."""
    return f"{chunk}/{shard.name}"


def parse_name(name: str) -> tuple[str, Shard | None]:
    """Return the chunk and the shard that a name says; None where it is no shard's name."""
    chunk, _, shard = name.partition("/")
    return chunk, Shard.parse(shard)


@dataclass(slots=True, eq=False)
class Batch:
    """Entries of one shard, and the memory that they are read into or written from."""

    names: Sequence[str]
    transfer: Transfer
    """How the bytes of an entry lie in memory."""
    place: int
    """The chunk place in memory of the first entry; the others follow it."""
    into: Headers
    """Memory for what is read beside K and V, with a row for each of the names, or more."""
    check_offset: int | None = None
    """Where in a header that is to be written the digits of its check of itself stand."""
    offer: Callable[[int, memoryview], None] | None = None
    """Takes whole entries, by their index, from a storage that has them in memory of its own and
    is done with them. Called from any thread; raises nothing."""

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        transfer: Transfer,
        place: int = 0,
        *,
        keep_discarded: bool = False,
        check_offset: int | None = None,
    ) -> Batch:
        """Return a batch with memory for headers and digests; of what is discarded if wanted."""
        into = Headers(transfer.plan, len(names), keep_discarded=keep_discarded)
        return cls(names, transfer, place, into, check_offset)

    @property
    def headers(self) -> npt.NDArray[np.uint8]:
        """The headers, ``[names or more, header_nbytes]``, rows without gaps.

        To be written they are complete, but for the checksums and the check where
        :attr:`check_offset` is given.
        """
        return self.into.headers

    @property
    def digests(self) -> npt.NDArray[np.uint64]:
        """What was read hashes to: xxh3-64, ``[names or more, blocks]``. Zeros before."""
        return self.into.digests

    @property
    def nbytes(self) -> int:
        """Bytes of each entry, header included. One of another length is damaged."""
        return self.transfer.plan.file_nbytes

    @property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """What of each entry is wanted: (offset, nbytes)."""
        return self.transfer.plan.ranges

    def blocks(self, index: int) -> Iterator[list[memoryview]]:
        """Yield the bytes in memory of each checksum block of an entry, in parts.

        With a plan that discards extents this needs ``into.discard``.
        """
        discard = 0 if self.into.discard is None else self.into.discard[index].ctypes.data
        return native.blocks_of(self.transfer, self.place + index, discard)

    def fill(self, index: int, data: bytes | memoryview, offset: int = 0) -> None:
        """Put bytes that were read where they belong, and hash them.

        Args:
            index: of which entry.
            data: its bytes from ``offset`` on: all of it, or one of :attr:`ranges`.
            offset: where in the entry they begin.

        Raises CorruptEntryError where an entry of another length is given as a whole.
        """
        view = memoryview(data)
        if (offset, len(view)) != (0, self.nbytes) and (offset, len(view)) not in self.ranges:
            msg = f"{len(view)} bytes from {offset} on, expected {self.nbytes} or one of the ranges"
            raise CorruptEntryError(msg)
        native.fill_entry(self.transfer, self.place + index, self.into, index, view, offset)

    def entry(self, index: int, into: memoryview | None = None) -> memoryview:
        """Complete an entry's header, and return the entry in one piece.

        Args:
            index: of which entry.
            into: memory for it, ``[nbytes]``; by default new memory.
        """
        plan, header = self.transfer.plan, self.headers[index]
        data = np.empty(self.nbytes, np.uint8).data if into is None else into
        sums = native.gather_entry(self.transfer, self.place + index, data)
        if self.check_offset is not None:
            table = sums.view(np.uint8)
            header[plan.table_offset : plan.table_offset + len(table)] = table
            native.fill_check(header, self.check_offset)
        data[: plan.header_nbytes] = header.data
        return data


@dataclass(slots=True)
class Filled:
    """What became of a read."""

    count: int
    """How many entries, from the first on, are in memory with their headers and digests."""
    problem: Exception | None
    """Why the one behind them is not, None where all are: FileNotFoundError, another OSError,
    UntrustedError for an entry of somebody who is not trusted, CorruptEntryError for one of
    another length."""
    version: Callable[[int], bytes | None]
    """Of an entry, by its index: what tells it from any other that ever has its name. For those
    that are in memory, and for the one behind them if it is damaged."""


@dataclass(slots=True)
class Written:
    """What became of a write."""

    statuses: Sequence[int]
    """Of each entry: WRITTEN, PRESENT (it was there before, as long as it has to be; nothing was
    done) or FAILED. Behind the first that failed all may have."""
    problem: StorageError | None = None
    """Why the first that failed has."""


class Entry(NamedTuple):
    """One stored entry, as it is listed."""

    name: str
    nbytes: int
    """Bytes that it takes: fewer than are read of it where it is compressed."""
    last_used_s: float
    """Seconds since 1970, of the last write, or of a use where a storage notes these."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a storage can do beside what every storage does."""

    device_reads: bool = False
    """Entries are files of this system, which a GPU may read by itself; see `vua.device.gds`."""
    probes: int = 1
    """Of how many entries it is best asked at a time whether they are there: more where an answer
    takes long, and several take no longer."""
    batch_nbytes: int = 64 << 20
    """How much it is best given by one call. So long a writer holds its space, and new chunks wait
    for their mtimes."""


class Storage(Protocol):
    """Keeps the entries of one namespace. All methods are safe for threads, processes and hosts.

    None of them waits for ever, and none leaves an entry half written: a reader finds an entry as
    it was written, or none, whatever happens to other processes or to the machine meanwhile.
    (After a power cut it may find one that is damaged; verification finds that out.)
    """

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; always the same."""
        ...

    @property
    def gone(self) -> bool:
        """Whether the place itself was deleted since it was opened."""
        ...

    # -- reading ------------------------------------------------------------------------------

    def read(self, batch: Batch) -> Filled:
        """Read leading entries into the batch's memory, and hash them into its digests.

        Up to the first that is not to be had; what lies behind it in memory is undefined. Entries
        are read whole or not at all, but nothing is verified: that is the caller's part. Raises
        nothing for the state of the storage: that is in the answer.
        """
        ...

    def exists(self, names: Sequence[str], nbytes: int | None = None) -> Sequence[bool]:
        """Whether each entry is there now, and of that size: a hint, not a promise to be readable.

        Raises nothing; what cannot be found out is not there.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield the entries whose names begin with ``prefix``, in no order, while others may write.

        ``prefix`` is nothing, or a chunk and ``/``. What is no entry is not listed. Raises nothing:
        what cannot be read is left out.
        """
        ...

    # -- writing ------------------------------------------------------------------------------

    def write(self, batch: Batch) -> Written:
        """Write entries that are not there, each all or nothing, in order.

        An entry of the same name and length counts as there, one of another length is replaced. A
        crash leaves each entry as it was or new as a whole. Raises nothing for the state of the
        storage: that is in the answer.
        """
        ...

    def delete(self, name: str, if_version: bytes | None = None) -> bool:
        """Take an entry out of sight; with ``if_version`` only if it is still that very one.

        Returns whether it is gone (or was, or is another one by now). Raises nothing.
        """
        ...


_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def explained(problem: OSError, where: str) -> StorageError:
    """Return the error that tells an operator what ``problem`` at ``where`` means."""
    if problem.errno in _FULL:
        text = f"{where}: no space left; free some or remove old namespaces"
        return StorageFullError(problem.errno, text)
    if problem.errno in _READ_ONLY:
        there = where
        while not os.path.lexists(there) and there != os.path.dirname(there):
            there = os.path.dirname(there)  # what is to be made in it is not there yet
        readable = os.access(there, os.R_OK | os.X_OK * os.path.isdir(there), effective_ids=True)
        verb, remedy = ("write", ", or use it for reading only") if readable else ("read", "")
        text = (
            f"{where}: this process may not {verb} here ({problem.strerror}); check the owner and "
            f"mode of the directory{remedy}"
        )
        return NotWritableError(problem.errno, text)
    return StorageError(problem.errno or errno.EIO, f"{where}: {problem.strerror}")


@contextlib.contextmanager
def explaining(where: str) -> Iterator[None]:
    """Raise :func:`explained` in place of an OSError that is no StorageError and no closed pipe."""
    try:
        yield
    except (StorageError, BrokenPipeError):
        raise
    except OSError as problem:
        raise explained(problem, where) from problem
