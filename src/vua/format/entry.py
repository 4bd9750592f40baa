"""The bytes of an entry: one shard of one chunk as a safetensors file that proves what it is.

::

    [u64 header length][JSON header, space padded][checksums][k][v]
                                                             ^ 4 KiB boundary

The header is *canonical*: for a given namespace, layout, shard and chunk every byte is known in
advance, except four fixed-width fields (creation time, writer, self-check) and the checksums. A
reader compares bytes instead of trusting a parser, so a file can never make it believe or allocate
anything. :mod:`vua.format.parse` reads headers of unknown files.

A *sealed* file (:mod:`vua.security.seal`) has tags of a secret key after its checksums, and three
more header fields. Its K and V may be encrypted, which changes neither their length nor their
offset.

:func:`entry_plan` maps a rectangle of a chunk to byte ranges of its file. `docs/format.md` is the
specification. Pure functions over buffers; no I/O here.
"""

from __future__ import annotations

import json
import math
import re
import struct
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from vua.errors import CorruptEntryError, LayoutError
from vua.format.keys import ChunkKey
from vua.format.layout import ITEMSIZE, KVLayout, Shard
from vua.io.memory import ARRAYS_MAX, EXTENT, IOV_MAX, READ, EntryPlan
from vua.native import KINDS, HeaderForm

FORMAT: Final = "vua.entry.v1"
SEALED: Final = "vua.sealed.v2"
AUTHENTIC: Final = "gmac"
"""Seal without encryption: proves that a holder of the key wrote the file."""
ENCRYPTED: Final = "aes-256-gcm"
"""Seal that also encrypts K and V."""
TAG_NBYTES: Final = 16
NO_HASH: Final = "-" * 64
"""The parent of a first chunk."""
MAX_HEADER_NBYTES: Final = 1 << 20
"""Larger than any real header: 1 MiB of checksums are 131,072 blocks."""


class SealInfo(NamedTuple):
    """What a sealed file says about its seal; both fields are empty for a plain file."""

    key_id: str = ""
    """Names the key, 16 hex digits; reveals nothing about it."""
    nonce: str = ""
    """Unique per file, 32 hex digits."""


PLAIN: Final = SealInfo()


ALIGNMENT: Final = 4096  # O_DIRECT and GPU-direct reads start at a page
_WRITER_WIDTH: Final = 48
_CREATED_WIDTH: Final = 10  # seconds since 1970, good until the year 2286
_CHECK_WIDTH: Final = 16
_BLANK_CHECK: Final = b"0" * _CHECK_WIDTH
_BEFORE_WRITER: Final = ',"created":"0123456789","writer":"'
_DIGIT, _NAMING, _HEX = rb"\d", rb"[\w ./+:-]", rb"[0-9a-f]"
_VARIABLE: Final = re.compile(
    rb',"created":"%b{10}","writer":"%b{48}"(?:,"nonce":"(%b{32})")?,"check":"%b{16}'
    % (_DIGIT, _NAMING, _HEX, _HEX)
)
_KINDS: Final = bytes(
    sum(
        1 << bit for bit, kind in enumerate((_DIGIT, _NAMING, _HEX)) if re.match(kind, bytes([one]))
    )
    for one in range(256)
)
"""For each byte, bits of what it is: a digit, of a name, hexadecimal."""
_VARIABLE_KINDS: Final = b',"created":"%b","writer":"%b","check":"%b' % tuple(
    bytes([KINDS | 1 << bit]) * width
    for bit, width in enumerate((_CREATED_WIDTH, _WRITER_WIDTH, _CHECK_WIDTH))
)
"""A plain file's variable fields, as :class:`vua.native.HeaderForm` has them."""
_UNNAMED: Final = re.compile("[^A-Za-z0-9 ./_+:-]")


def written_name(writer: str) -> str:
    """Return a writer's name as headers hold it: 48 characters."""
    return f"{_UNNAMED.sub('_', writer)[:_WRITER_WIDTH]:<{_WRITER_WIDTH}}"


class EntryCodec:
    """Writes and checks headers of one namespace's files of one shard. Immutable, thread-safe."""

    def __init__(self, namespace: str, layout: KVLayout, shard: Shard, kind: str = "") -> None:
        """Prepare for files of ``shard`` in the namespace with this name (64 hex digits).

        ``kind`` is the seal: AUTHENTIC, ENCRYPTED, or empty for plain files.
        """
        if kind not in ("", AUTHENTIC, ENCRYPTED):
            raise LayoutError(f"seal {kind!r:.40}: expected {AUTHENTIC!r} or {ENCRYPTED!r}")
        if not layout.full.contains(shard):
            raise LayoutError(f"shard {shard.name} lies outside the layout's {layout.full.name}")
        self.namespace, self.layout, self.shard, self.kind = namespace, layout, shard, kind
        self.blocks: int = len(layout.dims) * shard.heads * shard.checksum_blocks(layout)
        self._table_nbytes = (8 + TAG_NBYTES * bool(kind)) * self.blocks
        opening = f'{SEALED}","seal":"{kind}","dtype":"{layout.dtype}' if kind else FORMAT
        self._head = (
            f'{{"__metadata__":{{"format":"{opening}","namespace":"{namespace}",'
            f'"shard":"{shard.name}","layers":"{layout.layers}","kv_heads":"{layout.kv_heads}",'
            f'"prefix_hash":"'
        )
        self._tail = f'"}},{self._tensors()}}}'
        seal_info = SealInfo("0" * 16, "0" * 32) if kind else PLAIN
        width = len(self._middle(ChunkKey(b"", b"", 0, 0), seal_info.key_id)) + len(self._tail)
        text_nbytes = len(self._head) + width + len(self._variable(0, "", seal_info.nonce))
        self.header_nbytes: int = text_nbytes + 8 + self._table_nbytes
        padding = -self.header_nbytes % ALIGNMENT
        self.header_nbytes += padding
        """Bytes before the payload, a multiple of 4096: length, JSON, padding, checksums."""
        self.file_nbytes: int = self.header_nbytes + shard.payload_nbytes(layout)
        json_nbytes = text_nbytes + padding
        self._start = struct.pack("<Q", json_nbytes) + self._head.encode()
        self._end = self._tail.encode() + b" " * padding
        self.table_offset: int = 8 + json_nbytes
        """Offset of the checksums in the file; a sealed file's tags follow them."""
        self.writer_offset: int = text_nbytes + 8 - len(self._tail)
        self.writer_offset -= len(self._variable(0, "", seal_info.nonce)) - len(_BEFORE_WRITER)
        """Offset of the writer's name, 48 characters."""
        self.check_offset: int = 8 + text_nbytes - len(self._tail) - _CHECK_WIDTH
        """Offset of the header's self-check, 16 hexadecimal digits."""
        if self.header_nbytes > MAX_HEADER_NBYTES:
            nbytes = self.header_nbytes
            msg = f"{self.blocks} checksums need a header of {nbytes} bytes; limit 1 MiB"
            raise LayoutError(msg)

    def block_nbytes(self) -> list[int]:
        """Return the bytes that each checksum covers, in file order; blocks leave no gaps."""
        step, layers = self.layout.checksum_block_layers, self.shard.layers
        counts = [min(step, layers - first) for first in range(0, layers, step)]
        return [
            n * extent for extent in self.layout.extent_nbytes for n in counts * self.shard.heads
        ]

    def _tensors(self) -> str:
        layout, shard = self.layout, self.shard
        parts, offset = [], 0
        blocks = [len(layout.dims), shard.heads, shard.checksum_blocks(layout)]
        tables: list[tuple[str, str, list[int], int]] = [("checksums", "U64", blocks, 8)]
        if self.kind:
            tables.append(("tags", "U8", [*blocks, TAG_NBYTES], 1))
        opaque = self.kind == ENCRYPTED
        for name, dim in zip("kv", layout.dims, strict=False):
            size = ITEMSIZE[layout.dtype]
            shape = [shard.heads, shard.layers, layout.chunk_tokens, dim * size if opaque else dim]
            tables.append((name, "U8" if opaque else layout.dtype, shape, 1 if opaque else size))
        for name, dtype, shape, itemsize in tables:
            start, offset = offset, offset + math.prod(shape) * itemsize
            described = {"dtype": dtype, "shape": shape, "data_offsets": [start, offset]}
            parts.append(f'"{name}":{json.dumps(described, separators=(",", ":"))}')
        return ",".join(parts)

    @staticmethod
    def _middle(key: ChunkKey, key_id: str) -> str:
        sealed = f',"key":"{key_id}"' if key_id else ""
        return (
            f'{key.prefix_hash.hex() or NO_HASH}","parent":"{key.parent.hex() or NO_HASH}",'
            f'"tokens":"{key.start:010d}-{key.stop:010d}"{sealed}'
        )

    def expected(self, key: ChunkKey, key_id: str = "") -> bytes:
        """Return the canonical beginning of a file of ``key``, up to its variable fields."""
        return self._start + self._middle(key, key_id).encode()

    def form(self, keys: Sequence[ChunkKey]) -> HeaderForm:
        """Return what the headers of plain files of ``keys``, at least one, must be.

        Native code compares by it as :meth:`table_of` does.
        """
        return HeaderForm(
            self._start,
            [self._middle(key, "") for key in keys],
            self._end,
            variable=_VARIABLE_KINDS,
            kinds=_KINDS,
            check_offset=self.check_offset,
        )

    @staticmethod
    def _variable(created: int, writer: str, nonce: str = "") -> str:
        return (
            f',"created":"{created:0{_CREATED_WIDTH}d}",'
            f'"writer":"{written_name(writer)}",'
            + (f'"nonce":"{nonce}",' if nonce else "")
            + f'"check":"{_BLANK_CHECK.decode()}'
        )

    def blank_header(
        self,
        key: ChunkKey,
        *,
        writer: str = "",
        seal_info: SealInfo = PLAIN,
        tags: bytes = b"",
        created: int | None = None,
    ) -> bytes:
        """Return a header of ``key`` with zeros for all checksums and the self-check.

        The writer fills in the checksums at :attr:`table_offset`, then the xxh3-64 of the whole
        header at :attr:`check_offset`. Arguments as for :func:`vua.format.parse.encode_header`.
        """
        created = int(time.time()) if created is None else created
        variable = self._variable(created, writer, seal_info.nonce).encode()
        table = bytes(8 * self.blocks) + tags
        if len(table) != self._table_nbytes:
            raise LayoutError(f"expected {self.blocks} tags of 16 bytes, found {len(tags)} bytes")
        expected = self.expected(key, seal_info.key_id)
        return b"".join((expected, variable, self._end, table))

    def table_of(
        self, header: memoryview, key: ChunkKey, key_id: str = ""
    ) -> npt.NDArray[np.uint64] | None:
        """Return a file's checksums if its header is, byte for byte, the one of ``key``; else None.

        Args:
            header: the first ``header_nbytes`` bytes of the file.
        """
        expected = self.expected(key, key_id)
        stop = self.table_offset
        if (  # bytes(): comparing memoryviews goes element by element
            len(header) == self.header_nbytes
            and bytes(header[: len(expected)]) == expected
            and bytes(header[stop - len(self._end) : stop]) == self._end
            and _VARIABLE.fullmatch(header[len(expected) : stop - len(self._end)])
            and _self_check(header, stop - len(self._end))
        ):
            return np.frombuffer(header[stop : stop + 8 * self.blocks], dtype="<u8")
        return None

    def writer_of(self, header: memoryview) -> bytes:
        """Return the writer's name, 48 bytes, from a header that :meth:`table_of` accepted."""
        return bytes(header[self.writer_offset : self.writer_offset + _WRITER_WIDTH])

    def writers_of(self, headers: npt.NDArray[np.uint8]) -> set[bytes]:
        """Return the writers of headers ``[rows, header_nbytes]`` that native code accepted."""
        names = headers[:, self.writer_offset : self.writer_offset + _WRITER_WIDTH]
        return {*np.ascontiguousarray(names).view(f"V{_WRITER_WIDTH}").ravel().tolist()}

    def seal_of(self, header: memoryview) -> tuple[str, npt.NDArray[np.uint8]]:
        """Return nonce and tags ``[blocks, 16]`` of a sealed file that :meth:`table_of` accepted.

        Raises CorruptEntryError without a nonce.
        """
        stop = self.table_offset - len(self._end)
        found = _VARIABLE.search(header[len(self._start) : stop])
        if found is None or found[1] is None:
            raise CorruptEntryError("a sealed file without a nonce: it is damaged")
        tags = np.frombuffer(header[self.table_offset + 8 * self.blocks :], dtype=np.uint8)
        return found[1].decode(), tags.reshape(self.blocks, TAG_NBYTES)


def _self_check(header: memoryview, end: int) -> bool:
    start = end - _CHECK_WIDTH
    digest = xxhash.xxh3_64(header[:start])
    digest.update(_BLANK_CHECK)
    digest.update(header[end:])
    return digest.hexdigest().encode() == header[start:end]


_READ_NBYTES: Final = 256 << 10
"""Bytes per read before they are hashed, so they are still in cache; see docs/performance.md."""
_SMALL_NBYTES: Final = 512 << 10
"""Files up to this size are read by one call."""


def entry_plan(codec: EntryCodec, taken: Shard, target: Shard, segment_tokens: int) -> EntryPlan:
    """Plan how a rectangle moves between files of ``codec`` and memory.

    If the rectangle cuts through checksum blocks, it is widened to whole blocks. The extents
    outside of it go to the discard buffer and are read only to be verified.

    Args:
        codec: of the files; their shard contains ``taken``.
        target: the rectangle that the memory holds; it contains ``taken``.
        segment_tokens: consecutive tokens per memory segment; divides the chunk length.
    """
    layout, stored = codec.layout, codec.shard
    step, arrays = layout.checksum_block_layers, len(layout.dims)
    first = (taken.layer_start - stored.layer_start) // step * step
    last = min(stored.layers, -(-(taken.layer_stop - stored.layer_start) // step) * step)
    array, head, layer = (
        grid.ravel()
        for grid in np.meshgrid(
            range(arrays),
            np.arange(taken.head_start, taken.head_stop),
            np.arange(first, last),
            indexing="ij",
        )
    )
    extent_nbytes = np.array(layout.extent_nbytes, dtype=np.int64)
    array_starts = np.cumsum(extent_nbytes * stored.heads * stored.layers)
    array_starts = np.concatenate(([0], array_starts[:-1]))
    nbytes, stored_head = extent_nbytes[array], head - stored.head_start
    offset = array_starts[array] + (stored_head * stored.layers + layer) * nbytes
    place = (array * stored.heads + stored_head) * stored.checksum_blocks(layout) + layer // step
    starts = np.flatnonzero(np.diff(place, prepend=-1))
    in_model = layer + stored.layer_start
    inside = (in_model >= taken.layer_start) & (in_model < taken.layer_stop)
    segments = layout.chunk_tokens // segment_tokens
    discarded = np.where(inside, 0, nbytes)
    extents = np.zeros(len(array), dtype=EXTENT)
    extents["array"] = np.where(inside, array, ARRAYS_MAX)
    extents["head"] = head - target.head_start
    extents["layer"] = np.where(inside, in_model - target.layer_start, 0)
    extents["discard"] = (np.cumsum(discarded) - discarded) // segments
    extents["nbytes"] = nbytes // segments
    block_extent = np.append(starts, len(array)).astype(np.uint64)
    block_nbytes = np.add.reduceat(nbytes, starts)
    reads = _reads(codec.header_nbytes, block_extent, block_nbytes, offset[starts], segments)
    return EntryPlan(
        file_nbytes=codec.file_nbytes,
        header_nbytes=codec.header_nbytes,
        table_offset=codec.table_offset,
        reads=np.array(reads, dtype=READ),
        extents=extents,
        block_extent=block_extent,
        block_nbytes=block_nbytes.astype(np.uint64),
        block_place=place[starts].astype(np.uint64),
        segments=segments,
        discard_nbytes=int(discarded.sum()),
    )


def _reads(
    header_nbytes: int,
    block_extent: np.ndarray[tuple[int], np.dtype[np.uint64]],
    block_nbytes: np.ndarray[tuple[int], np.dtype[np.int64]],
    block_offset: np.ndarray[tuple[int], np.dtype[np.int64]],
    segments: int,
) -> list[tuple[int, ...]]:
    extents, largest = block_extent.tolist(), int(block_nbytes.max())
    whole = header_nbytes + int(block_nbytes.sum())
    limit = _READ_NBYTES if whole > _SMALL_NBYTES else _SMALL_NBYTES
    rows = max(stop - start for start, stop in pairwise(extents)) * segments
    limit = min(limit, max(1, (IOV_MAX - 1) // rows) * largest)
    gaps = np.flatnonzero(block_offset[1:] != (block_offset + block_nbytes)[:-1]) + 1
    reads: list[tuple[int, ...]] = []
    for begin, end in pairwise([0, *gaps.tolist(), len(block_nbytes)]):
        step = max(1, limit // int(block_nbytes[begin:end].max()))
        for block in range(begin, end, step):
            stop = min(block + step, end)
            nbytes = int(block_nbytes[block:stop].sum())
            at = header_nbytes + int(block_offset[block])
            reads.append((extents[block], extents[stop], 0, nbytes, at, block, stop))
    extent, extent_stop, _, nbytes, at, block, stop = reads[0]
    if at == header_nbytes:  # the first read includes the header
        reads[0] = (extent, extent_stop, 1, nbytes + header_nbytes, 0, block, stop)
    else:
        reads.insert(0, (0, 0, 1, header_nbytes, 0, 0, 0))
    return reads
