"""All of an entry's bytes against what it says: for who checks or moves entries as they are.

Whoever loads one reads it by :class:`vua.store.entry_reader.EntryReader`.
"""

from __future__ import annotations

from collections.abc import Iterator

from vua.errors import CorruptEntryError, ForeignEntryError
from vua.format.header import MAX_HEADER_NBYTES
from vua.format.parse import EntryInfo, codec_of, parse_entry
from vua.format.verify import check_payload
from vua.native import Digest, digests_of
from vua.storage.base import entry_name

__all__ = ["check_parts", "verified"]


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
