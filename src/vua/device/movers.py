"""Reads a file's bytes into device memory, without a look at them.

`CuFileMover` is NVIDIA's GPUDirect Storage: from the disk into GPU memory, or, in the library's
compatibility mode, through its own buffers.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from typing import Any, Protocol

import torch
from torch import Tensor

from vua.errors import StorageError

log = logging.getLogger(__name__)


class Mover(Protocol):
    """Reads files into device memory. Thread-safe; all methods raise OSError."""

    name: str

    def attach(self, memory: Tensor) -> None:
        """Prepare contiguous memory (uint8) that will be read into repeatedly."""

    def detach(self, memory: Tensor) -> None:
        """Undo :meth:`attach`, after the last read."""

    def open(self, fd: int) -> Any:
        """Return a handle of the file of ``fd``, which stays the caller's."""

    def read(self, handle: Any, memory: Tensor, at: int, nbytes: int, offset: int) -> int:
        """Read ``nbytes`` from ``offset`` of the file to offset ``at`` of ``memory``.

        Returns how many were read, fewer only at the end of the file; the rest of the memory is
        undefined then. When this returns, work queued on the device afterwards sees the bytes.
        """

    def close(self, handle: Any) -> None:
        """Release a handle."""


def driver_present() -> bool:
    """Whether this machine has a CUDA driver that finds a device.

    Ask before calling cuFile: without a driver `cuFileDriverOpen` can hang for minutes.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        return (
            driver.cuInit(0) == 0
            and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
            and count.value > 0
        )
    except (OSError, AttributeError):
        return False


def _hint(problem: str) -> str:
    """Return the cause of an error of cuFile whose text does not give it."""
    if "5027" in problem or "volume attributes" in problem:
        return (
            "; cuFile asked udev for the kind of file system on the disk (ID_FS_USAGE) and got no "
            "answer, as in a container without udev"
        )
    return ""


class CuFileMover:
    """cuFile through `cuda.bindings` (cuda-python). One per process and device is enough."""

    name = "cufile"

    def __init__(self, device: torch.device) -> None:
        """Open cuFile's driver. May take seconds, see :class:`vua.device.gds.Gds`.

        Raises StorageError, with what to install, without a CUDA driver (no cuFile call is made
        then), `cuda.bindings.cufile`, or a cuFile library.
        """
        if not driver_present():
            raise StorageError("cuFile needs a CUDA driver (libcuda.so.1) and a GPU: found none")
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
        """Register memory for direct transfers; if that fails cuFile uses its own buffers."""
        self._bind()
        try:
            self._library.buf_register(memory.data_ptr(), memory.numel(), 0)
        except Exception as problem:  # noqa: BLE001 - cuFileError is known where it is installed alone
            log.debug("cuFileBufRegister: %s", problem)
        else:
            self._registered.add(memory.data_ptr())

    def detach(self, memory: Tensor) -> None:
        if memory.data_ptr() in self._registered:
            self._registered.discard(memory.data_ptr())
            self._bind()
            self._library.buf_deregister(memory.data_ptr())

    def open(self, fd: int) -> tuple[int, int]:
        """Open the same file again, bypassing the page cache if possible; register it."""
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
        except Exception as problem:  # likewise
            os.close(own)
            raise OSError(f"cuFileHandleRegister: {problem}{_hint(str(problem))}") from problem

    def read(
        self, handle: tuple[int, int], memory: Tensor, at: int, nbytes: int, offset: int
    ) -> int:
        self._bind()
        done, base = 0, memory.data_ptr()
        while done < nbytes:
            try:
                got = int(
                    self._library.read(handle[1], base, nbytes - done, offset + done, at + done)
                )
            except Exception as problem:  # likewise
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
