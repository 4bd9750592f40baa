"""The verifier: entries come out of a storage through here, or not at all.

All of an entry's bytes against what it says: for who checks or moves entries as they are.

Whoever loads one reads it by :class:`vua.store.entry_reader.EntryReader`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from vua.errors import CorruptEntryError, EntryError, ForeignEntryError
from vua.format.entry import MAX_HEADER_NBYTES, EntryCodec
from vua.format.keys import ChunkKey
from vua.format.parse import EntryInfo, check_payload, codec_of, mismatch, parse_entry
from vua.native import Digest, EntryStream, Headers, Transfer, digests_of
from vua.storage.base import Batch, Storage, entry_name
from vua.storage.local import LocalStorage

if TYPE_CHECKING:
    from vua.security.seal import Seal

__all__ = ["EntryReader", "ReadAhead", "UnbelievedError", "Verified", "check_parts", "verified"]

_BATCH_ENTRIES: Final = 256
"""Entries read by one call; bounds what memory headers take."""
_DISCARD_NBYTES: Final = 64 << 20
"""Memory for what is read of sealed entries only to be verified."""


class UnbelievedError(Exception):
    """A sound entry whose writer is not believed."""

    def __init__(self, writer: bytes) -> None:
        """Refuse what ``writer``, the name in the header, has written."""
        super().__init__(writer.decode(errors="replace").strip())
        self.writer = writer


@dataclass(slots=True)
class Verified:
    """What became of a read."""

    count: int
    """How many entries, from the first on, are in memory and proved to be the ones asked for."""
    problem: Exception | None = None
    """Why the one behind them is not: EntryError where it is damaged or not the one asked for,
    UntrustedError, UnbelievedError, FileNotFoundError or another OSError."""
    version: bytes | None = None
    """Of the one behind them, as far as the storage knows; see :meth:`Storage.delete`."""


class EntryReader:
    """Reads entries of one shard into one memory. One thread at a time.

    What it counts as read is, byte for byte, what was stored under its key: the header says so of
    namespace, layout, shard, chunk and position, the bytes in memory have the header's checksums,
    and with a seal its tags, too.
    """

    def __init__(self, storage: Storage, codec: EntryCodec, transfer: Transfer) -> None:
        """Read from ``storage`` what ``codec`` describes, as ``transfer`` says."""
        self._storage, self._codec, self._transfer = storage, codec, transfer
        self._suffix = f"/{codec.shard.name}"
        self._room: Batch | None = None

    def read(
        self,
        keys: Sequence[ChunkKey],
        place: int = 0,
        seal: Seal | None = None,
        believed: Container[bytes] | None = None,
    ) -> Verified:
        """Read leading entries into the chunk places from ``place`` on, up to a bad one.

        Args:
            keys: the chunks; the i-th goes to place ``place + i``.
            place: of the first.
            seal: which they have to be sealed with; what was encrypted is clear text then.
            believed: the writers of which entries count; by default all.

        Raises nothing for the state of the storage. What lies in memory behind the entries that
        count is undefined.
        """
        done, at_once = 0, _BATCH_ENTRIES
        keep_discarded = seal is not None and self._transfer.discard_nbytes > 0
        if keep_discarded:
            at_once = max(1, min(at_once, _DISCARD_NBYTES // self._transfer.discard_nbytes))
        while done < len(keys):
            run = keys[done : done + at_once]
            batch = self._batch(run, place + done, keep_discarded=keep_discarded)
            filled = self._storage.read(batch)
            good, bad = self._verify(batch, run[: filled.count], seal, believed)
            done += good
            if (problem := bad or filled.problem) is not None:
                return Verified(done, problem, filled.version(good))
        return Verified(done)

    def ahead(
        self,
        keys: Sequence[ChunkKey],
        places: npt.NDArray[np.uint64],
        into: Headers,
        believed: Container[bytes] | None = None,
        *,
        hashed: bool = True,
    ) -> ReadAhead | None:
        """Begin to read plain entries ahead of their use.

        Args:
            keys: the chunks, one at least; the i-th goes to place ``places[i % len(places)]``.
            places: chunk places of the memory.
            into: memory for headers, a row for each chunk place.
            believed: the writers of which entries count; by default all.
            hashed: whether payloads are hashed here. Without it their checksums are the caller's
                to compare: headers are in ``into``.

        Returns None where the storage, or the machine, reads nothing ahead.
        """
        if not isinstance(self._storage, LocalStorage):
            return None
        names = [entry_name(key.name, self._codec.shard) for key in keys]
        try:
            stream = self._storage.ahead(names, self._transfer, places, into, hashed=hashed)
        except OSError:
            return None

        def check(at: int) -> None:
            row = int(places[at % len(places)])
            self._check(keys[at], into, row, None, believed, hashed=hashed)

        return ReadAhead(stream, check)

    def _batch(self, run: Sequence[ChunkKey], place: int, *, keep_discarded: bool) -> Batch:
        """Return what to ask for, in memory that is kept between calls."""
        names = [key.name + self._suffix for key in run]
        room = self._room
        if keep_discarded or room is None or len(room.headers) < len(run):
            room = Batch.of(names, self._transfer, place, keep_discarded=keep_discarded)
            self._room = room
            return room
        room.names, room.place = names, place
        room.into.clear(len(run))  # nothing is left that a storage could pass off as its own
        return room

    def _verify(
        self,
        batch: Batch,
        keys: Sequence[ChunkKey],
        seal: Seal | None,
        believed: Container[bytes] | None,
    ) -> tuple[int, EntryError | UnbelievedError | None]:
        """Return how many entries are good, and what is the matter with the one behind them."""
        codec, plan = self._codec, self._transfer.plan
        for index, key in enumerate(keys):
            try:
                self._check(key, batch.into, index, seal, believed)
                if seal is not None:
                    header = memoryview(batch.headers[index].data)
                    seal.open(codec, key, header, batch.blocks(index), plan.block_place.tolist())
            except (EntryError, UnbelievedError) as problem:
                return index, problem
        return len(keys), None

    def _check(
        self,
        key: ChunkKey,
        into: Headers,
        row: int,
        seal: Seal | None,
        believed: Container[bytes] | None,
        *,
        hashed: bool = True,
    ) -> None:
        """Compare what was read to a row with what an entry of ``key`` has to be.

        Raises EntryError where it is not that, UnbelievedError where it is another writer's.
        Without ``hashed`` the payload is left out.
        """
        codec, plan, key_id = self._codec, self._transfer.plan, "" if seal is None else seal.key_id
        header = memoryview(into.headers[row].data)
        table = codec.table_of(header, key, key_id)
        if table is None:
            raise mismatch(codec, header, key, key_id)
        if believed is not None and codec.writer_of(header) not in believed:
            raise UnbelievedError(codec.writer_of(header))
        if hashed:
            table = table if plan.blocks == codec.blocks else table[plan.block_place]
            digests = into.digests[row]
            if table.tobytes() != digests.tobytes():
                check_payload(codec.layout, codec.shard, table, digests, plan.block_place)


class ReadAhead:
    """Entries that are read in order ahead of their use. One thread at a time."""

    def __init__(self, stream: EntryStream, check: Callable[[int], None]) -> None:
        """Hand on what ``stream`` reads.

        ``check``, given an entry's number, raises EntryError or UnbelievedError where it is wrong.
        """
        self._stream, self._check = stream, check
        self._good = 0

    def take(self, done: int, upto: int) -> int:
        """Wait for the first ``upto`` entries; return how many leading ones came and are right.

        The first ``done`` are done with: their places may be written again.
        Right are those that :meth:`EntryReader.read` would count, but for payloads that are not
        hashed here. Gives up the GIL. Once there are fewer, there will not be more.
        """
        came = self._stream.wait(done, upto)
        while self._good < came:
            try:
                self._check(self._good)
            except (EntryError, UnbelievedError):
                break
            self._good += 1
        return self._good

    def close(self) -> None:
        """Wait until nothing is written to memory any more."""
        self._stream.close()


def verified(data: bytes | memoryview, namespace: str, name: str) -> EntryInfo:
    """Return what an entry says, if it is sound and is ``name``. Tags of a seal are not looked at.

    Raises CorruptEntryError, ForeignEntryError.
    """
    info = parse_entry(bytes(data[:MAX_HEADER_NBYTES]))
    info.check_length(len(data))
    if (info.namespace, entry_name(info.prefix_hash, info.shard)) != (namespace, name):
        msg = f"it says that it is {info.prefix_hash}/{info.shard.name} of {info.namespace}"
        raise ForeignEntryError(msg)
    check_parts(info, iter([memoryview(data)[info.header_nbytes :]]))
    return info


def check_parts(
    info: EntryInfo, payload: Iterator[memoryview], openings: Iterator[Digest] | None = None
) -> None:
    """Compare checksums and tags. Each part of the payload may be gone when the next one comes.

    What is encrypted is decrypted where it lies. Raises CorruptEntryError.
    """
    codec, genuine = codec_of(info), []
    sizes = codec.block_nbytes()
    rest = memoryview(b"")

    def parts(left: int, opening: Digest | None) -> Iterator[memoryview]:
        nonlocal rest
        while left:
            rest = rest or next(payload, rest)
            if not rest:
                raise CorruptEntryError("it became shorter while it was read")
            part, rest = rest[:left], rest[left:]
            left -= len(part)
            yield part
            if opening is not None:
                opening.update(part)
        genuine.append(1 if opening is None else opening.intdigest())

    blocks = (parts(size, None if openings is None else next(openings)) for size in sizes)
    found = digests_of(blocks)
    check_payload(info.layout, info.shard, info.checksums, found)
    try:
        check_payload(info.layout, info.shard, [1] * len(sizes), genuine, what="tags")
    except CorruptEntryError as problem:
        key_id = info.seal_info.key_id
        msg = f"{problem}: written by somebody without the key {key_id}, or changed since"
        raise CorruptEntryError(msg) from problem
