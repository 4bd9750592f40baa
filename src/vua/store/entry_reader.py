"""The verifier: every entry that leaves a storage passes through :class:`EntryReader`.

:func:`verified` and :func:`check_parts` check whole entries for tools that move or verify them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from vua.errors import CorruptEntryError, EntryError, ForeignEntryError
from vua.format.entry import MAX_HEADER_NBYTES, EntryCodec
from vua.format.keys import ChunkKey
from vua.format.parse import EntryInfo, check_payload, codec_of, mismatch, parse_entry
from vua.io.memory import header_plan
from vua.native import Digest, EntryStream, Headers, Transfer, digests_of
from vua.storage.base import Batch, ReadResult, Storage, entry_name
from vua.storage.local import LocalStorage

if TYPE_CHECKING:
    from vua.security.seal import Seal

_BATCH_ENTRIES: Final = 256
"""Entries read by one call; bounds the memory of headers."""
_DISCARD_NBYTES: Final = 64 << 20
"""Memory for parts of sealed entries that are read only to be verified."""


class UnbelievedError(Exception):
    """A sound entry whose writer is not trusted."""

    def __init__(self, writer: bytes) -> None:
        super().__init__(writer.decode(errors="replace").strip())
        self.writer = writer


class EntryReader:
    """Reads entries of one shard into one memory. Not thread-safe.

    An entry counts as read only if it is, byte for byte, what was stored under its key: the header
    names its namespace, layout, shard, chunk and position, and the bytes in memory match the
    header's checksums and, with a seal, its tags.
    """

    def __init__(
        self, storage: Storage, codec: EntryCodec, transfer: Transfer | None = None
    ) -> None:
        """Read entries of ``codec`` as ``transfer`` says; None: their headers alone."""
        if transfer is None:
            sizes = codec.file_nbytes, codec.header_nbytes, codec.table_offset
            transfer = Transfer(header_plan(*sizes))
        self._storage, self._codec, self._transfer = storage, codec, transfer
        self._suffix = f"/{codec.shard.name}"
        self._kept: Batch | None = None

    def read(
        self,
        keys: Sequence[ChunkKey],
        place: int = 0,
        seal: Seal | None = None,
        believed: Container[bytes] | None = None,
    ) -> ReadResult:
        """Read leading entries into the chunk slots from ``place`` on, up to a bad one.

        Args:
            keys: the chunks; the i-th goes to slot ``place + i``.
            seal: the seal they must have; encrypted entries are decrypted in memory.
            believed: names of trusted writers; by default all.

        Counted entries are proved to be the requested ones. The problem may also be an EntryError
        (damaged or another entry) or an UnbelievedError. Raises nothing for the state of the
        storage. Memory after the counted entries is undefined.
        """
        done, at_once = 0, _BATCH_ENTRIES
        keep_discarded = seal is not None and self._transfer.discard_nbytes > 0
        if keep_discarded:
            at_once = max(1, min(at_once, _DISCARD_NBYTES // self._transfer.discard_nbytes))
        while done < len(keys):
            run = keys[done : done + at_once]
            batch = self._batch(run, place + done, keep_discarded=keep_discarded)
            plain = seal is None and not self._codec.kind
            judges = plain and isinstance(self._storage, LocalStorage)
            batch.into.form = self._codec.form(run) if judges else None
            filled = self._storage.read(batch)
            good, bad = self._verify(batch, run[: filled.count], seal, believed)
            done += good
            if (problem := bad or filled.problem) is not None:
                return ReadResult(done, problem, {done: filled.version(good)}.get)
        return ReadResult(done)

    def ahead(
        self,
        keys: Sequence[ChunkKey],
        places: npt.NDArray[np.uint64],
        into: Headers,
        believed: Container[bytes] | None = None,
        *,
        hashed: bool = True,
    ) -> ReadAhead | None:
        """Start reading plain entries ahead of their use; C compares them with what they must be.

        Args:
            keys: the chunks, at least one; the i-th goes to slot ``places[i % len(places)]``.
            into: memory for headers, one row per chunk slot.
            believed: names of trusted writers; by default all.
            hashed: whether payloads are hashed here. Without it the caller must compare their
                checksums with the headers in ``into``.

        Returns None if the storage or the machine cannot read ahead, and for sealed entries.
        """
        codec = self._codec
        if not isinstance(self._storage, LocalStorage) or codec.kind:
            return None
        names, form = [key.name + self._suffix for key in keys], codec.form(keys)
        try:
            stream = self._storage.ahead(names, self._transfer, form, places, into, hashed=hashed)
        except OSError:
            return None

        def is_believed(at: int) -> bool:
            header = into.headers[int(places[at % len(places)])]
            return believed is None or codec.writer_of(memoryview(header.data)) in believed

        return ReadAhead(stream, None if believed is None else is_believed)

    def _batch(self, run: Sequence[ChunkKey], place: int, *, keep_discarded: bool) -> Batch:
        """Return the batch to read, in memory that is kept between calls."""
        names = [key.name + self._suffix for key in run]
        kept = self._kept
        if keep_discarded or kept is None or len(kept.headers) < len(run):
            kept = Batch.of(names, self._transfer, place, keep_discarded=keep_discarded)
            self._kept = kept
            return kept
        kept.names, kept.place = names, place
        kept.into.clear(len(run))  # so that a storage cannot pass off an earlier result as its own
        return kept

    def _verify(
        self,
        batch: Batch,
        keys: Sequence[ChunkKey],
        seal: Seal | None,
        believed: Container[bytes] | None,
    ) -> tuple[int, EntryError | UnbelievedError | None]:
        codec, plan, into = self._codec, self._transfer.plan, batch.into
        if len(keys) and into.judged[: len(keys)].all():
            writers = codec.writers_of(into.headers[: len(keys)])
            if believed is None or all(one in believed for one in writers):
                return len(keys), None
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
    ) -> None:
        """Compare one row with the entry that ``key`` must have.

        Raises EntryError if it is not that, UnbelievedError for an untrusted writer.
        """
        codec, plan, key_id = self._codec, self._transfer.plan, "" if seal is None else seal.key_id
        header, table = memoryview(into.headers[row].data), None
        if not into.judged[row]:
            table = codec.table_of(header, key, key_id)
            if table is None:
                raise mismatch(codec, header, key, key_id)
        if believed is not None and codec.writer_of(header) not in believed:
            raise UnbelievedError(codec.writer_of(header))
        if table is not None:
            table = table if plan.blocks == codec.blocks else table[plan.block_place]
            digests = into.digests[row]
            if table.tobytes() != digests.tobytes():
                check_payload(codec.layout, codec.shard, table, digests, plan.block_place)


class ReadAhead:
    """Entries that are read in order ahead of their use. Not thread-safe."""

    def __init__(self, stream: EntryStream, is_believed: Callable[[int], bool] | None) -> None:
        """Pass on what ``stream`` reads.

        ``is_believed``, given an entry's index: whether its writer is trusted. None: all are.
        """
        self._stream, self._is_believed = stream, is_believed
        self._good = 0

    def take(self, done: int, upto: int) -> int:
        """Wait for the first ``upto`` entries; return how many leading ones arrived and are right.

        Slots of the first ``done`` entries may be overwritten. An entry is right if
        :meth:`EntryReader.read` would count it, except for payloads that are not hashed here.
        Releases the GIL. After a bad entry the result stays the same.
        """
        came = self._stream.wait(done, upto)
        if self._is_believed is None:
            self._good = came
        while self._good < came and self._is_believed is not None and self._is_believed(self._good):
            self._good += 1
        return self._good

    def close(self) -> None:
        self._stream.close()


def verified(data: bytes | memoryview, namespace: str, name: str) -> EntryInfo:
    """Return an entry's header if the entry is sound and is ``name``.

    A seal's tags are not checked.

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
    """Compare checksums and tags.

    Each part of the payload may be freed once the next one is yielded.

    Encrypted parts are decrypted in place. Raises CorruptEntryError.
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
        msg = f"{problem}: written without the key {key_id}, or changed since"
        raise CorruptEntryError(msg) from problem
