"""The bytes of one file: one shard of one chunk, as a safetensors file that proves what it is.

::

    [u64 header length][JSON header, space padded][checksums][k][v]
                                                             ^ 4 KiB boundary

The header is *canonical*: for a given namespace, layout, shard and chunk every byte is known in
advance except four fixed-width fields (creation time, writer, self-check) and the checksums. A
reader compares bytes instead of trusting a parser, so a file can never make it believe or allocate
anything. :func:`parse_entry` is the other way in, for tools that do not know what to expect.

A *sealed* file (:mod:`vua.security.seal`) has tags of a secret key behind its checksums, and three
more fields. Its K and V may be encrypted, which changes neither their length nor their place.
`docs/format.md` is the specification. Pure functions over buffers; no I/O here.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import struct
import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from vua.errors import CorruptEntryError, ForeignEntryError, LayoutError
from vua.format.header import (
    AUTHENTIC,
    ENCRYPTED,
    FORMAT,
    MAX_HEADER_NBYTES,
    NO_HASH,
    PLAIN,
    SEALED,
    TAG_NBYTES,
    EntryInfo,
    Mark,
    claims,
    json_header,
)
from vua.format.keys import ChunkKey
from vua.format.layout import ITEMSIZE, KVLayout, Shard
from vua.native import digests_of

__all__ = ["FORMAT", "EntryCodec", "EntryInfo", "codec_of", "parse_entry"]

ALIGNMENT: Final = 4096  # O_DIRECT and GPU-direct reads start at a page
_WRITER_WIDTH: Final = 48
_CREATED_WIDTH: Final = 10  # seconds since 1970, good until the year 2286
_CHECK_WIDTH: Final = 16
_BLANK_CHECK: Final = b"0" * _CHECK_WIDTH
_VARIABLE: Final = re.compile(
    rb',"created":"\d{10}","writer":"[\w ./+:-]{48}"(?:,"nonce":"([0-9a-f]{32})")?'
    rb',"check":"[0-9a-f]{16}'
)
_UNNAMED: Final = re.compile("[^A-Za-z0-9 ./_+:-]")


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
        self.units: int = len(layout.dims) * shard.heads * shard.units(layout)
        """Number of checksums in a file."""
        self._table_nbytes = (8 + TAG_NBYTES * bool(kind)) * self.units
        opening = f'{SEALED}","seal":"{kind}","dtype":"{layout.dtype}' if kind else FORMAT
        self._head = (
            f'{{"__metadata__":{{"format":"{opening}","namespace":"{namespace}",'
            f'"shard":"{shard.name}","layers":"{layout.layers}","kv_heads":"{layout.kv_heads}",'
            f'"prefix_hash":"'
        )
        self._tail = f'"}},{self._tensors()}}}'
        mark = Mark("0" * 16, "0" * 32) if kind else PLAIN
        width = len(self._middle(ChunkKey(b"", b"", 0, 0), mark.key_id)) + len(self._tail)
        text_nbytes = len(self._head) + width + len(self._variable(0, "", 0, mark.nonce))
        self.header_nbytes: int = text_nbytes + 8 + self._table_nbytes
        padding = -self.header_nbytes % ALIGNMENT
        self.header_nbytes += padding
        """Bytes before the payload, a multiple of 4096: length, JSON, padding, checksums."""
        self.file_nbytes: int = self.header_nbytes + shard.payload_nbytes(layout)
        """Bytes of a whole file."""
        json_nbytes = text_nbytes + padding
        self._start = struct.pack("<Q", json_nbytes) + self._head.encode()
        self._end = self._tail.encode() + b" " * padding
        self.table_offset: int = 8 + json_nbytes
        """Where in the file the checksums begin; the tags of a sealed one follow them."""
        self.check_offset: int = 8 + text_nbytes - len(self._tail) - _CHECK_WIDTH
        """Where in the file its header's check of itself stands, 16 hexadecimal digits."""
        if self.header_nbytes > MAX_HEADER_NBYTES:
            msg = f"{self.units} checksums need a header of {self.header_nbytes} bytes; limit 1 MiB"
            raise LayoutError(msg)

    def unit_nbytes(self) -> list[int]:
        """Return the bytes that each checksum covers, in file order; units leave no gaps."""
        step, layers = self.layout.unit_layers, self.shard.layers
        counts = [min(step, layers - first) for first in range(0, layers, step)]
        return [n * run for run in self.layout.run_nbytes for n in counts * self.shard.heads]

    def checksums(self, payload: npt.NDArray[np.uint8]) -> list[int]:
        """Return the xxh3-64 of each unit of a whole payload that lies in one piece."""
        edges = [0, *itertools.accumulate(self.unit_nbytes())]
        view = memoryview(payload.data)
        return digests_of([view[a:b]] for a, b in itertools.pairwise(edges))

    def _tensors(self) -> str:
        layout, shard = self.layout, self.shard
        parts, offset = [], 0
        units = [len(layout.dims), shard.heads, shard.units(layout)]
        tables: list[tuple[str, str, list[int], int]] = [("checksums", "U64", units, 8)]
        if self.kind:
            tables.append(("tags", "U8", [*units, TAG_NBYTES], 1))
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

    def expected(self, key: ChunkKey, key_id: str = "") -> bytes:
        """Return what a file of ``key`` begins with: all that it is, before what varies."""
        return self._start + self._middle(key, key_id).encode()

    @staticmethod
    def _variable(created: int, writer: str, check: int, nonce: str = "") -> str:
        """The part that a reader does not compare, always of the same width."""
        named = _UNNAMED.sub("_", writer)
        return (
            f',"created":"{created:0{_CREATED_WIDTH}d}",'
            f'"writer":"{named[:_WRITER_WIDTH]:<{_WRITER_WIDTH}}",'
            + (f'"nonce":"{nonce}",' if nonce else "")
            + f'"check":"{check:0{_CHECK_WIDTH}x}'
        )

    def encode_header(
        self,
        key: ChunkKey,
        checksums: npt.NDArray[np.uint64],
        *,
        writer: str = "",
        mark: Mark = PLAIN,
        tags: bytes = b"",
    ) -> bytes:
        """Return the ``header_nbytes`` bytes that stand before the payload of ``key``'s file.

        Args:
            key: the chunk.
            checksums: xxh3-64 of each unit, ``[units]`` in file order.
            writer: who writes (library version, host), for people to read; cut at 48 characters.
            mark: of a sealed file, which key, and what this file's own key is made with.
            tags: of a sealed file, 16 bytes for each unit in file order.
        """
        table = np.ascontiguousarray(checksums, dtype="<u8").tobytes() + tags
        if len(table) != self._table_nbytes:
            msg = f"expected {self.units} checksums, found {len(checksums)}"
            if self.kind:
                msg += f", and as many tags of 16 bytes, found {len(tags)} bytes"
            raise LayoutError(msg)
        created = int(time.time())

        def text(check: int) -> bytes:
            variable = self._variable(created, writer, check, mark.nonce)
            return b"".join((self.expected(key, mark.key_id), variable.encode(), self._end, table))

        return text(xxhash.xxh3_64_intdigest(text(0)))

    def blank_header(
        self, key: ChunkKey, *, writer: str = "", mark: Mark = PLAIN, tags: bytes = b""
    ) -> bytes:
        """Return a header of ``key`` with zeros for all checksums and the check.

        Who fills in the checksums at :attr:`table_offset`, and then the xxh3-64 of it all at
        :attr:`check_offset`, has what :meth:`encode_header` returns. The arguments are its.
        """
        variable = self._variable(int(time.time()), writer, 0, mark.nonce).encode()
        table = bytes(8 * self.units) + tags
        if len(table) != self._table_nbytes:
            msg = f"expected {self.units} tags of 16 bytes, found {len(tags)} bytes"
            raise LayoutError(msg)
        return b"".join((self.expected(key, mark.key_id), variable, self._end, table))

    def check_header(
        self, header: memoryview, key: ChunkKey, key_id: str = ""
    ) -> npt.NDArray[np.uint64]:
        """Return the checksums of a file that is, byte for byte, the entry of ``key``.

        Args:
            header: the first ``header_nbytes`` bytes of the file.
            key: the chunk that was asked for.
            key_id: with which key a sealed file has to be sealed.

        Raises:
            CorruptEntryError: the header is damaged.
            ForeignEntryError: it is sound, but of another chunk, shard, layout or namespace.
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
            return np.frombuffer(header[stop : stop + 8 * self.units], dtype="<u8")
        found = parse_entry(bytes(header))  # raises CorruptEntryError
        msg = (
            f"expected chunk {key.name[:12]} shard {self.shard.name} of namespace "
            f"{self.namespace[:12]}, found chunk {found.prefix_hash[:12]} shard "
            f"{found.shard.name} of namespace {found.namespace[:12]}; it will be treated as a miss"
        )
        foreign = ForeignEntryError(msg)
        asked = (self.namespace, key.name, self.shard, self.kind, key_id)
        there = (found.namespace, found.prefix_hash, found.shard, found.kind, found.mark.key_id)
        foreign.misplaced = there != asked
        raise foreign

    def seal_of(self, header: memoryview) -> tuple[str, npt.NDArray[np.uint8]]:
        """Return nonce and tags ``[units, 16]`` of a sealed file; :meth:`check_header` comes first.

        Raises CorruptEntryError when there is no nonce.
        """
        stop = self.table_offset - len(self._end)
        found = _VARIABLE.search(header[len(self._start) : stop])
        if found is None or found[1] is None:
            msg = "a sealed file without a nonce: it is damaged"
            raise CorruptEntryError(msg)
        tags = np.frombuffer(header[self.table_offset + 8 * self.units :], dtype=np.uint8)
        return found[1].decode(), tags.reshape(self.units, TAG_NBYTES)


def _self_check(header: memoryview, end: int) -> bool:
    """Whether the self-check, whose digits end at ``end``, is that of the header around it."""
    start = end - _CHECK_WIDTH
    digest = xxhash.xxh3_64(header[:start])
    digest.update(_BLANK_CHECK)
    digest.update(header[end:])
    return digest.hexdigest().encode() == header[start:end]


def parse_entry(data: bytes) -> EntryInfo:
    """Read a file's header without knowing the chunk: for tools, and to explain a mismatch.

    Args:
        data: at least the whole header; more is ignored. Nothing is allocated by its claims.

    Raises:
        CorruptEntryError: anything but a header that :meth:`EntryCodec.encode_header` wrote, with
            what was found and expected.
    """
    header, payload_at = json_header(data)
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.get("format") not in (FORMAT, SEALED):
        found = metadata.get("format") if isinstance(metadata, dict) else None
        msg = f"format {found!r:.40}, expected {FORMAT!r}: not a VUA entry of this version"
        raise CorruptEntryError(msg)
    try:
        kind = metadata["seal"] if metadata["format"] == SEALED else ""
        mark = Mark(metadata["key"], metadata["nonce"]) if kind else PLAIN
        key, shard, layout = claims(metadata, header, mark)
        codec = _codec(str(metadata["namespace"]), layout, shard, kind)
        created, writer = int(metadata["created"]), str(metadata["writer"]).rstrip()
        table = data[codec.table_offset : codec.header_nbytes]
        check = int(metadata["check"], 16)
        again = _with_check(codec, key, metadata, table, mark)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as problem:
        msg = f"header fields are not those of a VUA entry: {problem!r:.200}"
        raise CorruptEntryError(msg) from problem
    if payload_at + codec._table_nbytes != codec.header_nbytes or again != bytes(
        data[: codec.header_nbytes]
    ):
        msg = f"header differs from what its own fields demand (check {check:016x}): it is damaged"
        raise CorruptEntryError(msg)
    return EntryInfo(
        namespace=codec.namespace,
        prefix_hash=key.prefix_hash.hex(),
        parent=key.parent.hex(),
        start=key.start,
        stop=key.stop,
        shard=shard,
        layout=layout,
        created=created,
        writer=writer,
        header_nbytes=codec.header_nbytes,
        file_nbytes=codec.file_nbytes,
        checksums=np.frombuffer(table[: 8 * codec.units], dtype="<u8"),
        kind=kind,
        mark=mark,
    )


def codec_of(info: EntryInfo) -> EntryCodec:
    """Return the codec of the file that says this about itself."""
    return _codec(info.namespace, info.layout, info.shard, info.kind)


@functools.lru_cache(maxsize=16)
def _codec(namespace: str, layout: KVLayout, shard: Shard, kind: str) -> EntryCodec:
    """A codec for tools, which look at many files of one kind in a row."""
    return EntryCodec(namespace, layout, shard, kind)


def _with_check(
    codec: EntryCodec, key: ChunkKey, metadata: Mapping[str, Any], table: bytes, mark: Mark
) -> bytes:
    """The header that the parsed fields would give, with a freshly computed self-check."""
    created, writer = int(metadata["created"]), str(metadata["writer"])
    blank, whole = (
        b"".join(
            (
                codec.expected(key, mark.key_id),
                codec._variable(created, writer, check, mark.nonce).encode(),
                codec._end,
                table,
            )
        )
        for check in (0, int(metadata["check"], 16))
    )
    if xxhash.xxh3_64_intdigest(blank) != int(metadata["check"], 16):
        msg = "self-check of the header fails"
        raise ValueError(msg)
    return whole
