"""The ways of GPU memory, with tensors on the CPU."""

from __future__ import annotations

import unittest
from unittest import mock

import torch

from gpu.harness import PosixMover
from vua.connector import device_transfer
from vua.device.gds import CuFileMover


def mover(device: torch.device) -> PosixMover | CuFileMover:
    return PosixMover() if device.type == "cpu" else CuFileMover(device)


def on_cpu_too(test: unittest.TestCase) -> None:
    """Take the ways of GPU memory for tensors on the CPU, and ordinary reads for cuFile's."""
    test.enterContext(mock.patch.object(device_transfer, "CuFileMover", mover))
    test.enterContext(mock.patch.object(device_transfer, "STAGED_DEVICES", {"cuda", "cpu"}))
