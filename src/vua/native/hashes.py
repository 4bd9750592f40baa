"""Hashes in Python and C: the xxh3-64 of blocks and headers, the SHA-256 chain of prompts."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Iterable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from vua.native.bindings import library, sha256

__all__ = ["Digest", "digests_of", "fill_check", "hash_chain", "narrow"]

_CHECK_DIGITS: Final = 16


class Digest(Protocol):
    """Consumes the bytes of one block: a hash, or one block's seal."""

    def update(self, view: memoryview, /) -> object: ...

    def intdigest(self) -> int: ...


def digests_of(blocks: Iterable[Iterable[memoryview]]) -> list[int]:
    """Return the xxh3-64 of each block: the only place where Python hashes K and V."""
    digests = []
    for block in blocks:
        digest = xxhash.xxh3_64()
        for part in block:
            digest.update(part)
        digests.append(digest.intdigest())
    return digests


def fill_check(header: npt.NDArray[np.uint8], check_offset: int) -> None:
    """Fill in a header's self-check, computed with zeros for its own digits."""
    check = header[check_offset : check_offset + _CHECK_DIGITS]
    check[:] = ord("0")
    digits = xxhash.xxh3_64_hexdigest(header.data).encode()
    check[:] = np.frombuffer(digits, dtype=np.uint8)


_DIGEST_NBYTES: Final = 32
_HELD_NBYTES: Final = 2 << 20
"""Token ids up to this size, half a million, are hashed in some 2 ms with the GIL held."""
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = [ctypes.c_void_p, ctypes.c_ssize_t], ctypes.py_object
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.argtypes, _address_of.restype = [ctypes.py_object], ctypes.c_void_p


def narrow(ids: npt.NDArray[np.generic]) -> bytes | None:
    """Return integers of 4 or 8 bytes as little-endian u32 bytes; None if some do not fit.

    Also None if it cannot tell; the caller finds out why. Keeps the GIL for up to half a million
    ids, where numpy would release it at each step.
    """
    bound, kind = library(), ids.dtype
    known = kind.kind in "iu" and kind.itemsize in (4, 8) and kind.isnative
    if bound is None or not known or sys.byteorder != "little" or 4 * ids.size > _HELD_NBYTES:
        return None
    ids = np.ascontiguousarray(ids)
    found = _new_bytes(None, 4 * ids.size)  # filled before other code sees it: no copy
    given = ids.ctypes.data, kind.itemsize, kind.kind == "i", ids.size
    return found if bound.ids_held(*given, _address_of(found)) else None


def hash_chain(parent: bytes, ids: memoryview, chunk_nbytes: int) -> bytes:
    """Return the digests of consecutive chunks, 32 bytes each.

    Args:
        parent: hashed before the first chunk's ids: a digest, or empty.
        ids: token ids of whole chunks, contiguous bytes.
        chunk_nbytes: bytes of a chunk's ids.

    Each is the SHA-256 of the previous digest and its chunk's ids; see :mod:`vua.format.keys`.
    """
    chunks = len(ids) // chunk_nbytes
    bound = library()
    if bound is None or sha256 is None or chunks < 2:
        return chain_in_python(parent, ids, chunk_nbytes)
    digests = ctypes.create_string_buffer(chunks * _DIGEST_NBYTES)
    data = bytes(ids)
    hash_all = bound.chain_held if len(data) <= _HELD_NBYTES else bound.chain
    hash_all(sha256, parent, len(parent), data, chunk_nbytes, chunks, digests)
    return digests.raw


def chain_in_python(parent: bytes, ids: memoryview, chunk_nbytes: int) -> bytes:
    digests, fresh = bytearray(), hashlib.sha256().copy  # cheaper than making each anew
    for start in range(0, len(ids), chunk_nbytes):
        digest = fresh()
        digest.update(parent)
        digest.update(ids[start : start + chunk_nbytes])
        parent = digest.digest()
        digests += parent
    return bytes(digests)
