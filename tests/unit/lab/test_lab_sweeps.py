"""What sweeps find of an exact order: the simulator, and the table."""

from __future__ import annotations

import json
import unittest

from lab.sweeps import PAGE, REGION, RESULTS, lowest, text


class TestSweeps(unittest.TestCase):
    """Small stores that count as large ones."""

    def test_the_page(self) -> None:
        """The page shows what the file of results holds, and no sweep finds less than 0.99."""
        traces = json.loads(RESULTS.read_text())["traces"]
        shown = REGION.search(PAGE.read_text())
        assert shown is not None

        self.assertEqual(f"{shown[1]}{text(traces)}{shown[2]}", shown[0])
        self.assertGreaterEqual(lowest(traces), 0.99)
        for trace in traces:
            self.assertTrue(all(room["blocks"] > 1 << 16 for room in trace["rooms"]))
