"""Ordinary reads in cuFile's place, for tensors on the CPU."""

from __future__ import annotations

import os

import torch


class PosixMover:
    name = "posix"

    def attach(self, memory: torch.Tensor) -> None:
        """Do nothing."""

    def detach(self, memory: torch.Tensor) -> None:
        """Do nothing."""

    def open(self, fd: int) -> int:
        return os.dup(fd)

    def read(self, handle: int, memory: torch.Tensor, at: int, nbytes: int, offset: int) -> int:
        return os.preadv(handle, [memory.numpy()[at : at + nbytes]], offset)

    def close(self, handle: int) -> None:
        os.close(handle)
