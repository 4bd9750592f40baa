"""Hashes and writes batches of entry files by `save.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from vua.native.batches import crew
from vua.native.bindings import library
from vua.native.transfer import Transfer

__all__ = ["LEFT", "PRESENT", "WRITTEN", "Writing", "save"]

LEFT, PRESENT, WRITTEN = 0, 1, 2
"""What became of a file: it is left to the caller, was there before, is there now."""
_SHARED_NBYTES: Final = 4 << 20
"""A batch from this size on is worth a second thread."""


class Writing(ctypes.Structure):
    """How files are written, as `save.c` wants it. Immutable."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("temporary", ctypes.c_char_p),
        ("check_offset", ctypes.c_uint64),
        ("allocate", ctypes.c_uint64),
        ("directory_mode", ctypes.c_uint64),
        ("file_mode", ctypes.c_uint64),
        ("uids", ctypes.c_void_p),
        ("uid_count", ctypes.c_uint64),
    )

    def __init__(
        self,
        name: str,
        temporary: str,
        *,
        check_offset: int,
        allocate: int,
        modes: tuple[int, int],
        uids: npt.NDArray[np.uint32] | None,
    ) -> None:
        """Describe it.

        Args:
            name: of a file in its chunk's directory.
            temporary: what its name begins with until it is complete; no other call uses it.
            check_offset: where in the header its check of itself stands.
            allocate: files of so many bytes and more get their room on the disk first.
            modes: of directories and of files.
            uids: whose files count as present; None: anybody's.
        """
        self.keep = uids
        whose = (None, 0) if uids is None else (uids.ctypes.data, len(uids))
        super().__init__(name.encode(), temporary.encode(), check_offset, allocate, *modes, *whose)


def save(
    dir_fd: int, paths: Sequence[str], batch: Transfer, place: int, headers: int, writing: Writing
) -> list[int]:
    """Write the files of chunks in memory unless they are there, by two threads if that pays.

    Args:
        dir_fd: the directory that the paths start from; no symbolic link is followed.
        paths: the chunks' directories, ``hh/name`` with ``hh`` there already, of equal length.
        batch: how each chunk lies in memory; of a recipe that takes whole files.
        place: the chunk place of the first one.
        headers: address of their headers, ``[files, header_nbytes]`` bytes, complete but for the
            checksums and the check (zeros). They are completed there.
        writing: how they are written.

    Gives up the GIL once. Returns for each file LEFT, PRESENT or WRITTEN; after the first that is
    LEFT at most one more is not. Nothing where there is no library, or where it cannot do that. A
    file appears under its name complete or not at all, as :meth:`vua.storage.base.Storage.publish`
    promises.
    """
    bound = library()
    if bound is None or batch.discard_nbytes or not paths:
        return []
    outcome = np.zeros(len(paths), dtype=np.uint8)
    names = [path.encode() + b"\0" for path in paths]
    nbytes = len(names) * batch.file_nbytes
    with crew.joined(large=len(names) > 1 and nbytes >= _SHARED_NBYTES) as threads:
        bound.save(
            *(ctypes.byref(batch), ctypes.byref(writing), dir_fd),
            *(b"".join(names), len(names[0]), len(names), place, headers),
            threads,
            outcome.ctypes.data,
        )
    return list(map(int, outcome))
