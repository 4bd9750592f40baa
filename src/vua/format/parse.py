"""Headers of unknown files: for tools, and to explain why an entry was refused.

No length, number or name in a header is used before it is checked. Then the header is built anew
from what was found, and compared. Pure functions over bytes. A reader that knows the chunk uses
:meth:`vua.format.entry.EntryCodec.table_of` instead.

:func:`mismatch` and :func:`check_payload` make the errors for an entry that is another one, or
whose bytes do not match its header.
"""

from __future__ import annotations

import functools
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vua.errors import CorruptEntryError, EntryError, ForeignEntryError, LayoutError
from vua.format.entry import (
    ENCRYPTED,
    FORMAT,
    MAX_HEADER_NBYTES,
    NO_HASH,
    PLAIN,
    SEALED,
    EntryCodec,
    SealInfo,
)
from vua.format.keys import ChunkKey
from vua.format.layout import ITEMSIZE, KVLayout, Shard
from vua.native import fill_check

_FORMATS: Final = (FORMAT, SEALED)
_FORMATS_SAID: Final = tuple(f'"format":"{one}"'.encode() for one in _FORMATS)
_PARENT: Final = b'","parent":"'
_TOKENS: Final = b'","tokens":"'
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_SEAL_INFO: Final = re.compile(r"[0-9a-f]{16} [0-9a-f]{32}| ")


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
    kind: str = ""
    """A sealed file's kind of seal."""
    seal_info: SealInfo = PLAIN

    def check_length(self, nbytes: int) -> None:
        """Raise CorruptEntryError if the file has another length than its header says."""
        if nbytes != self.file_nbytes:
            raise CorruptEntryError(f"{nbytes} bytes long, expected {self.file_nbytes}")

    @property
    def key(self) -> ChunkKey:
        """The chunk's key as the file states it."""
        return ChunkKey(
            bytes.fromhex(self.prefix_hash), bytes.fromhex(self.parent), self.start, self.stop
        )


def parse_entry(data: bytes) -> EntryInfo:
    """Read a file's header without knowing the chunk.

    Args:
        data: at least the whole header; more is ignored. Its claims allocate nothing.

    Raises:
        CorruptEntryError: anything but a header that :func:`encode_header` wrote, with what was
            found and expected.
    """
    header, payload_at = json_header(data)
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.get("format") not in _FORMATS:
        found = metadata.get("format") if isinstance(metadata, dict) else None
        msg = f"format {found!r:.40}, expected {FORMAT!r}: not a VUA entry of this version"
        raise CorruptEntryError(msg)
    try:
        kind, seal_info = "", PLAIN
        if metadata["format"] != FORMAT:
            kind = metadata["seal"]
            seal_info = SealInfo(metadata["key"], metadata["nonce"])
        key, shard, layout = coordinates_of(metadata, header, seal_info)
        codec = _codec(str(metadata["namespace"]), layout, shard, kind)
        created, writer = int(metadata["created"]), str(metadata["writer"]).rstrip()
        tags_at = codec.table_offset + 8 * codec.blocks
        checksums = np.frombuffer(data[codec.table_offset : tags_at], dtype="<u8")
        tags, check = bytes(data[tags_at : codec.header_nbytes]), int(metadata["check"], 16)
        again = encode_header(
            codec, key, checksums, writer=writer, seal_info=seal_info, tags=tags, created=created
        )
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as problem:
        msg = f"header fields are not those of a VUA entry: {problem!r:.200}"
        raise CorruptEntryError(msg) from problem
    if payload_at != codec.table_offset or again != bytes(data[: codec.header_nbytes]):
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
        checksums=checksums,
        kind=kind,
        seal_info=seal_info,
    )


def codec_of(info: EntryInfo) -> EntryCodec:
    """Return the codec of the file that ``info`` describes."""
    return _codec(info.namespace, info.layout, info.shard, info.kind)


@functools.lru_cache(maxsize=16)
def _codec(namespace: str, layout: KVLayout, shard: Shard, kind: str) -> EntryCodec:
    return EntryCodec(namespace, layout, shard, kind)


def encode_header(
    codec: EntryCodec,
    key: ChunkKey,
    checksums: npt.NDArray[np.uint64],
    *,
    writer: str = "",
    seal_info: SealInfo = PLAIN,
    tags: bytes = b"",
    created: int | None = None,
) -> bytes:
    """Return the ``header_nbytes`` bytes that precede the payload of ``key``'s file.

    Args:
        checksums: xxh3-64 of each checksum block, ``[blocks]`` in file order.
        writer: name of the writer, see `vua.store.writer`; cut at 48 characters.
        tags: a sealed file's tags, 16 bytes per checksum block in file order.

    Raises LayoutError: the number of checksums or tags is wrong.
    """
    if len(checksums) != codec.blocks:
        raise LayoutError(f"expected {codec.blocks} checksums, found {len(checksums)}")
    blank = codec.blank_header(key, writer=writer, seal_info=seal_info, tags=tags, created=created)
    header = np.frombuffer(bytearray(blank), dtype=np.uint8)
    table = np.ascontiguousarray(checksums, dtype="<u8").view(np.uint8)
    header[codec.table_offset : codec.table_offset + len(table)] = table
    fill_check(header, codec.check_offset)
    return header.tobytes()


def json_header(data: bytes) -> tuple[Mapping[str, Any], int]:
    """Return the JSON object at the start of a safetensors file, and the offset of its data.

    Raises CorruptEntryError if ``data`` does not begin with a whole header of at most 1 MiB.
    """
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
        raise CorruptEntryError(f"header is not JSON: {problem!r:.120}") from problem
    if not isinstance(header, dict):
        raise CorruptEntryError(f"header is a JSON {type(header).__name__}, expected an object")
    return header, 8 + nbytes


def coordinates_of(
    metadata: Mapping[str, Any], header: Mapping[str, Any], seal_info: SealInfo
) -> tuple[ChunkKey, Shard, KVLayout]:
    """Return the key, shard and layout that header fields state.

    Raises LookupError, TypeError, ValueError or AttributeError on anything ill-typed.
    """
    shard = Shard.parse(metadata["shard"])
    if shard is None:
        raise ValueError(f"shard {metadata['shard']!r:.40}")
    start, _, stop = metadata["tokens"].partition("-")
    parent = metadata["parent"]
    key = ChunkKey(
        bytes.fromhex(metadata["prefix_hash"]),
        b"" if parent == NO_HASH else bytes.fromhex(parent),
        int(start),
        int(stop),
    )
    k_shape, dtype, itemsize = header["k"]["shape"], header["k"]["dtype"], 1
    if metadata.get("seal") == ENCRYPTED:
        dtype = metadata["dtype"]
        itemsize = ITEMSIZE[dtype]
    layout = KVLayout(
        layers=int(metadata["layers"]),
        kv_heads=int(metadata["kv_heads"]),
        k_dim=int(k_shape[3]) // itemsize,
        v_dim=int(header["v"]["shape"][3]) // itemsize if "v" in header else 0,
        dtype=dtype,
        chunk_tokens=int(k_shape[2]),
        group=shard.group,
    )
    digests = metadata["prefix_hash"], metadata["namespace"], key.parent.hex() or NO_HASH
    place, odd = divmod(key.start, layout.chunk_tokens)
    if (
        not all(len(digest) == len(NO_HASH) for digest in digests)
        or _DIGEST.fullmatch(metadata["namespace"]) is None
        or _SEAL_INFO.fullmatch(f"{seal_info.key_id} {seal_info.nonce}") is None
        or (odd, key.stop - key.start) != (0, layout.chunk_tokens)
        or (place and not key.parent)
        or Shard.parse(layout.full.name) is None
    ):
        raise ValueError("digests, token range or layout are of the wrong form")
    return key, shard, layout


def mismatch(codec: EntryCodec, header: memoryview, key: ChunkKey, key_id: str = "") -> EntryError:
    """Return why :meth:`EntryCodec.table_of` refused a header, given the same arguments.

    A CorruptEntryError if the header is damaged; a ForeignEntryError if it is sound but belongs to
    another chunk, shard, layout or namespace.
    """
    try:
        found = parse_entry(bytes(header))
    except CorruptEntryError as problem:
        return problem
    msg = (
        f"expected chunk {key.name[:12]} shard {codec.shard.name} of namespace "
        f"{codec.namespace[:12]}, found chunk {found.prefix_hash[:12]} shard "
        f"{found.shard.name} of namespace {found.namespace[:12]}; it will be treated as a miss"
    )
    foreign = ForeignEntryError(msg)
    asked = (codec.namespace, key.name, codec.shard, codec.kind, key_id)
    there = (found.namespace, found.prefix_hash, found.shard, found.kind, found.seal_info.key_id)
    foreign.misplaced = there != asked
    return foreign


def check_payload(
    layout: KVLayout,
    shard: Shard,
    expected: npt.NDArray[np.uint64] | Sequence[int],
    found: npt.NDArray[np.uint64] | Sequence[int],
    blocks: npt.NDArray[np.uint64] | None = None,
    *,
    what: str = "checksums",
) -> None:
    """Compare the header's checksums (or tags) with those of the bytes.

    Args:
        expected: the header's value of each block.
        blocks: indices of these blocks in the entry; by default all, in order.

    Raises CorruptEntryError, which names the first block that differs.
    """
    # as they are: numpy compares lists of numbers below and above 2**63 as floats of 53 bits
    bad = np.flatnonzero(np.asarray(expected, np.uint64) != np.asarray(found, np.uint64))
    if len(bad):
        first = int(bad[0] if blocks is None else blocks[bad[0]])
        msg = f"{len(bad)} of {len(found)} {what} do not match, the first is that of "
        raise CorruptEntryError(msg + _block_name(layout, shard, first))


def _block_name(layout: KVLayout, shard: Shard, block: int) -> str:
    step = layout.checksum_block_layers
    row, column = divmod(block, shard.checksum_blocks(layout))
    array, head = divmod(row, shard.heads)
    layer = shard.layer_start + column * step
    stop = min(layer + step, shard.layer_stop)
    return f"{'KV'[array]}, head {shard.head_start + head}, layers {layer}-{stop}"


def parent_in(head: bytes) -> tuple[str, bytes] | None:
    """Return the chunk before an entry's, by the entry's first KiB: a glance, without checks.

    It is "" for a first chunk, with the digest of its extras (empty without any). None if nothing
    can be told, also of a later version's entry.
    """
    if not any(one in head for one in _FORMATS_SAID):
        return None
    try:
        parent = head.split(_PARENT, 1)[1][:64].decode()
        start = int(head.split(_TOKENS, 1)[1][:10])
        digest = b"" if parent.startswith("-") else bytes.fromhex(parent)
    except (ValueError, IndexError):
        return None
    return (digest.hex(), b"") if start else ("", digest)
