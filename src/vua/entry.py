"""The bytes of one file: one shard of one chunk, as a safetensors file that proves what it is.

::

    [u64 header length][JSON header, space padded][checksums][k][v]
                                                             ^ 4 KiB boundary

The header is *canonical*: for a given namespace, layout, shard and chunk every byte is known in
advance except four fixed-width fields (creation time, writer, self-check) and the checksums. A
reader compares bytes instead of trusting a parser, so a file can never make it believe or allocate
anything. :func:`parse_entry` is the other way in, for tools that do not know what to expect.
`docs/format.md` is the specification. Pure functions over buffers; no I/O here.
"""

from __future__ import annotations

import functools
import json
import re
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from vua.errors import CorruptEntryError, ForeignEntryError, LayoutError
from vua.keys import ChunkKey
from vua.layout import KVLayout, Shard

__all__ = ["FORMAT", "EntryCodec", "EntryInfo", "parse_entry"]

FORMAT: Final = "vua.entry.v1"
ALIGNMENT: Final = 4096  # O_DIRECT and GPU-direct reads start at a page
MAX_HEADER_NBYTES: Final = 1 << 20
"""Larger than any real header: 1 MiB of checksums are 131,072 runs."""

_WRITER_WIDTH: Final = 48
_CREATED_WIDTH: Final = 10  # seconds since 1970, good until the year 2286
_CHECK_WIDTH: Final = 16
_NO_HASH: Final = "-" * 64
_VARIABLE: Final = re.compile(
    rb',"created":"\d{10}","writer":"[\w ./+:-]{48}","check":"[0-9a-f]{16}'
)
_UNNAMED: Final = re.compile("[^A-Za-z0-9 ./_+:-]")
_HEX_DIGITS: Final = frozenset("0123456789abcdef")


def _pad(nbytes: int, to: int) -> int:
    return -nbytes % to


class EntryCodec:
    """Writes and checks headers of one namespace's files of one shard. Immutable, thread-safe."""

    def __init__(self, namespace: str, layout: KVLayout, shard: Shard) -> None:
        """Prepare for files of ``shard`` below the directory named ``namespace`` (64 hex)."""
        if not layout.full.contains(shard):
            msg = f"shard {shard.name} lies outside the layout's {layout.full.name}"
            raise LayoutError(msg)
        self.namespace, self.layout, self.shard = namespace, layout, shard
        self.units: int = len(layout.dims) * shard.heads * shard.units(layout)
        """Number of checksums in a file."""
        self._table_nbytes = 8 * self.units
        self._head = (
            f'{{"__metadata__":{{"format":"{FORMAT}","namespace":"{namespace}",'
            f'"shard":"{shard.name}","layers":"{layout.layers}","kv_heads":"{layout.kv_heads}",'
            f'"prefix_hash":"'
        )
        self._tail = f'"}},{self._tensors()}}}'
        width = len(self._middle(ChunkKey(b"", b"", 0, 0))) + len(self._tail)
        text_nbytes = len(self._head) + width + len(self._variable(0, "", 0))
        self.header_nbytes: int = text_nbytes + 8 + self._table_nbytes
        padding = _pad(self.header_nbytes, ALIGNMENT)
        self.header_nbytes += padding
        """Bytes before the payload, a multiple of 4096: length, JSON, padding, checksums."""
        self.file_nbytes: int = self.header_nbytes + shard.payload_nbytes(layout)
        """Bytes of a whole file."""
        json_nbytes = text_nbytes + padding
        self._start = struct.pack("<Q", json_nbytes) + self._head.encode()
        self._end = self._tail.encode() + b" " * padding
        self.table_offset: int = 8 + json_nbytes
        """Where in the file the checksums begin."""
        if self.header_nbytes > MAX_HEADER_NBYTES:
            msg = f"{self.units} checksums need a header of {self.header_nbytes} bytes; limit 1 MiB"
            raise LayoutError(msg)

    def unit_nbytes(self) -> list[int]:
        """Return the bytes that each checksum covers, in file order; units leave no gaps."""
        step, layers = self.layout.unit_layers, self.shard.layers
        counts = [min(step, layers - first) for first in range(0, layers, step)]
        return [n * run for run in self.layout.run_nbytes for n in counts * self.shard.heads]

    def _tensors(self) -> str:
        layout, shard = self.layout, self.shard
        parts, offset = [], self._table_nbytes
        arrays = ["checksums", "k", "v"][: 1 + len(layout.dims)]
        tables: list[tuple[str, list[int], int]] = [
            ("U64", [len(layout.dims), shard.heads, shard.units(layout)], 0)
        ]
        for dim, run in zip(layout.dims, layout.run_nbytes, strict=True):
            shape = [shard.heads, shard.layers, layout.chunk_tokens, dim]
            tables.append((layout.dtype, shape, shard.heads * shard.layers * run))
        for name, (dtype, shape, nbytes) in zip(arrays, tables, strict=True):
            start, offset = (0, offset) if name == "checksums" else (offset, offset + nbytes)
            described = {"dtype": dtype, "shape": shape, "data_offsets": [start, offset]}
            parts.append(f'"{name}":{json.dumps(described, separators=(",", ":"))}')
        return ",".join(parts)

    @staticmethod
    def _middle(key: ChunkKey) -> str:
        """The chunk's own part of the header, always of the same width."""
        return (
            f'{key.prefix_hash.hex() or _NO_HASH}","parent":"{key.parent.hex() or _NO_HASH}",'
            f'"tokens":"{key.start:010d}-{key.stop:010d}"'
        )

    @staticmethod
    def _variable(created: int, writer: str, check: int) -> str:
        """The part that a reader does not compare, always of the same width."""
        named = _UNNAMED.sub("_", writer)
        return (
            f',"created":"{created:0{_CREATED_WIDTH}d}",'
            f'"writer":"{named[:_WRITER_WIDTH]:<{_WRITER_WIDTH}}",'
            f'"check":"{check:0{_CHECK_WIDTH}x}'
        )

    def encode_header(
        self, key: ChunkKey, checksums: npt.NDArray[np.uint64], *, writer: str = ""
    ) -> bytes:
        """Return the ``header_nbytes`` bytes that stand before the payload of ``key``'s file.

        Args:
            key: the chunk.
            checksums: xxh3-64 of each unit, ``[units]`` in file order.
            writer: who writes (library version, host), for people to read; cut at 48 characters.
        """
        table = np.ascontiguousarray(checksums, dtype="<u8").tobytes()
        if len(table) != self._table_nbytes:
            msg = f"expected {self.units} checksums, found {len(table) // 8}"
            raise LayoutError(msg)
        created = int(time.time())

        def text(check: int) -> bytes:
            variable = self._middle(key) + self._variable(created, writer, check)
            return b"".join((self._start, variable.encode(), self._end, table))

        return text(xxhash.xxh3_64_intdigest(text(0)))

    def check_header(self, header: memoryview, key: ChunkKey) -> npt.NDArray[np.uint64]:
        """Return the checksums of a file that is, byte for byte, the entry of ``key``.

        Args:
            header: the first ``header_nbytes`` bytes of the file.
            key: the chunk that was asked for.

        Raises:
            CorruptEntryError: the header is damaged.
            ForeignEntryError: it is sound, but of another chunk, shard, layout or namespace.
        """
        expected = self._start + self._middle(key).encode()
        stop = self.table_offset
        if (  # bytes(): comparing memoryviews goes element by element
            len(header) == self.header_nbytes
            and bytes(header[: len(expected)]) == expected
            and bytes(header[stop - len(self._end) : stop]) == self._end
            and _VARIABLE.fullmatch(header[len(expected) : stop - len(self._end)])
        ):
            return np.frombuffer(header[stop:], dtype="<u8")
        found = parse_entry(bytes(header))  # raises CorruptEntryError
        msg = (
            f"expected chunk {key.name[:12]} shard {self.shard.name} of namespace "
            f"{self.namespace[:12]}, found chunk {found.prefix_hash[:12]} shard "
            f"{found.shard.name} of namespace {found.namespace[:12]}; it will be treated as a miss"
        )
        foreign = ForeignEntryError(msg)
        asked = (self.namespace, key.name, self.shard)
        foreign.misplaced = (found.namespace, found.prefix_hash, found.shard) != asked
        raise foreign


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """What a file says about itself, read without knowing what to expect."""

    namespace: str
    prefix_hash: str
    parent: str
    """Hex of the parent digest, or empty for a first chunk."""
    start: int
    stop: int
    shard: Shard
    layout: KVLayout
    created: int
    """Seconds since 1970 by the writer's clock."""
    writer: str
    header_nbytes: int
    file_nbytes: int
    checksums: npt.NDArray[np.uint64]

    @property
    def key(self) -> ChunkKey:
        """The chunk's key as the file states it."""
        return ChunkKey(
            bytes.fromhex(self.prefix_hash), bytes.fromhex(self.parent), self.start, self.stop
        )

    @property
    def codec(self) -> EntryCodec:
        """The codec of its file."""
        return _codec(self.namespace, self.layout, self.shard)


def parse_entry(data: bytes) -> EntryInfo:
    """Read a file's header without knowing the chunk: for tools, and to explain a mismatch.

    Args:
        data: at least the whole header; more is ignored. Nothing is allocated by its claims.

    Raises:
        CorruptEntryError: anything but a header that :meth:`EntryCodec.encode_header` wrote, with
            what was found and expected.
    """
    header, payload_at = _json_header(data)
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        found = metadata.get("format") if isinstance(metadata, dict) else None
        msg = f"format {found!r:.40}, expected {FORMAT!r}: not a VUA entry of this version"
        raise CorruptEntryError(msg)
    try:
        key, shard, layout = _claims(metadata, header)
        codec = _codec(str(metadata["namespace"]), layout, shard)
        created, writer = int(metadata["created"]), str(metadata["writer"]).rstrip()
        table = np.frombuffer(data[codec.table_offset : codec.header_nbytes], dtype="<u8")
        check = int(metadata["check"], 16)
        again = _with_check(codec, key, metadata, table)
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
        checksums=table,
    )


@functools.lru_cache(maxsize=16)
def _codec(namespace: str, layout: KVLayout, shard: Shard) -> EntryCodec:
    """A codec for tools, which look at many files of one kind in a row."""
    return EntryCodec(namespace, layout, shard)


def _json_header(data: bytes) -> tuple[Mapping[str, Any], int]:
    """The JSON object at the start of a safetensors file, and where its data section begins."""
    if len(data) < 8:
        msg = f"{len(data)} bytes are no safetensors header: the file was cut short"
        raise CorruptEntryError(msg)
    (nbytes,) = struct.unpack_from("<Q", data)
    if nbytes > MAX_HEADER_NBYTES or 8 + nbytes > len(data):
        msg = f"header claims {nbytes} bytes, {len(data) - 8} are there, the limit is 1 MiB"
        raise CorruptEntryError(msg)
    try:
        header = json.loads(data[8 : 8 + nbytes].decode())
    except (ValueError, RecursionError) as problem:
        msg = f"header is not JSON: {problem!r:.120}"
        raise CorruptEntryError(msg) from problem
    if not isinstance(header, dict):
        msg = f"header is a JSON {type(header).__name__}, expected an object"
        raise CorruptEntryError(msg)
    return header, 8 + nbytes


def _claims(
    metadata: Mapping[str, Any], header: Mapping[str, Any]
) -> tuple[ChunkKey, Shard, KVLayout]:
    """The key, shard and layout that header fields state; raises on anything ill-typed."""
    shard = Shard.parse(metadata["shard"])
    if shard is None:
        msg = f"shard {metadata['shard']!r:.40}"
        raise ValueError(msg)
    start, _, stop = metadata["tokens"].partition("-")
    parent = metadata["parent"]
    key = ChunkKey(
        bytes.fromhex(metadata["prefix_hash"]),
        b"" if parent == _NO_HASH else bytes.fromhex(parent),
        int(start),
        int(stop),
    )
    k_shape = header["k"]["shape"]
    layout = KVLayout(
        layers=int(metadata["layers"]),
        kv_heads=int(metadata["kv_heads"]),
        k_dim=int(k_shape[3]),
        v_dim=int(header["v"]["shape"][3]) if "v" in header else 0,
        dtype=header["k"]["dtype"],
        chunk_tokens=int(k_shape[2]),
        group=shard.group,
    )
    digests = metadata["prefix_hash"], metadata["namespace"], key.parent.hex() or _NO_HASH
    place, odd = divmod(key.start, layout.chunk_tokens)
    if (
        not all(len(digest) == len(_NO_HASH) for digest in digests)
        or not set(metadata["namespace"]) <= _HEX_DIGITS
        or (odd, key.stop - key.start) != (0, layout.chunk_tokens)
        or (place and not key.parent)
        or Shard.parse(layout.full.name) is None
    ):
        msg = "digests, token range or layout are of the wrong form"
        raise ValueError(msg)
    return key, shard, layout


def _with_check(
    codec: EntryCodec, key: ChunkKey, metadata: Mapping[str, Any], table: npt.NDArray[np.uint64]
) -> bytes:
    """The header that the parsed fields would give, with a freshly computed self-check."""
    created, writer = int(metadata["created"]), str(metadata["writer"])
    fields = [
        codec._middle(key) + codec._variable(created, writer, check)
        for check in (0, int(metadata["check"], 16))
    ]
    blank = b"".join((codec._start, fields[0].encode(), codec._end, table.tobytes()))
    if xxhash.xxh3_64_intdigest(blank) != int(metadata["check"], 16):
        msg = "self-check of the header fails"
        raise ValueError(msg)
    return b"".join((codec._start, fields[1].encode(), codec._end, table.tobytes()))
