"""Files of somebody who knows the format and may write to the directory, but has no key."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from vua.format.entry import EntryCodec, SealInfo
from vua.format.keys import ChunkKey
from vua.format.parse import encode_header, parse_entry
from vua.native import digests_of


def checksums_of(codec: EntryCodec, payload: bytes) -> npt.NDArray[np.uint64]:
    """The checksum of each unit of a whole payload."""
    edges, view = [0, *accumulate(codec.block_nbytes())], memoryview(payload)
    return np.array(digests_of([view[a:b]] for a, b in pairwise(edges)), dtype=np.uint64)


def forged(
    data: bytes,
    *,
    codec: EntryCodec | None = None,
    key: ChunkKey | None = None,
    seal_info: SealInfo | None = None,
    tags: bytes | None = None,
    payload: bytes | None = None,
) -> bytes:
    """Return the file ``data`` changed as told, with all that needs no key set right.

    Of a plain file a store cannot tell: that is what keys are for.

    Args:
        data: a whole, sound file.
        codec: of another namespace, layout, shard or kind of seal.
        key: another chunk.
        seal_info: another key or nonce, of a sealed file.
        tags: other tags, 16 bytes for each checksum block.
        payload: other K and V, as they are stored.
    """
    info = parse_entry(data)
    at = info.header_nbytes
    own = EntryCodec(info.namespace, info.layout, info.shard, info.kind)
    if tags is None:
        tags = own.seal_of(memoryview(data[:at]))[1].tobytes() if info.kind else b""
    stored = data[at:] if payload is None else payload
    codec = own if codec is None else codec
    header = encode_header(
        codec,
        info.key if key is None else key,
        checksums_of(codec, stored),
        writer=info.writer,
        seal_info=info.seal_info if seal_info is None else seal_info,
        tags=tags,
    )
    return header + stored
