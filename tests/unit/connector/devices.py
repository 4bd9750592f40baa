"""The ways of GPU memory, with tensors on the CPU."""

from __future__ import annotations

import unittest
from unittest import mock

from vua.connector import device_transfer


def on_cpu_too(test: unittest.TestCase) -> None:
    """Take the ways of GPU memory for tensors on the CPU."""
    test.enterContext(mock.patch.object(device_transfer, "STAGED_DEVICES", {"cuda", "cpu"}))
