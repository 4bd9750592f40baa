"""Which blocks of an engine hold what was computed with which weights."""

from __future__ import annotations

import unittest

from vua.connector.adapters import Adapter
from vua.connector.save_scheduler import MIXED, Origin, Origins


class OriginsTest(unittest.TestCase):
    def test_blocks_of_before(self) -> None:
        """What begins with blocks of other weights is mixed, and so is what begins with that."""
        origins, now = Origins((16,)), Origin(1)
        self.assertTrue(origins.begins([[1, 2, 3]], 0, Origin()))
        self.assertTrue(origins.begins([[1, 2, 4]], 32, Origin()))
        self.assertFalse(origins.begins([[1, 2, 5]], 32, now))
        self.assertFalse(origins.begins([[5, 6]], 16, now))
        self.assertTrue(origins.begins([[7, 8]], 0, now))
        self.assertTrue(origins.begins([[7, 8, 9]], 32, now))
        origins.computes([8], MIXED)
        self.assertFalse(origins.begins([[7, 8, 9]], 32, now))
        self.assertFalse(origins.begins([[10]], 0, MIXED))
        self.assertFalse(origins.begins([[10, 11]], 16, MIXED))
        self.assertTrue(origins.begins([[0, 12]], 16, now))  # freed behind a window
        self.assertFalse(origins.begins([[12]], 16, Origin(1, Adapter(1, "d", 0))))
