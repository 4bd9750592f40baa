"""Mirrors `vua.io.memory`: memory is used again, and never while anybody holds it."""

from __future__ import annotations

import unittest

import torch

from vua.io.memory import BufferPool

MIB = 1 << 20


class TestBufferPool(unittest.TestCase):
    """What is lent, and when it comes back."""

    def test_held(self) -> None:
        """Whatever is made of a tensor keeps its memory from being lent."""
        for name, make in {
            "view": lambda t: t[100:200],
            "dtype": lambda t: t.view(torch.bfloat16).view(2, -1)[1],
            "array": lambda t: t.numpy()[5:],
            "storage": lambda t: t.untyped_storage(),
            "split": lambda t: list(t.split(MIB)[1:]),
            "alias": lambda t: t.detach(),
            "memoryview": lambda t: memoryview(t.numpy())[7:],
        }.items():
            with self.subTest(name):
                pool = BufferPool(64 * MIB)
                tensor = torch.from_numpy(pool.take(2 * MIB))
                place = tensor.data_ptr()
                kept = make(tensor)
                del tensor
                self.assertNotEqual(place, pool.take(2 * MIB).ctypes.data)
                del kept
                self.assertEqual(place, pool.take(2 * MIB).ctypes.data)  # the one used last

    def test_bound(self) -> None:
        """No more is kept than was said, the newest first; with 0, nothing."""
        pool = BufferPool(10 * MIB)
        lent = [pool.take(4 * MIB) for _ in range(4)]
        newest = lent[-1].ctypes.data
        while lent:
            del lent[0]
        self.assertEqual(8 * MIB, pool.idle_nbytes)
        self.assertEqual(newest, pool.take(4 * MIB).ctypes.data)
        pool.take(11 * MIB)
        self.assertEqual(8 * MIB, pool.idle_nbytes)
        nothing = BufferPool(0)
        nothing.take(4 * MIB)
        self.assertEqual(0, nothing.idle_nbytes)
