"""Hashes and writes batches of entry files by `save.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vua.native import fallback
from vua.native.batches import crew
from vua.native.chosen import library
from vua.native.transfer import FAILED, PRESENT, WRITTEN, Transfer, WriteOptions

__all__ = ["FAILED", "PRESENT", "WRITTEN", "WriteOptions", "write_entries"]


def write_entries(
    transfer: Transfer,
    dir_fd: int,
    paths: Sequence[str],
    place: int,
    headers: npt.NDArray[np.uint8],
    options: WriteOptions,
) -> list[int]:
    """Write the files of chunks in memory unless they are there, by several threads if that pays.

    Args:
        transfer: how each chunk lies in memory; of a plan for whole files.
        dir_fd: the directory that the paths start from; no symbolic link is followed.
        paths: the chunks' directories, ``hh/name``, of equal length; made where they are missing.
        place: the chunk place of the first one.
        headers: ``[files, header_nbytes]``, rows without gaps. Where the options have a
            ``check_offset`` the checksums and the check are filled in there.
        options: how they are written.

    Gives up the GIL once. Returns for each file PRESENT (one of that length is there), WRITTEN, or
    a negative errno where that failed; 0 for those behind it that were not tried. A file appears
    under its name complete or not at all.
    """
    bound = library()
    if bound is None or options.durable:  # fsync takes longer than all that C could save
        return fallback.write_entries(transfer, dir_fd, paths, place, headers, options)
    statuses = np.zeros(len(paths), dtype=np.int32)
    names = [path.encode() + b"\0" for path in paths]
    nbytes = len(names) * transfer.file_nbytes
    with crew.joined(nbytes if len(names) > 1 else 0) as threads:
        bound.save(
            *(ctypes.byref(transfer), ctypes.byref(options), dir_fd),
            *(b"".join(names), len(names[0]), len(names), place, headers.ctypes.data),
            threads,
            statuses.ctypes.data,
        )
    found: list[int] = statuses.tolist()
    return found
