"""The bytes of one file: one shard of one chunk, as a safetensors file that proves what it is.

::

    [u64 header length][JSON header, space padded][checksums][k][v]
                                                             ^ 4 KiB boundary

The header is *canonical*: for a given namespace, layout, shard and chunk every byte is known in
advance except four fixed-width fields (creation time, writer, self-check) and the checksums. A
reader compares bytes instead of trusting a parser, so a file can never make it believe or allocate
anything. :mod:`vua.format.parse` is the other way in, for who does not know what to expect.

A *sealed* file (:mod:`vua.security.seal`) has tags of a secret key behind its checksums, and three
more fields. Its K and V may be encrypted, which changes neither their length nor their place.
`docs/format.md` is the specification. Pure functions over buffers; no I/O here.
"""

from __future__ import annotations

import json
import math
import re
import struct
import time
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from vua.errors import CorruptEntryError, LayoutError
from vua.format.header import (
    AUTHENTIC,
    ENCRYPTED,
    FORMAT,
    MAX_HEADER_NBYTES,
    NO_HASH,
    PLAIN,
    SEALED,
    SEALED_V1,
    TAG_NBYTES,
    SealInfo,
)
from vua.format.keys import ChunkKey
from vua.format.layout import ITEMSIZE, KVLayout, Shard

__all__ = ["FORMAT", "EntryCodec", "written_name"]

ALIGNMENT: Final = 4096  # O_DIRECT and GPU-direct reads start at a page
_WRITER_WIDTH: Final = 48
_CREATED_WIDTH: Final = 10  # seconds since 1970, good until the year 2286
_CHECK_WIDTH: Final = 16
_BLANK_CHECK: Final = b"0" * _CHECK_WIDTH
_BEFORE_WRITER: Final = ',"created":"0123456789","writer":"'
_VARIABLE: Final = re.compile(
    rb',"created":"\d{10}","writer":"[\w ./+:-]{48}"(?:,"nonce":"([0-9a-f]{32})")?'
    rb',"check":"[0-9a-f]{16}'
)
_UNNAMED: Final = re.compile("[^A-Za-z0-9 ./_+:-]")


def written_name(writer: str) -> str:
    """Return a writer's name as it stands in a header: 48 characters."""
    return f"{_UNNAMED.sub('_', writer)[:_WRITER_WIDTH]:<{_WRITER_WIDTH}}"


class EntryCodec:
    """Writes and checks headers of one namespace's files of one shard. Immutable, thread-safe."""

    def __init__(self, namespace: str, layout: KVLayout, shard: Shard, kind: str = "") -> None:
        """Prepare for files of ``shard`` below the directory named ``namespace`` (64 hex).

        ``kind`` is the seal's: AUTHENTIC, ENCRYPTED, or nothing for plain files.
        """
        if kind not in ("", AUTHENTIC, ENCRYPTED):
            msg = f"seal {kind!r:.40}: expected {AUTHENTIC!r} or {ENCRYPTED!r}"
            raise LayoutError(msg)
        if not layout.full.contains(shard):
            msg = f"shard {shard.name} lies outside the layout's {layout.full.name}"
            raise LayoutError(msg)
        self.namespace, self.layout, self.shard, self.kind = namespace, layout, shard, kind
        self.blocks: int = len(layout.dims) * shard.heads * shard.checksum_blocks(layout)
        """Checksum blocks of a file: the number of its checksums."""
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
        """Bytes of a whole file."""
        json_nbytes = text_nbytes + padding
        self._start = struct.pack("<Q", json_nbytes) + self._head.encode()
        self._start_v1 = self._start.replace(SEALED.encode(), SEALED_V1.encode(), 1)
        self._end = self._tail.encode() + b" " * padding
        self.table_offset: int = 8 + json_nbytes
        """Where in the file the checksums begin; the tags of a sealed one follow them."""
        self.writer_offset: int = text_nbytes + 8 - len(self._tail)
        self.writer_offset -= len(self._variable(0, "", seal_info.nonce)) - len(_BEFORE_WRITER)
        """Where in the file the name of its writer stands, 48 characters."""
        self.check_offset: int = 8 + text_nbytes - len(self._tail) - _CHECK_WIDTH
        """Where in the file its header's check of itself stands, 16 hexadecimal digits."""
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
        """The chunk's own part of the header, always of the same width."""
        sealed = f',"key":"{key_id}"' if key_id else ""
        return (
            f'{key.prefix_hash.hex() or NO_HASH}","parent":"{key.parent.hex() or NO_HASH}",'
            f'"tokens":"{key.start:010d}-{key.stop:010d}"{sealed}'
        )

    def expected(self, key: ChunkKey, key_id: str = "", sealed: str = SEALED) -> bytes:
        """Return what a file of ``key`` begins with: all that it is, before what varies.

        ``sealed`` is the version of a sealed file's format.
        """
        start = self._start_v1 if sealed == SEALED_V1 else self._start
        return start + self._middle(key, key_id).encode()

    @staticmethod
    def _variable(created: int, writer: str, nonce: str = "") -> str:
        """The part that a reader does not compare, always of the same width."""
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
        """Return a header of ``key`` with zeros for all checksums and the check.

        Who writes fills in the checksums at :attr:`table_offset`, and then the xxh3-64 of it all at
        :attr:`check_offset`. The arguments: :func:`vua.format.parse.encode_header`.
        """
        created = int(time.time()) if created is None else created
        variable = self._variable(created, writer, seal_info.nonce).encode()
        table = bytes(8 * self.blocks) + tags
        if len(table) != self._table_nbytes:
            msg = f"expected {self.blocks} tags of 16 bytes, found {len(tags)} bytes"
            raise LayoutError(msg)
        expected = self.expected(key, seal_info.key_id, seal_info.format)
        return b"".join((expected, variable, self._end, table))

    def table_of(
        self, header: memoryview, key: ChunkKey, key_id: str = ""
    ) -> npt.NDArray[np.uint64] | None:
        """Return the checksums of a file that is, byte for byte, the entry of ``key``, else None.

        Args:
            header: the first ``header_nbytes`` bytes of the file.
            key: the chunk that was asked for.
            key_id: with which key a sealed file has to be sealed.
        """
        expected = self.expected(key, key_id, self.format_of(header))
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

    def format_of(self, header: memoryview) -> str:
        """Return which version of the sealed format a header claims; means nothing of a plain one.

        >>> layout = KVLayout(1, 1, 8, 8, "BF16", 4)
        >>> EntryCodec("ab" * 32, layout, layout.full).format_of(memoryview(b""))
        'vua.sealed.v2'
        """
        is_first = self.kind and bytes(header[: len(self._start_v1)]) == self._start_v1
        return SEALED_V1 if is_first else SEALED

    def writer_of(self, header: memoryview) -> bytes:
        """Return the writer's name, 48 bytes, of a header that :meth:`table_of` takes."""
        return bytes(header[self.writer_offset : self.writer_offset + _WRITER_WIDTH])

    def seal_of(self, header: memoryview) -> tuple[str, npt.NDArray[np.uint8]]:
        """Return nonce and tags ``[blocks, 16]`` of a sealed file; :meth:`table_of` comes first.

        Raises CorruptEntryError when there is no nonce.
        """
        stop = self.table_offset - len(self._end)
        found = _VARIABLE.search(header[len(self._start) : stop])
        if found is None or found[1] is None:
            msg = "a sealed file without a nonce: it is damaged"
            raise CorruptEntryError(msg)
        tags = np.frombuffer(header[self.table_offset + 8 * self.blocks :], dtype=np.uint8)
        return found[1].decode(), tags.reshape(self.blocks, TAG_NBYTES)


def _self_check(header: memoryview, end: int) -> bool:
    """Whether the self-check, whose digits end at ``end``, is that of the header around it."""
    start = end - _CHECK_WIDTH
    digest = xxhash.xxh3_64(header[:start])
    digest.update(_BLANK_CHECK)
    digest.update(header[end:])
    return digest.hexdigest().encode() == header[start:end]
