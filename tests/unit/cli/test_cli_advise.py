"""Mirrors `vua.capacity.simulation` and `vua advise`."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
import time
import unittest
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from commands import CliTest, run, run_json
from helpers import write_log
from vua.capacity.hit_density import Request
from vua.capacity.limits import Limits, write_bounds
from vua.capacity.simulation import Worth, worth
from vua.capacity.usage import measure
from vua.capacity.use_log import UseLog
from vua.storage.mark import UPKEEP, USES


def chunk(*place: int) -> str:
    """The name of some chunk."""
    return hashlib.sha256(str(place).encode()).hexdigest()


PROMPTS = [[chunk(number, 0), chunk(number, 1)] for number in range(4)]
TWICE_EACH = [PROMPTS[at // 2 % 4] for at in range(400)]
"""Each prompt is asked for twice, then the next one."""


class TestWorth(unittest.TestCase):
    """What the page of `vua ui` says of a day and a week."""

    def test_counted_by_hand(self) -> None:
        """Found: what was asked for before, also before the window; windows end now."""
        now, day = 1e9, 86_400.0
        prompts = [(now - 3 * day, [1, 2]), (now - 2 * day, [1, 2, 3]), (now - 60, [1, 2]),
                   (now - 30, [7]), (now - 20 * day, [9])]  # fmt: skip
        requests = sorted(Request(time_s, chunks) for time_s, chunks in prompts)
        found = worth(requests, 100, now, (day, 7 * day, 1.0))
        self.assertEqual([Worth(day, 2, 3, 2), Worth(7 * day, 4, 8, 4), Worth(1.0, 0, 0, 0)], found)
        self.assertEqual([Worth(day, 0, 0, 0)], worth([], 100, now, (day,)))

    def test_room(self) -> None:
        """Where one chunk has room, another prompt in between takes its place."""
        requests = [Request(1.0 + n, [1 + n % 2]) for n in range(100)]
        (small,), (large,) = (worth(requests, room, 200.0, (1e3,)) for room in (1, 2))
        self.assertEqual((100, 98), (large.chunks, large.found_chunks))
        self.assertLess(small.found_chunks, 60)

    def test_sample(self) -> None:
        """Of many chunks a sample is simulated, and its errors are small."""
        names = [int(chunk(n)[:16], 16) for n in range(20_000)]
        requests = [Request(1.0 + n, names[50 * (n % 400) :][:50]) for n in range(800)]
        (found,) = worth(requests, 1 << 20, 1e4, (1e6,))
        self.assertEqual(40_000, found.chunks)
        self.assertAlmostEqual(0.5, found.found_chunks / found.chunks, delta=0.02)


class TestAdvise(CliTest):
    """`vua advise`."""

    def setUp(self) -> None:
        """Have room for four chunks, two prompts, and an empty log."""
        super().setUp()
        shutil.rmtree(self.root / UPKEEP / USES)
        self.room(4)

    def room(self, chunks: int) -> None:
        """Bound the directory."""
        usage = measure(self.root)
        self.chunk_nbytes = usage.nbytes / usage.chunks
        most = round(self.chunk_nbytes * chunks) + 1
        write_bounds(self.root, Limits(max_bytes=most, min_free_bytes=0))

    def log(self, prompts: Iterable[Sequence[str]]) -> None:
        """Have requests in the log, a second apart."""
        write_log(self.root, [(1e9 + number, one) for number, one in enumerate(prompts)])

    def report(self, *more: str) -> dict[str, Any]:
        """What the command says to programs."""
        code, report = run_json("advise", self.root, *more)
        self.assertEqual((0, 1), (code, report["version"]))
        return dict(report)

    def test_counted_by_hand(self) -> None:
        """A store of one chunk finds half of each second request, of two to four all of it."""
        self.log(TWICE_EACH)
        report = self.report()
        names = ("requests", "chunks", "distinct_chunks", "first_s", "last_s", "sample_share")
        self.assertEqual((400, 800, 8, 1e9, 1e9 + 399, 1), tuple(report[one] for one in names))
        rooms = report["rooms"]
        self.assertEqual([0.25, 0.5, 1, 2, None], [one["share"] for one in rooms])
        self.assertEqual([0.25, 0.5, 0.5, 1, 1], [one["hit_ratio"] for one in rooms])
        self.assertEqual([0.25, 0.5, 0.5, 1, 1], [one["lru_hit_ratio"] for one in rooms])
        each = round(self.chunk_nbytes)
        self.assertEqual([each, each, each, 0, 0], [one["written_per_hit_nbytes"] for one in rooms])
        sizes = [round(self.chunk_nbytes * chunks) for chunks in (1, 2, 4, 8, 8)]
        self.assertEqual(sizes, [one["nbytes"] for one in rooms])
        advice = [
            "Twice the space would find 100 % more.",
            "Half the space would find about as much.",
        ]
        self.assertEqual(advice, report["advice"])

    def test_text(self) -> None:
        """People get a table, and the advice as the last line."""
        self.log(TWICE_EACH)
        code, out, _ = run("advise", self.root)
        lines = out.splitlines()
        self.assertEqual((0, 3 + 5), (code, len(lines) - 1))
        self.assertIn("400 requests for 800 chunks (8 different)", lines[0])
        self.assertRegex(out, r"(?m)^2 x +\S+ \S+ +100\.0 % +100\.0 % +0 B$")
        self.assertRegex(lines[-1], "^Twice the space would find 100 % more. Half the space")

    def test_all_fits(self) -> None:
        """Where all fits in a quarter of the room nothing can be said of more."""
        self.room(32)
        self.log(TWICE_EACH)
        report = self.report()
        self.assertEqual([0.25, None], [one["share"] for one in report["rooms"]])
        self.assertIn("cannot bring more hits", report["advice"][0])
        self.assertEqual("Half the space would find about as much.", report["advice"][1])

    def test_limit_of_engines(self) -> None:
        """What engines are told counts where it is stricter; it has to be a size."""
        self.log(TWICE_EACH)
        report = self.report("--max-bytes", f"{round(2 * self.chunk_nbytes) + 1}B")
        self.assertEqual([0.5, 1, 2, 4, None], [one["share"] for one in report["rooms"]])
        self.assertEqual(2, run("advise", self.root, "--max-bytes", "much")[0])

    def test_the_log_of_processes(self) -> None:
        """What processes write is what is counted."""
        log = UseLog(self.root)
        for prompt in TWICE_EACH:
            log.append(prompt)
        report = self.report()
        self.assertEqual((400, 8), (report["requests"], report["distinct_chunks"]))
        self.assertAlmostEqual(time.time(), report["last_s"], delta=60)

    def test_too_little(self) -> None:
        """Without a log, or with a short one, that is said; so it is where nothing is stored."""
        for requests in ([], TWICE_EACH[:199]):
            self.log(requests)
            report = self.report()
            self.assertEqual(([], len(requests)), (report["rooms"], report["requests"]))
            self.assertIn("Too little", run("advise", self.root)[1])
        self.log(TWICE_EACH)
        self.assertEqual(0, run("rm", self.root, "--all", "--yes")[0])
        self.assertIn("Nothing is stored", self.report()["advice"][0])

    def test_no_directory(self) -> None:
        """A bucket, and what is not there, are refused with a word on what to do."""
        code, _, err = run("advise", "s3://bucket/cache")
        self.assertEqual(2, code)
        self.assertIn("name the one before the bucket", err)
        self.assertEqual(2, run("advise", self.root / "absent")[0])

    def test_no_tree(self) -> None:
        """Requests that contradict each other are passed over: no store could hold them."""
        (a, b), (c, d) = PROMPTS[:2]
        broken = [[b, a], [a, a], [a, c], [a, b, d], [d, c], []]
        self.log([*TWICE_EACH, *broken * 50])
        self.assertEqual(400, self.report()["requests"])

    @pytest.mark.thorough
    def test_a_million_chunks(self) -> None:
        """A sample of the chunks finds what all of them do."""
        chance, records, asked = random.Random(5), [], 0
        tree: dict[int, list[int]] = {}
        while asked < 1_000_000:
            number = min(20_000, int(chance.paretovariate(0.5)))
            names = tree.setdefault(number, [chance.getrandbits(64) for _ in range(40)])
            asked += len(names)
            records.append((len(records), names))
        folder = self.root / UPKEEP / USES
        folder.mkdir(parents=True)
        for at in range(0, len(records), 3000):
            some = (struct.pack("<QI40Q", int((1e9 + n) * 1e6), 40, *names)
                    for n, names in records[at : at + 3000])  # fmt: skip
            (folder / f"{at:016x}.uses").write_bytes(b"VUAuses1" + b"".join(some))
        self.room(40 * 200)
        report = self.report()
        self.assertEqual((1_000_000, 40 * len(tree)), (asked, report["distinct_chunks"]))
        self.assertLess(report["sample_share"], 0.02)
        hits, counted = 0, records[len(records) // 4 :]
        seen = {id(names) for _, names in records[: len(records) // 4]}
        for _, names in counted:
            hits += id(names) in seen
            seen.add(id(names))
        self.assertAlmostEqual(hits / len(counted), report["rooms"][-1]["hit_ratio"], delta=0.03)
        self.assertIn("a sample, 1.6 % of the chunks", run("advise", self.root)[1])
        self.assertTrue(json.dumps(report).isascii())


if __name__ == "__main__":
    unittest.main()
