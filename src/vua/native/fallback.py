"""The C functions in Python: the same signatures and results, but with errors explained.

C only stops at a file that is not in order; :func:`read_entry` says what is wrong with it. The
hashes are here too: the xxh3-64 of blocks and headers, and the SHA-256 chain of prompts, for which
:func:`hash_chain` takes C where it is built.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from vua.errors import CorruptEntryError, EntryError, UntrustedError
from vua.io import posix
from vua.io.files import (
    Directory,
    Uids,
    close_plain,
    is_plain,
    make_directory,
    make_file,
    open_plain,
)
from vua.io.memory import allocate, memory_at, move_all, preadv_cached
from vua.io.pool import Job, Pool
from vua.io.posix import FileStatus, close_quietly, closing_fd
from vua.native.bindings import library, sha256
from vua.native.transfer import (
    FAILED,
    PRESENT,
    WRITTEN,
    Headers,
    Transfer,
    WriteOptions,
    blocks_of,
    cuts_of,
    rows_of,
)

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


_CHUNK: Final = re.compile(r"[0-9a-f]{64}")
LATEST_NS: Final = (1 << 63) - 1
"""Latest mtime, in the year 2262; a later one counts as this."""
_syncing: Final = Pool[None](16, "vua-sync")
"""For durable writes, which wait for the storage and not for a core."""


def read_entries(
    transfer: Transfer,
    directory: Directory,
    paths: Sequence[str],
    place: int,
    into: Headers,
    first: int,
    stop: int,
) -> int:
    """Read files one after the other; see :func:`vua.native.entries.read_entries`."""
    for file in range(first, stop):
        try:
            read_entry(transfer, directory, paths[file], place, into, file)
        except (OSError, EntryError, UntrustedError):
            return file
    return stop


def read_entry(
    transfer: Transfer, directory: Directory, path: str, place: int, into: Headers, file: int
) -> None:
    """Read a file into memory, to chunk slot ``place + file``, or raise the reason.

    Header and digests go to that row of ``into``. Other arguments as for
    :func:`vua.native.entries.read_entries`. Raises OSError (FileNotFoundError...), UntrustedError,
    CorruptEntryError for a wrong length.
    """
    plan, slot, kept = transfer.plan, place + file, _discarded(transfer, into, file)
    header, discard = into.headers[file], kept.ctypes.data
    fd, status = open_plain(directory, path)
    try:
        into.inodes[file] = status.inode
        if status.nbytes != plan.file_nbytes:
            raise CorruptEntryError(f"{status.nbytes} bytes long, expected {plan.file_nbytes}")
        rows = None  # unless the page cache may have them all
        if directory.local:
            rows, edges = rows_of(transfer, slot, discard), cuts_of(transfer).edges
            rows[0] = header.ctypes.data, plan.header_nbytes
        for offset, nbytes, block, opening, parts in _pieces(transfer, slot, header, discard):
            if rows is not None:
                its_rows = rows[0 if opening else edges[block] : edges[block + len(parts)]]
                if preadv_cached(fd, its_rows, offset) != nbytes:
                    rows = None
            if rows is None and move_all(os.preadv, fd, _views(opening, parts), offset) != nbytes:
                raise CorruptEntryError(f"ends inside bytes {offset}..{offset + nbytes}")
            into.digests[file, block : block + len(parts)] = digests_of(parts)
    finally:
        close_plain(fd, local=directory.local)


_Piece: TypeAlias = "tuple[int, int, int, Sequence[memoryview], Sequence[Sequence[memoryview]]]"
"""Of one read: offset, bytes, first checksum block, the header if it is part of it, and the memory
of each block."""


def _pieces(
    transfer: Transfer, place: int, header: npt.NDArray[np.uint8], discard: int = 0
) -> Iterator[_Piece]:
    blocks = blocks_of(transfer, place, discard)
    for _, _, with_header, nbytes, offset, block, stop in transfer.plan.reads.tolist():
        opening = [header.data] if with_header else []
        yield offset, nbytes, block, opening, list(islice(blocks, stop - block))


def _discarded(transfer: Transfer, into: Headers, file: int) -> npt.NDArray[np.uint8]:
    if into.discard is None:
        return np.empty(transfer.plan.discard_nbytes, np.uint8)
    kept: npt.NDArray[np.uint8] = into.discard[file]
    return kept


def _views(header: Sequence[memoryview], parts: Iterable[Sequence[memoryview]]) -> list[memoryview]:
    return [*header, *chain.from_iterable(parts)]


def gather_entry(transfer: Transfer, place: int, to: memoryview) -> npt.NDArray[np.uint64]:
    """Copy a chunk out of memory; see :func:`vua.native.entries.gather_entry`."""
    digests, at = [], transfer.plan.header_nbytes
    for block in blocks_of(transfer, place):
        for view in block:
            to[at : at + len(view)] = view
            at += len(view)
        digests += digests_of([block])
    return np.array(digests, dtype=np.uint64)


def fill_entry(
    transfer: Transfer, place: int, into: Headers, file: int, data: memoryview, offset: int
) -> None:
    """Put bytes where they belong; see :func:`vua.native.entries.fill_entry`."""
    kept = _discarded(transfer, into, file)
    pieces = _pieces(transfer, place, into.headers[file], kept.ctypes.data)
    for start, nbytes, block, header, parts in pieces:
        if not offset <= start <= start + nbytes <= offset + len(data):
            continue
        at = start - offset
        for view in _views(header, parts):
            view[:] = data[at : at + len(view)]
            at += len(view)
        into.digests[file, block : block + len(parts)] = digests_of(parts)


def write_entries(
    transfer: Transfer,
    dir_fd: int,
    paths: Sequence[str],
    place: int,
    headers: npt.NDArray[np.uint8],
    options: WriteOptions,
) -> list[int]:
    """Write files one after the other; see :func:`vua.native.entries.write_entries`.

    Durable files are written by several threads: file systems sync for all waiters at once.
    """

    def write(file: int) -> int:
        try:
            return _write_entry(transfer, dir_fd, paths[file], place + file, headers[file], options)
        except OSError as problem:
            return -(problem.errno or errno.EIO)

    def sync(job: Job[str]) -> int:
        with closing_fd(posix.open_beneath(dir_fd, job.what)) as fd:
            os.fsync(fd)
        return 0

    if not options.durable:
        statuses = [FAILED] * len(paths)
        for file in range(len(paths)):
            statuses[file] = write(file)
            if statuses[file] < 0:
                break
        return statuses
    statuses = _syncing.map(lambda job: write(job.what), range(len(paths)))
    written = [path for path, status in zip(paths, statuses, strict=True) if status == WRITTEN]
    folders = {folder for path in written for folder in (path, path.partition("/")[0], ".")}
    try:
        _syncing.map(sync, sorted(folders))
    except OSError as problem:
        code = -(problem.errno or errno.EIO)
        return [code if status == WRITTEN else status for status in statuses]
    return statuses


def _write_entry(
    transfer: Transfer,
    dir_fd: int,
    path: str,
    place: int,
    header: npt.NDArray[np.uint8],
    options: WriteOptions,
) -> int:
    name, temporary = options.file_name.decode(), f"{options.temporary.decode()}-{place}"
    with contextlib.ExitStack() as stack:
        fan = make_directory(dir_fd, path.partition("/")[0], options.directory_mode)
        stack.callback(close_quietly, fan)
        directory = make_directory(fan, path.partition("/")[2], options.directory_mode)
        stack.callback(close_quietly, directory)
        if _is_there(directory, name, transfer.file_nbytes, options.uids):
            return PRESENT
        try:
            fd = make_file(temporary, os.O_EXCL, options.file_mode, dir_fd=directory)
            try:
                _write_bytes(transfer, fd, place, header, options)
                if options.durable:
                    os.fsync(fd)
            finally:
                os.close(fd)  # network file systems report write errors here
            os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise
    return WRITTEN


def _is_there(directory: int, name: str, nbytes: int, uids: Uids | None) -> bool:
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    status = FileStatus.of(found)
    return is_plain(status, uids) and status.nbytes == nbytes


def _write_bytes(
    transfer: Transfer,
    fd: int,
    place: int,
    header: npt.NDArray[np.uint8],
    options: WriteOptions,
) -> None:
    """Hash and write a chunk piece by piece; the piece with the header comes last.

    For one large call the system takes large pieces of memory (folios of 2 MiB and more), and gives
    exactly these back to a VM's host once free. Getting them again took ten times as long as the
    write (docs/decisions/0013-native-saves.md).
    """
    plan, check_offset = transfer.plan, options.check_offset
    if plan.file_nbytes >= options.allocate_nbytes:
        allocate(fd, plan.file_nbytes)
    digests, opening = np.zeros(plan.blocks, dtype=np.uint64), []
    for offset, _, block, first, parts in _pieces(transfer, place, header):
        if check_offset:
            digests[block : block + len(parts)] = digests_of(parts)
        if first:
            opening = _views(first, parts)
        else:
            _write(fd, _views([], parts), offset)
    if check_offset:
        table = digests.view(np.uint8)
        header[plan.table_offset : plan.table_offset + len(table)] = table
        fill_check(header, check_offset)
    _write(fd, opening, 0)


def _write(fd: int, views: Sequence[memoryview], offset: int) -> None:
    if move_all(os.pwritev, fd, views, offset) != sum(map(len, views)):
        raise OSError(errno.EIO, "the system wrote 0 bytes and gave no reason")


Strided = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[npt.NDArray[np.uint64]]]
"""Heads, dims, bytes per element; strides of target and source; per box addresses and tokens."""


def copy_strided(copies: Sequence[Strided]) -> None:
    """Copy boxes one after the other; see :func:`vua.native.entries.copy_strided`."""
    for (heads, dims, item), to, from_, tables in copies:
        for target, source, tokens in zip(*(t.ravel().tolist() for t in tables), strict=True):
            shape = (heads, tokens, dims)
            if tokens:
                _elements(target, shape, to, item)[...] = _elements(source, shape, from_, item)


def _elements(
    address: int, shape: Sequence[int], strides: Sequence[int], item: int
) -> npt.NDArray[np.unsignedinteger]:
    last = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    buffer = memory_at(address, last + item)
    return np.ndarray(tuple(shape), f"u{item}", buffer, strides=tuple(strides))


_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def list_chunks(directory: int) -> tuple[Sequence[str], npt.NDArray[np.int64]]:
    """List a directory; see :func:`vua.native.entries.list_chunks`."""
    names, mtimes_ns = [], []
    with os.scandir(directory) as entries:
        for entry in entries:
            if _CHUNK.fullmatch(entry.name):
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    names.append(entry.name)
                    mtimes_ns.append(min(status.st_mtime_ns, LATEST_NS))
    return names, np.array(mtimes_ns, dtype=np.int64)


def list_names(directory: int) -> list[str]:
    """List a directory; see :func:`vua.native.entries.list_names`."""
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries if _CHUNK.fullmatch(entry.name)]


def chunk_sizes(space: int, names: Iterable[str]) -> list[int]:
    """Add up the bytes of chunks' files; see :func:`vua.native.entries.chunk_sizes`."""
    sizes = []
    for name in names:
        try:
            fd = os.open(f"{name[:2]}/{name}", _DIRECTORY, dir_fd=space)
        except OSError as problem:
            sizes.append(-(problem.errno or errno.EIO))
            continue
        nbytes = 0
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        nbytes += status.st_size if stat.S_ISREG(status.st_mode) else 0
        finally:
            close_quietly(fd)
        sizes.append(nbytes)
    return sizes
