"""The contract of a storage: a few operations over batches of entries, each with its guarantee.

A storage keeps entries: a name and bytes. It knows nothing about tokens or tensors, and it does not
verify: :class:`vua.store.entry_reader.EntryReader` verifies everything that any storage returns, so
a new storage cannot forget to. A name is ``<chunk>/<shard>``, at most 200 characters of
``a-z0-9.-`` and that one ``/``; the chunk is 64 hexadecimal digits.

The caller names the memory that bytes are read into. How a file's bytes lie there is a
:class:`vua.native.Transfer`; a storage that is not made of files needs only :meth:`Batch.fill`
(reading), :meth:`Batch.entry` (writing) and :attr:`Batch.nbytes`. `vua.testing.conformance` tests a
storage through this contract alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vua import native
from vua.errors import CorruptEntryError, StorageError
from vua.format.layout import Shard
from vua.io.memory import header_plan
from vua.native import FAILED, PRESENT, WRITTEN, Headers, Transfer

__all__ = [
    "FAILED",
    "PRESENT",
    "WRITTEN",
    "Batch",
    "Capabilities",
    "Entry",
    "ReadResult",
    "Storage",
    "WriteResult",
    "entry_name",
    "parse_name",
]


def entry_name(chunk: str, shard: Shard) -> str:
    """Return the name of one shard of a chunk (64 hex)."""
    return f"{chunk}/{shard.name}"


def parse_name(name: str) -> tuple[str, Shard | None]:
    """Return the chunk and the shard in a name; None if it has no shard's name."""
    chunk, _, shard = name.partition("/")
    return chunk, Shard.parse(shard)


@dataclass(slots=True, eq=False)
class Batch:
    """Entries of one shard, and the memory that they are read into or written from."""

    names: Sequence[str]
    transfer: Transfer
    """How the bytes of an entry lie in memory."""
    place: int
    """Chunk slot in memory of the first entry; the next entries follow it."""
    into: Headers
    """Memory for what is read beside K and V, at least one row per name."""
    check_offset: int | None = None
    """Offset of the self-check's digits in a header that is to be written."""
    offer: Callable[[int, memoryview], None] | None = None
    """Takes whole entries, by index, that the storage has in its own memory and no longer needs.
    Called from any thread; raises nothing."""

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
        """Return a batch with new memory for headers and digests, and for discards if asked."""
        into = Headers(transfer.plan, len(names), keep_discarded=keep_discarded)
        return cls(names, transfer, place, into, check_offset)

    @classmethod
    def of_bytes(cls, name: str, nbytes: int, most: int | None = None) -> Batch:
        """Return a batch of one entry as it is: its first bytes, by default all, are its header."""
        plan = header_plan(nbytes, nbytes if most is None else min(nbytes, most))
        return cls.of([name], Transfer(plan))

    @property
    def headers(self) -> npt.NDArray[np.uint8]:
        """The headers, ``[names or more, header_nbytes]``, rows without gaps.

        Headers to be written are complete, except for the checksums and the self-check if
        :attr:`check_offset` is given.
        """
        return self.into.headers

    @property
    def digests(self) -> npt.NDArray[np.uint64]:
        """The xxh3-64 of each block read, ``[names or more, blocks]``; zeros before."""
        return self.into.digests

    @property
    def nbytes(self) -> int:
        """Bytes of each entry, header included. An entry of another length is damaged."""
        return self.transfer.plan.file_nbytes

    @property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """The wanted parts of each entry: (offset, nbytes)."""
        return self.transfer.plan.ranges

    def blocks(self, index: int) -> Iterator[list[memoryview]]:
        """Yield the bytes in memory of each checksum block of an entry, in parts.

        A plan that discards extents needs ``into.discard`` for this.
        """
        discard = 0 if self.into.discard is None else self.into.discard[index].ctypes.data
        return native.blocks_of(self.transfer, self.place + index, discard)

    def fill(self, index: int, data: bytes | memoryview, offset: int = 0) -> None:
        """Copy bytes that were read to their place in memory, and hash them.

        Args:
            index: of the entry.
            data: its bytes from ``offset`` on: all of it, or one of :attr:`ranges`.
            offset: where in the entry they begin.

        Raises CorruptEntryError if a whole entry has another length.
        """
        view = memoryview(data)
        if (offset, len(view)) != (0, self.nbytes) and (offset, len(view)) not in self.ranges:
            msg = f"{len(view)} bytes from {offset} on, expected {self.nbytes} or one of the ranges"
            raise CorruptEntryError(msg)
        native.fill_entry(self.transfer, self.place + index, self.into, index, view, offset)

    def entry(self, index: int, into: memoryview | None = None) -> memoryview:
        """Complete an entry's header, and return the entry in one piece.

        Args:
            index: of the entry.
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
class ReadResult:
    """The result of a read by a storage; the verifier then counts only what it has verified."""

    count: int
    """Number of leading entries that are in memory with their headers and digests."""
    problem: Exception | None = None
    """Why the next entry is not; None if all are. FileNotFoundError, another OSError,
    UntrustedError for an untrusted owner, CorruptEntryError for a wrong length."""
    version: Callable[[int], bytes | None] = lambda _: None
    """By index: bytes that distinguish this entry from any other that ever has its name. For
    entries in memory, and for the next one if it is damaged; the verifier: for that one alone."""


@dataclass(slots=True)
class WriteResult:
    """The result of a write."""

    statuses: Sequence[int]
    """Per entry: WRITTEN, PRESENT (it existed with the right length; unchanged) or FAILED. After
    the first failure all may be FAILED."""
    problem: StorageError | None = None
    """Why the first failed entry did."""


class Entry(NamedTuple):
    """One stored entry, as listed."""

    name: str
    nbytes: int
    """Bytes stored."""
    last_used_s: float
    """Seconds since 1970 of the last write, or of the last use if the storage notes uses."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a storage can do beyond the contract."""

    device_reads: bool = False
    """Entries are files of this system, which a GPU may read itself; see `vua.device.gds`."""
    probes: int = 1
    """Best number of names per :meth:`Storage.exists`: more if an answer takes long."""
    batch_nbytes: int = 64 << 20
    """Best amount per write. For its duration a writer holds its space, and new chunks' mtimes
    wait."""


class Storage(Protocol):
    """Keeps the entries of one namespace. Safe for threads, processes and hosts.

    No method waits for ever, and none leaves an entry half written: a reader finds an entry as it
    was written, or none, whatever happens to other processes or to the machine meanwhile. (After a
    power cut it may find a damaged entry; verification finds that out.)
    """

    @property
    def capabilities(self) -> Capabilities:
        """What the storage can do; constant."""
        ...

    @property
    def gone(self) -> bool:
        """Whether the storage itself was deleted since it was opened."""
        ...

    # -- reading ------------------------------------------------------------------------------

    def read(self, batch: Batch) -> ReadResult:
        """Read leading entries into the batch's memory, and hash them into its digests.

        Stops at the first that cannot be read; memory after it is undefined. Entries are read whole
        or not at all, and nothing is verified: that is the caller's part. Raises nothing for the
        state of the storage: the result says it.
        """
        ...

    def exists(self, names: Sequence[str], nbytes: int | None = None) -> Sequence[bool]:
        """Whether each entry exists now, with that size: a hint, not a promise.

        Raises nothing; an entry that cannot be checked counts as missing.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield the entries whose names begin with ``prefix``, in any order, beside writers.

        ``prefix`` is empty, or a chunk and ``/``. Only entries are listed. Raises nothing:
        unreadable parts are left out.
        """
        ...

    # -- writing ------------------------------------------------------------------------------

    def write(self, batch: Batch) -> WriteResult:
        """Write missing entries, each all or nothing, in order.

        An entry of the same name and length counts as present, one of another length is replaced. A
        crash leaves each entry unchanged or new as a whole. Raises nothing for the state of the
        storage: the result says it.
        """
        ...

    def delete(self, name: str, if_version: bytes | None = None) -> bool:
        """Remove an entry from sight; with ``if_version`` only that very one.

        Returns whether it is gone (now or before, or replaced by another). Raises nothing.
        """
        ...
