"""Reads files straight into device memory if that is proved to work.

`CuFileMover` is NVIDIA's GPUDirect Storage: from the disk into GPU memory, or, in the library's
compatibility mode, through its own buffers.

`Gds` opens a mover once per process and proves it with a file: real bytes, written, read, summed on
the device and compared. `DirectReader` reads chunks' files by it. It is a short cut of
`vua.store.store.Loader` and judges nothing: it returns only chunks with the right header and the
right checksums, computed on the device. The loader reads everything else again and reports why.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vua.device.paged import synchronize
from vua.device.xxh3 import checksums
from vua.errors import ConfigError, EntryError, StorageError, UntrustedError
from vua.format.entry import EntryCodec
from vua.format.keys import ChunkKey
from vua.format.parse import check_payload
from vua.io.pool import Job, Pool
from vua.storage.base import Storage, entry_name

log = logging.getLogger(__name__)


class CuFileMover:
    """cuFile through `cuda.bindings` (cuda-python). One per process and device is enough.

    Thread-safe; all methods raise OSError.
    """

    name = "cufile"

    def __init__(self, device: torch.device) -> None:
        """Open cuFile's driver. May take seconds, see :class:`vua.device.gds.Gds`.

        Raises StorageError, with what to install, without `cuda.bindings.cufile` or a cuFile
        library.
        """
        try:
            from cuda.bindings import cufile  # noqa: PLC0415 - optional, and NVIDIA's alone

            self._library: Any = cufile
            self._device, self._threads = device, threading.local()
            self._registered: set[int] = set()
            self._bind()
            cufile.driver_open()
        except Exception as problem:  # cuFile's own: unknown where it is not installed
            raise StorageError(
                f"cuFile cannot be used: {type(problem).__name__}: {problem}; it needs the "
                "packages cuda-bindings and nvidia-cufile of the CUDA that torch was built for"
            ) from problem

    def _bind(self) -> None:
        """Make the device's context current in this thread, one of ours, as cuFile expects."""
        if not getattr(self._threads, "bound", False):
            torch.cuda.set_device(self._device)
            torch.cuda.mem_get_info(self._device)  # selecting a device alone may not bind it
            self._threads.bound = True

    def attach(self, memory: Tensor) -> None:
        """Register contiguous memory (uint8) that will be read into repeatedly.

        If that fails cuFile uses its own buffers.
        """
        self._bind()
        try:
            self._library.buf_register(memory.data_ptr(), memory.numel(), 0)
        except Exception as problem:  # noqa: BLE001 - cuFileError is known where it is installed alone
            log.debug("cuFileBufRegister: %s", problem)
        else:
            self._registered.add(memory.data_ptr())

    def detach(self, memory: Tensor) -> None:
        """Undo :meth:`attach`, after the last read."""
        if memory.data_ptr() in self._registered:
            self._registered.discard(memory.data_ptr())
            self._bind()
            self._library.buf_deregister(memory.data_ptr())

    def open(self, fd: int) -> tuple[int, int]:
        """Return a handle: the same file opened again, bypassing the page cache if possible.

        ``fd`` stays the caller's.
        """
        self._bind()
        path, flags = f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC
        try:
            own = os.open(path, flags | os.O_DIRECT)
        except OSError:  # tmpfs and similar: cuFile's compatibility mode still reads them
            own = os.open(path, flags)
        try:
            what = self._library.Descr()
            what.type = self._library.FileHandleType.OPAQUE_FD
            what.handle.fd = own
            what.fs_ops = 0
            return own, int(self._library.handle_register(what.ptr))
        except Exception as problem:  # cuFile's own
            os.close(own)
            raise OSError(f"cuFileHandleRegister: {problem}") from problem

    def read(
        self, handle: tuple[int, int], memory: Tensor, at: int, nbytes: int, offset: int
    ) -> int:
        """Read ``nbytes`` from ``offset`` of the file to offset ``at`` of ``memory``.

        Returns how many were read, fewer only at the end of the file; the rest of the memory is
        undefined then. When this returns, work queued on the device afterwards sees the bytes.
        """
        self._bind()
        done, base = 0, memory.data_ptr()
        while done < nbytes:
            try:
                got = int(
                    self._library.read(handle[1], base, nbytes - done, offset + done, at + done)
                )
            except Exception as problem:  # cuFile's own
                raise OSError(f"cuFileRead: {problem}") from problem
            if got < 0:
                raise OSError(f"cuFileRead returned {got}")
            if got == 0:
                break
            done += got
        return done

    def close(self, handle: tuple[int, int]) -> None:
        try:
            self._library.handle_deregister(handle[1])
        finally:
            os.close(handle[0])


log = logging.getLogger(__name__)

_Sums: TypeAlias = npt.NDArray[np.uint64]

_FAILURES: Final = 8
"""Consecutive files that cannot be read this way until it is given up."""
_THREADS: Final = 4
"""Files of one load that are read concurrently."""
_PROBE_NBYTES: Final = (1 << 20) + 4096 + 520
_PROBES: Final = ((0, 4096, 65536), (4096, 0, 1 << 20), (4104, 8, 1000), ((1 << 20) - 8, 512, 8192))
"""Offset in the file, offset in memory, bytes; the last read passes the file's end."""


class Gds:
    """Whether this process reads files straight into device memory. Thread-safe."""

    def __init__(
        self,
        mode: str,
        make: Callable[[], CuFileMover],
        directory: Path,
        device: torch.device,
        *,
        timeout_s: float = 30.0,
    ) -> None:
        """Prove a mover; waits for that up to a limit.

        Call this before an engine captures CUDA graphs: the trial's work on the device would spoil
        them.

        Args:
            mode: ``auto`` or ``required``.
            make: opens the mover; called in a thread, because it may hang.
            directory: where a temporary file is written, on the storage in question.
            device: target of the reads.
            timeout_s: after this time a mover counts as unusable.

        Raises ConfigError if it is required and does not work.
        """
        self._lock = threading.Lock()
        self._proved, self.mover, self.why = threading.Event(), None, "it is being tried"
        self._directory, self._device, self._failed, self._open = directory, device, 0, True
        self.readers = Pool[_Read](_THREADS, "vua-gds", timeout_s=timeout_s)
        thread = threading.Thread(target=self._prove, args=(make,), name="vua-gds", daemon=True)
        thread.start()
        if not self._proved.wait(timeout_s):
            with self._lock:  # a later answer is too late
                self._open, self.mover, self.why = False, None, f"no answer for {timeout_s:.0f} s"
            log.warning("VUA: files go to %s through host memory: %s", device, self.why)
        if mode == "required" and self.mover is None:
            raise ConfigError(
                f'gds_mode is "required", but files in {directory} cannot be read straight into '
                f'{device}: {self.why}. Set it to "auto" or "disabled" to use host memory'
            )

    mover: CuFileMover | None
    """Reads files; None before it is proved, and if it does not work."""
    why: str

    def _prove(self, make: Callable[[], CuFileMover]) -> None:
        try:
            mover = make()
            _probe(mover, self._directory, self._device)
            with self._lock:
                self.mover = mover if self._open else None
            log.info("VUA: files go to %s by %s", self._device, mover.name)
        except Exception as problem:  # noqa: BLE001 - whatever it raises, there is a way without
            self.why = f"{problem}"
            log.warning("VUA: files go to %s through host memory: %s", self._device, self.why)
        finally:
            self._proved.set()

    def count(self, *, well: bool) -> None:
        """Count a file's read; after several failures in a row the mover is given up."""
        with self._lock:
            self._failed = 0 if well else self._failed + 1
            too_often = self._failed >= _FAILURES
        if too_often:
            self.give_up(f"{_FAILURES} files in a row could not be read")

    def give_up(self, why: str) -> None:
        with self._lock:
            was, self.mover, self.why = self.mover, None, why
        if was is not None:
            log.warning("VUA: %s is not used any more: %s", was.name, why)

    def close(self) -> None:
        with self._lock:
            self._open, self.mover = False, None
        self.readers.close()


def _probe(mover: CuFileMover, directory: Path, device: torch.device) -> None:
    """Write a file, read it by the mover and compare. Raises OSError on any difference."""
    content = np.frombuffer(os.urandom(_PROBE_NBYTES), dtype=np.uint8)
    memory = torch.empty(len(content), dtype=torch.uint8, device=device)
    mover.attach(memory)
    try:
        # It has a name: cuFile's compatibility mode opens the file's path again.
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".tmp-gds-") as stream:
            stream.write(content.tobytes())
            stream.flush()
            os.fsync(stream.fileno())
            handle = mover.open(stream.fileno())
            try:
                for offset, at, nbytes in _PROBES:
                    memory.fill_(0x5A)
                    synchronize(memory.device)
                    there = content[offset : offset + nbytes]
                    expected = np.full(len(content), 0x5A, dtype=np.uint8)
                    expected[at : at + len(there)] = there
                    got = mover.read(handle, memory, at, nbytes, offset)
                    # Behind the end of the file cuFile's compatibility mode fills what was asked.
                    memory[at + len(there) : at + nbytes] = 0x5A
                    if got != len(there) or not np.array_equal(expected, memory.cpu().numpy()):
                        raise OSError(
                            f"{mover.name} read {got} bytes from {offset}, or not the right ones"
                        )
            finally:
                mover.close(handle)
    finally:
        mover.detach(memory)


@dataclass(slots=True, eq=False)
class _Read:
    handle: Any
    at: int
    ended: threading.Event = field(default_factory=threading.Event)
    well: bool = False


class DirectReader:
    """Reads chunks of one shard, of one store, straight into device memory."""

    def __init__(self, gds: Gds, codec: EntryCodec, storage: Storage) -> None:
        self._gds, self._codec, self._storage = gds, codec, storage
        self._payload = codec.file_nbytes - codec.header_nbytes
        sizes = np.array(codec.block_nbytes(), dtype=np.int64)
        self._sizes, self._starts = sizes, np.cumsum(sizes) - sizes

    def read(
        self, keys: Sequence[ChunkKey], memory: Tensor, believed: Container[bytes] | None = None
    ) -> tuple[int, bool]:
        """Read the payloads of leading chunks into memory, chunk i to slot i; verify them there.

        ``memory`` belongs to a staged buffer and is unused meanwhile; on a GPU the checksums are
        computed on the current stream. Entries of writers that are not ``believed`` are not read.
        Raises nothing for the state of the storage.

        Returns how many leading chunks are there and right, and whether the next one was read but
        was wrong: then another read must find the cause.
        """
        mover = self._gds.mover
        if mover is None or not keys:
            return 0, False
        reads: list[_Read] = []
        tables: list[_Sums] = []
        try:
            for place, key in enumerate(keys[: memory.numel() // self._payload]):
                found = self._open(mover, key, believed)
                if found is None:
                    break
                tables.append(found[1])
                reads.append(_Read(found[0], place * self._payload))
                self._begin(mover, memory, reads[-1])
        finally:
            for read in reads:
                read.ended.wait()
                mover.close(read.handle)
        done = next((at for at, read in enumerate(reads) if not read.well), len(reads))
        right = self._right(memory, tables[:done])
        return right, right < done

    def _begin(self, mover: CuFileMover, memory: Tensor, read: _Read) -> None:
        def work(_: Job[_Read]) -> None:
            try:
                offset = self._codec.header_nbytes
                got = mover.read(read.handle, memory, read.at, self._payload, offset)
                read.well = got == self._payload
            except OSError as problem:
                log.debug("a file was not read by %s: %s", mover.name, problem)
            finally:
                self._gds.count(well=read.well)
                read.ended.set()

        try:
            self._gds.readers.submit(work, read)
        except RuntimeError as problem:  # the system has no thread for it
            log.debug("a file was not read by %s: %s", mover.name, problem)
            read.ended.set()

    def _open(
        self, mover: CuFileMover, key: ChunkKey, believed: Container[bytes] | None
    ) -> tuple[Any, _Sums] | None:
        """Return a handle and the table of checksums of a file whose header is ``key``'s."""
        if not self._storage.capabilities.device_reads:
            return None
        try:
            files: Any = self._storage
            fd, status = files.open_file(entry_name(key.name, self._codec.shard))
        except (OSError, UntrustedError):
            return None  # missing or unreadable: the loader says which
        try:
            if status.nbytes != self._codec.file_nbytes:
                return None
            header = memoryview(os.pread(fd, self._codec.header_nbytes, 0))
            table = self._codec.table_of(header, key)
            if table is not None and believed is not None:
                table = table if self._codec.writer_of(header) in believed else None
            return None if table is None else (mover.open(fd), table)
        except OSError as problem:
            log.debug("a file was not opened by %s: %s", mover.name, problem)
            self._gds.count(well=False)
            return None
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _right(self, memory: Tensor, tables: Sequence[_Sums]) -> int:
        if not tables:
            return 0
        places = np.arange(len(tables), dtype=np.int64)[:, None] * self._payload
        starts = (places + self._starts).ravel()
        found = checksums(memory, starts, np.tile(self._sizes, len(tables)))
        layout, shard = self._codec.layout, self._codec.shard
        for place, (table, digests) in enumerate(
            zip(tables, found.reshape(len(tables), -1), strict=True)
        ):
            try:
                check_payload(layout, shard, table, digests)
            except EntryError as problem:
                log.debug("a file read by the device: %s", problem)
                return place
        return len(tables)
