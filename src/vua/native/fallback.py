"""In Python what the C functions do: the same signatures, the same results, and errors explained.

What C does not find in order it only stops at. :func:`read_entry` then says what is the matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from vua.errors import CorruptEntryError, EntryError, UntrustedError
from vua.io import posix
from vua.io.plain import close_plain, open_plain
from vua.io.posix import Iovecs
from vua.native.transfer import Headers, Transfer, digests_of

__all__ = ["hash_chain", "hash_entry", "read_entries", "read_entry"]


def read_entries(
    transfer: Transfer,
    dir_fd: int,
    paths: Sequence[str],
    place: int,
    into: Headers,
    *,
    uids: npt.NDArray[np.uint32] | None = None,
    local: bool = True,
    direct: bool = False,
) -> int:
    """Read files one after the other; see :func:`vua.native.batches.read_entries`."""
    del direct  # it is a matter of speed
    for file, path in enumerate(paths):
        try:
            row = into.rest(file)
            read_entry(transfer, dir_fd, path, place + file, row, uids=uids, local=local)
        except (OSError, EntryError, UntrustedError):
            return file
    return len(paths)


def read_entry(
    transfer: Transfer,
    dir_fd: int,
    path: str,
    place: int,
    into: Headers,
    *,
    uids: npt.NDArray[np.uint32] | None = None,
    local: bool = True,
) -> None:
    """Read one file into memory, or say why not; its header and digests into the first row.

    The arguments are those of :func:`vua.native.batches.read_entries`. Raises OSError
    (FileNotFoundError...), UntrustedError, CorruptEntryError for a wrong length.
    """
    plan, header = transfer.plan, into.headers[0]
    fd, status = open_plain(dir_fd, path, uids, local=local)
    try:
        into.inodes[0] = status.inode
        if status.nbytes != plan.file_nbytes:
            msg = f"{status.nbytes} bytes long, expected {plan.file_nbytes}"
            raise CorruptEntryError(msg)
        discard = np.empty(plan.discard_nbytes, np.uint8) if into.discard is None else into.discard
        payload = transfer.rows(place, discard.ctypes.data)
        opening = np.array([[header.ctypes.data, plan.header_nbytes]], dtype=np.uint64)
        rows = np.concatenate([opening, payload])
        blocks, cached = transfer.blocks(payload), local
        for extent, extent_stop, with_header, nbytes, offset, block, stop in plan.reads.tolist():
            first = 0 if with_header else 1 + extent * plan.segments
            part = rows[first : 1 + extent_stop * plan.segments]
            got, cached = _read(fd, part, nbytes, offset, cached=cached)
            if got != nbytes:
                msg = f"ends inside bytes {offset}..{offset + nbytes}"
                raise CorruptEntryError(msg)
            into.digests[0, block:stop] = digests_of(islice(blocks, stop - block))
    finally:
        close_plain(fd, local=local)


def _read(fd: int, rows: Iovecs, nbytes: int, offset: int, *, cached: bool) -> tuple[int, bool]:
    """Fill memory; return the bytes read, and whether the page cache had them all.

    Keeps the GIL for as long as it has: once a read needs I/O the rest releases it.
    """
    few = cached and len(rows) <= posix.IOV_MAX
    if few and posix.preadv_cached(fd, rows.ctypes.data, len(rows), offset) == nbytes:
        return nbytes, True
    return posix.preadv_all(fd, rows, offset), False


def hash_entry(transfer: Transfer, place: int) -> npt.NDArray[np.uint64]:
    """Hash a chunk in memory; see :func:`vua.native.batches.hash_entry`."""
    return np.array(digests_of(transfer.blocks(transfer.rows(place))), dtype=np.uint64)


def hash_chain(parent: bytes, ids: memoryview, chunk_nbytes: int) -> bytes:
    """Hash the chunks of a prompt; see :func:`vua.native.prefixes.hash_chain`."""
    digests, fresh = bytearray(), hashlib.sha256().copy  # cheaper than to make each anew
    for start in range(0, len(ids), chunk_nbytes):
        digest = fresh()
        digest.update(parent)
        digest.update(ids[start : start + chunk_nbytes])
        parent = digest.digest()
        digests += parent
    return bytes(digests)
