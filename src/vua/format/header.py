"""What a file says about itself, taken apart before any of it is believed.

No length, number or name is used before it is checked; :func:`vua.format.entry.parse_entry` then
builds the header anew from what was found, and compares. Pure functions over bytes.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from vua.errors import CorruptEntryError
from vua.format.keys import ChunkKey
from vua.format.layout import ITEMSIZE, KVLayout, Shard

__all__ = ["FORMAT", "SEALED", "EntryInfo", "Mark", "claims", "json_header"]

FORMAT: Final = "vua.entry.v1"
SEALED: Final = "vua.sealed.v1"
AUTHENTIC: Final = "gmac"
"""A kind of seal: whoever has the key can tell who wrote the file; K and V are in clear."""
ENCRYPTED: Final = "aes-256-gcm"
"""The other kind: and K and V are encrypted."""
TAG_NBYTES: Final = 16
NO_HASH: Final = "-" * 64
"""Stands for the parent of a chunk that has none."""
MAX_HEADER_NBYTES: Final = 1 << 20
"""Larger than any real header: 1 MiB of checksums are 131,072 runs."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_MARK: Final = re.compile(r"[0-9a-f]{16} [0-9a-f]{32}| ")


class Mark(NamedTuple):
    """What a sealed file says about its seal; of a plain file both are empty."""

    key_id: str = ""
    """Which key, 16 hex; tells nothing about it."""
    nonce: str = ""
    """Of this file alone, 32 hex."""


PLAIN: Final = Mark()


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
    """Of a sealed file the kind of its seal."""
    mark: Mark = PLAIN

    def check_length(self, nbytes: int) -> None:
        """Raise CorruptEntryError where the file is not as long as it says."""
        if nbytes != self.file_nbytes:
            msg = f"{nbytes} bytes long, expected {self.file_nbytes}"
            raise CorruptEntryError(msg)

    @property
    def key(self) -> ChunkKey:
        """The chunk's key as the file states it."""
        return ChunkKey(
            bytes.fromhex(self.prefix_hash), bytes.fromhex(self.parent), self.start, self.stop
        )


def json_header(data: bytes) -> tuple[Mapping[str, Any], int]:
    """Return the JSON object at the start of a safetensors file, and where its data begin.

    Raises CorruptEntryError when ``data`` does not begin with a whole header of at most 1 MiB.
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
        msg = f"header is not JSON: {problem!r:.120}"
        raise CorruptEntryError(msg) from problem
    if not isinstance(header, dict):
        msg = f"header is a JSON {type(header).__name__}, expected an object"
        raise CorruptEntryError(msg)
    return header, 8 + nbytes


def claims(
    metadata: Mapping[str, Any], header: Mapping[str, Any], mark: Mark
) -> tuple[ChunkKey, Shard, KVLayout]:
    """Return the key, shard and layout that header fields state.

    Raises LookupError, TypeError, ValueError or AttributeError on anything ill-typed.
    """
    shard = Shard.parse(metadata["shard"])
    if shard is None:
        msg = f"shard {metadata['shard']!r:.40}"
        raise ValueError(msg)
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
        or _MARK.fullmatch(f"{mark.key_id} {mark.nonce}") is None
        or (odd, key.stop - key.start) != (0, layout.chunk_tokens)
        or (place and not key.parent)
        or Shard.parse(layout.full.name) is None
    ):
        msg = "digests, token range or layout are of the wrong form"
        raise ValueError(msg)
    return key, shard, layout
