"""The connector's metrics: recorded, taken, added up; their names, which the guide has all."""

from __future__ import annotations

import pickle
import re
import threading
import unittest

from helpers import ROOT
from vua.connector.metrics import METRICS, Recorder, Series, add_up

DOCUMENT = ROOT / "docs" / "metrics.md"


def recorder() -> Recorder:
    """A recorder in which one of each kind happened."""
    made = Recorder()
    made.add("vua_loaded_bytes_total", 100, "slab")
    made.add("vua_stored_tokens_total", 64)
    made.observe("vua_load_seconds", 0.5)
    made.set("vua_pending_saves", 3, "0")
    return made


def taken(from_: Recorder) -> Series:
    """What a recorder has, which must be something."""
    stats = from_.take()
    assert stats is not None
    return stats


class MetricsTest(unittest.TestCase):
    def test_add_up(self) -> None:
        """Counters add up, observations are joined, gauges keep the latest of each rank."""
        other = Recorder()
        other.add("vua_loaded_bytes_total", 11, "slab")
        other.add("vua_loaded_bytes_total", 7, "gds")
        other.observe("vua_load_seconds", 0.25)
        other.set("vua_pending_saves", 5, "0")
        other.set("vua_pending_saves", 9, "1")
        other.add("vua_lookups_total", label="hit")
        added = taken(other)
        before = pickle.dumps(added)

        total = taken(recorder())
        add_up(total, added)

        self.assertEqual(
            {
                "vua_loaded_bytes_total": {"slab": 111, "gds": 7},
                "vua_stored_tokens_total": {"": 64},
                "vua_load_seconds": {"": [0.5, 0.25]},
                "vua_pending_saves": {"0": 5, "1": 9},
                "vua_lookups_total": {"hit": 1},
            },
            total,
        )
        add_up(total, added)
        self.assertEqual(before, pickle.dumps(added), "the other one stays as it is")

    def test_threads(self) -> None:
        """Nothing is lost or counted twice while threads record and the engine takes."""
        shared, done = Recorder(), threading.Event()
        seen: Series = {}

        def work() -> None:
            for _ in range(2000):
                shared.add("vua_stored_tokens_total")
                shared.observe("vua_save_seconds", 1.0)

        def drain() -> None:
            while not done.is_set():
                if (stats := shared.take()) is not None:
                    add_up(seen, stats)

        taker = threading.Thread(target=drain)
        workers = [threading.Thread(target=work) for _ in range(4)]
        for thread in (taker, *workers):
            thread.start()
        for thread in workers:
            thread.join()
        done.set()
        taker.join()
        if (rest := shared.take()) is not None:
            add_up(seen, rest)

        self.assertEqual({"": 8000}, seen["vua_stored_tokens_total"])
        self.assertEqual(8000, len(seen["vua_save_seconds"][""]))

    def test_names(self) -> None:
        """Names follow Prometheus: counters end in _total, and only they do."""
        for name, metric in METRICS.items():
            with self.subTest(name=name):
                self.assertEqual(metric.kind == "counter", name.endswith("_total"))
                self.assertEqual(metric.kind == "histogram", name.endswith("_seconds"))

    @unittest.skipUnless(DOCUMENT.exists(), "not in a checkout")
    def test_documentation(self) -> None:
        """The guide names every metric, every value of its label, and no other metric."""
        text = DOCUMENT.read_text(encoding="utf-8")
        named = set(re.findall(r"`(vua_\w+)`", text))

        self.assertEqual(set(METRICS), named, "`dev.py docs` writes the table")
        for metric in METRICS.values():
            for value in metric.values:
                self.assertIn(f"`{value}`", text)
