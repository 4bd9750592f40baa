"""Shares of the way from LRU to Belady: the table, independent simulators, agents' traces."""

from __future__ import annotations

import json
import unittest
from importlib.util import find_spec

from helpers import DirectoryTest
from lab.agents import converted
from lab.independent import compared
from lab.replay import Request, read
from lab.shares import PAGE, REGION, RESULTS, differing, text
from mixtures import mixture


class TestShares(DirectoryTest):
    """What is published."""

    def test_the_page(self) -> None:
        """The page shows what the file of results holds, and no independent number differs."""
        traces = json.loads(RESULTS.read_text())["traces"]
        shown = REGION.search(PAGE.read_text())
        assert shown is not None

        self.assertEqual(f"{shown[1]}{text(traces)}{shown[2]}", shown[0])
        self.assertEqual([], [one for trace in traces for one in differing(trace)])

    def test_agents(self) -> None:
        """Recorded texts become blocks whose ids stand for all of the text before them."""
        folder = self.root / "recorded"
        folder.mkdir()
        said = [("a" * 600, 3), ("a" * 512 + "b" * 300, 5), ("b" * 300, 4)]
        lines = [{"timestamp": 10**6 * time_s, "input": one} for one, time_s in said]
        (folder / "s.jsonl").write_text("\n".join(map(json.dumps, lines)))
        trace = self.root / "trace"
        trace.write_text("\n".join(map(json.dumps, converted(folder))))
        found = read(trace, block_tokens=64)

        self.assertEqual([(0, 1, 2), (3, 4), (0, 1, 5, 6)], [one.blocks for one in found])
        self.assertEqual([(0, 1), (3,), (0, 1, 5)], [one.whole for one in found])
        self.assertEqual([0.0, 1.0, 2.0], [one.time_s for one in found])
        self.assertEqual(["0"] * 3, [one.session for one in found])

    @unittest.skipUnless(
        find_spec("libcachesim") and find_spec("kvcache_sim"), "`dev.py shares` installs them"
    )
    def test_independent_simulators(self) -> None:
        """They find the same hits over generated traces."""
        for name in ("chat", "agents", "shift_scan"):
            requests = [
                Request(tuple(blocks), 512 * len(blocks), time_s)
                for time_s, blocks in mixture(name)[:400]
            ]
            rows = compared(requests, 512, [50, 500])
            pairs = [pair for row in rows for key, pair in row.items() if key != "blocks"]
            self.assertGreaterEqual(len(pairs), 2)
            self.assertEqual([], [pair for pair in pairs if round(pair[0] - pair[1], 9)])
