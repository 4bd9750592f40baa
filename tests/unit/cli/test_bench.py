"""`vua bench`: the arithmetic, the checks inside, and every benchmark once in its tiny form."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import time
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree as ET

import pytest

from helpers import ROOT, DirectoryTest, flip
from vua.bench.context import Settings
from vua.bench.loads import Stored
from vua.bench.measure import Arm, MeasurementError, Row, measure
from vua.bench.path import Demand, Speed, _worth, probe
from vua.bench.prompts import TINY, make
from vua.bench.replay import (
    Request,
    block_file_nbytes,
    lru,
    multi_round,
    read,
    replay,
)
from vua.bench.report import markdown, plots
from vua.bench.suite import NUMBERS, run
from vua.capacity.evictor import Evictor, Freed
from vua.cli import main
from vua.errors import InputError
from vua.store.store import Store

WORKER = ROOT / "benchmarks" / "peers" / "worker.py"


def quiet(_line: str) -> None:
    """Show nothing."""


def command(*words: str) -> tuple[int, str]:
    """Run `vua` in this process; return its exit code and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(words)
    return code, out.getvalue()


class TestMeasure(unittest.TestCase):
    """Turns and ratios."""

    def test_turns(self) -> None:
        """Each round runs every arm once and the limit twice, ready before each, warmed up."""
        calls: list[str] = []
        arms = {
            name: Arm(lambda name=name: calls.append(name), lambda: calls.append("ready"))
            for name in ("limit", "other")
        }
        timings = measure(arms, "limit", 3)

        self.assertEqual(4 * 2, calls.count("limit"))
        self.assertEqual(4, calls.count("other"))
        self.assertEqual(["ready"] * 12, calls[::2])
        self.assertEqual([3, 3, 3], [len(times) for times in timings.seconds.values()])

    def test_order_changes(self) -> None:
        """No arm always follows the same one."""
        calls: list[str] = []
        arms = {name: Arm(lambda name=name: calls.append(name)) for name in "abc"}
        measure(arms, "a", 20)
        rounds = {tuple(calls[at : at + 4]) for at in range(0, len(calls), 4)}

        self.assertGreater(len(rounds), 3)

    def test_ratio(self) -> None:
        """Speed and cost are each other's inverse, and both come from the arms' own times."""
        timings = measure({"limit": Arm(lambda: 0.5), "slow": Arm(lambda: 2.0)}, "limit", 3)
        speed = timings.row("C1", "case", "slow", "limit", nbytes=4_000_000_000, target=0.9)
        cost = timings.row("C1", "case", "slow", "limit", target=4.0, better="lower")

        self.assertEqual((0.25, 2000.0, 2.0), (speed.ratio, speed.ms, speed.gb_s))
        self.assertEqual((False, True), (speed.met, cost.met))
        self.assertEqual((4.0, 1.0), (cost.ratio, cost.noop))

    def test_noise_is_marked(self) -> None:
        """A no-op arm that is off by more than a tenth marks the row."""
        times = iter([1.0, 1.5] * 100)
        noisy = measure({"limit": Arm(lambda: next(times))}, "limit", 1, warm=False)
        row = noisy.row("C1", "case", "limit", "limit")

        self.assertTrue(row.noisy)
        self.assertFalse(replace(row, noop=1.05).noisy)


class TestChecks(DirectoryTest):
    """A number for wrong bytes would mean nothing."""

    def test_damage_stops_the_measurement(self) -> None:
        """An arm that loads less than was stored raises; the sound one does not."""
        stored = Stored(self.root, TINY[0])
        memory = make("staged", TINY[0])
        load = stored.loader(memory)
        stored.check(memory, load)
        flip(Path(stored.paths[1]), 5000)

        with self.assertLogs("vua", "WARNING"), self.assertRaises(MeasurementError):
            stored.check(memory, load)

    def test_other_bytes_stop_the_measurement(self) -> None:
        """A load that brings nothing is not taken for one that brings what was stored."""
        stored = Stored(self.root, TINY[0])
        for place in ("dense", "paged", "staged"):
            memory = make(place, TINY[0])
            with self.subTest(place=place), self.assertRaises(MeasurementError):
                stored.check(memory, lambda: None)


class TestReplay(DirectoryTest):
    """Traces through the real store."""

    def test_hits_are_ideal(self) -> None:
        """An unbounded store serves every block that was there before, and writes each once."""
        requests = multi_round(users=3, rounds=4, blocks=2)
        done = replay(self.root, requests, quiet)
        unique = {block for request in requests for block in request.whole}

        self.assertEqual(done.ideal_blocks, done.hit_blocks)
        self.assertEqual(len(unique), done.written_blocks)
        self.assertEqual(done.blocks, done.hit_blocks + done.written_blocks)

    def test_bounded(self) -> None:
        """With little room a store hits less than the ideal, and keeps to its room."""
        requests = multi_round(users=6, rounds=4, blocks=3)
        room = 30 * block_file_nbytes()
        done = replay(self.root, requests, quiet, max_bytes=room)

        self.assertLess(0, done.hit_blocks)
        self.assertLess(done.hit_blocks, done.ideal_blocks)
        self.assertLess(sum(path.stat().st_size for path in self.files()), 1.05 * room)

    def test_damage_stops_the_replay(self) -> None:
        """Control: a block that does not load as what was stored is no hit."""
        requests = [Request((1, 2, 3), 1536)]
        replay(self.root, requests, quiet)
        flip(self.files()[0], 4200)

        with self.assertLogs("vua", "WARNING"), self.assertRaises(MeasurementError):
            replay(self.root, requests, quiet)

    def test_evicted_after_the_lookup(self) -> None:
        """What is evicted between lookup and load is a miss that is shown; the run goes on."""
        requests = [Request(tuple(range(20)), 20 * 512)] * 3  # one prompt, nearly all of the room
        evicted: list[Freed] = []
        look_up = Store.lookup

        def then_evict(store: Store, *keys: Any) -> int:
            found = look_up(store, *keys)
            if found == 20 and not evicted:  # the tail of what was found, which is the oldest
                evictor = Evictor(self.root)
                evicted.append(evictor.evict(5 * block_file_nbytes(), time.time_ns()))
            return found

        with mock.patch.object(Store, "lookup", then_evict):
            done = replay(self.root, requests, quiet, max_bytes=22 * block_file_nbytes())

        self.assertEqual([5], [freed.chunks for freed in evicted])
        self.assertEqual((35, 5, 0), (done.hit_blocks, done.vanished_blocks, done.refused_blocks))
        self.assertEqual((25, 40), (done.written_blocks, done.ideal_blocks))

    def test_vanished_without_bounds(self) -> None:
        """Control: where nothing may be evicted a block that is gone stops the replay."""
        look_up = Store.lookup

        def then_delete(store: Store, *keys: Any) -> int:
            found = look_up(store, *keys)
            if found:
                self.files()[0].unlink()
            return found

        with (
            mock.patch.object(Store, "lookup", then_delete),
            self.assertRaisesRegex(MeasurementError, "missing"),
        ):
            replay(self.root, [Request((1, 2, 3), 1536)] * 2, quiet)

    def test_lru(self) -> None:
        """LRU with room for everything is ideal; with little room, what fits is found again."""
        requests = multi_round(users=2, rounds=2, blocks=1)  # 0 1, 0 2, 0 1 3, 0 2 4

        self.assertEqual(5 / 10, lru(requests, 100))
        self.assertEqual(0.0, lru([Request((n,), 512) for n in (1, 2, 1)], 1))
        self.assertEqual(1 / 3, lru([Request((n,), 512) for n in (1, 2, 1)], 2))

    def test_trace_files(self) -> None:
        """A trace is read as its format says; anything else is refused with its line."""
        trace = self.root / "trace"
        trace.write_text('{"hash_ids": [4, 9], "input_length": 600}\n' * 3)
        bad = self.root / "bad"
        bad.write_text('{"hash_ids": [1], "input_length": 512}\n{"hash": 3}\n')

        self.assertEqual([(4,)] * 2, [request.whole for request in read(trace, 2)])
        with self.assertRaisesRegex(InputError, "bad, line 2"):
            read(bad)

    def test_command(self) -> None:
        """The command replays a trace and says what LRU would have reached."""
        trace = self.root / "trace"
        lines = [
            {"hash_ids": list(r.blocks), "input_length": r.tokens} for r in multi_round(2, 2, 1)
        ]
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, text = command("bench", "replay", str(trace), "--json")
        report = json.loads(text)

        self.assertEqual(0, code)
        self.assertEqual((0.5, 0.5), (report["hit_ratio"], report["bounded"][0]["LRU, simulated"]))


class TestPath(DirectoryTest):
    """What a directory can do."""

    def test_probe(self) -> None:
        """It measures writes and warm reads of every size, and leaves nothing behind."""
        report = probe(self.root, Demand("m", 1024, 100.0), quiet, tiny=True)
        ways = {speed["what"] for speed in report["bandwidth"]}  # type: ignore[attr-defined]

        self.assertLessEqual({"write", "read, warm"}, ways)
        costs = report["write_cpu_ms_per_mib"]
        self.assertLessEqual({"new files", "written again"}, costs.keys())  # type: ignore[attr-defined]
        self.assertEqual([], list(self.root.iterdir()))

    def test_worth_loading(self) -> None:
        """Loading pays above the bytes that prefill makes per second, from a fixed cost on."""
        demand = Demand.of("Llama-3.1-8B", 10_000)
        rates = {"lookup, found, p99": 100.0, "open and close": 0.0}

        def cases(gb_s: float) -> dict[str, object]:
            speed = Speed("read, warm", 1 << 20, 1, gb_s, gb_s, gb_s)
            (case,) = _worth(demand, [speed], rates)["cases"]  # type: ignore[misc]
            return case

        fixed = 22 * 100e-6  # 2 log2(131072 / 64) lookups
        gain = 1 / 10_000 - 131072 / 2e9
        self.assertIsNone(cases(1.3)["worth_from_tokens"])
        self.assertAlmostEqual(fixed / gain, cases(2.0)["worth_from_tokens"], delta=1)  # type: ignore[arg-type]

    def test_models(self) -> None:
        """Bytes per token follow from the model, its ranks, or are given."""
        self.assertEqual(131072, Demand.of("Llama-3.1-8B", 1).token_nbytes)
        self.assertEqual(16384, Demand.of("Llama-3.1-8B", 1, ranks=8).token_nbytes)
        self.assertEqual(70272, Demand.of("DeepSeek-V3", 1, ranks=8).token_nbytes)
        self.assertEqual(5, Demand.of("5", 1).token_nbytes)
        with self.assertRaisesRegex(InputError, "Llama-3.1-8B"):
            Demand.of("unheard", 1)

    def test_command(self) -> None:
        """The command prints bandwidths, metadata and what is worth loading."""
        words = ("--tiny", "--path", str(self.root), "--model", "Qwen3-8B", "--prefill", "1000")
        code, text = command("bench", *words)

        self.assertEqual(0, code)
        for expected in ("read, warm", "lookup, found", "worth from tokens", "GPU-direct"):
            self.assertIn(expected, text)


class TestSuite(DirectoryTest):
    """Every benchmark once, tiny, with its checks; the slow test here, about half a minute."""

    @pytest.mark.thorough
    def test_all(self) -> None:
        """The suite runs; every number is measured or says why not; peers take their turns."""
        peers = (sys.executable, str(WORKER), "raw", "safetensors", "torch")
        report = run(Settings(self.root, tiny=True, peers=peers), quiet)
        rows: list[dict[str, object]] = report["rows"]  # type: ignore[assignment]
        skipped = {one["id"] for one in report["unmeasured"]}  # type: ignore[attr-defined]

        self.assertEqual(set(NUMBERS), {row["id"] for row in rows} | skipped - {"C1-C3"})
        self.assertTrue({"C5", "C6"} >= skipped - {"C1-C3", "C2", "C3"})
        arms = {str(row["arm"]) for row in rows}
        self.assertLessEqual({"peer: safetensors", "peer: torch.save and load"}, arms)
        self.assertEqual([], list(self.root.iterdir()))

    def test_unknown_number(self) -> None:
        """A number that is not in the suite is named, with those that are."""
        with self.assertRaisesRegex(InputError, "C99.*C1"):
            run(Settings(self.root, tiny=True, only=["C99"]), quiet)

    def test_report_command(self) -> None:
        """A saved report gives the same table again, and plots."""
        out, drawn = self.root / "report.json", self.root / "plots"
        words = ("--tiny", "--only", "C12", "--dir", str(self.root), "--out", str(out))
        _, first = command("bench", *words)
        code, again = command("bench", "report", str(out), "--plots", str(drawn))

        self.assertEqual(0, code)
        self.assertIn("| C12 |", first)
        self.assertIn(first, again)
        self.assertEqual(["C12.svg"], [path.name for path in drawn.iterdir()])


class TestReport(unittest.TestCase):
    """The table and the charts."""

    def test_table_and_plots(self) -> None:
        """Each row is a line and a bar, the target a mark; names are escaped."""
        row = Row("C1", "a <case>", "load", "raw & fast", 0.5, 0.4, 0.6, target=0.9)
        missed, met = row.describe(), replace(row, ratio=0.95, high=1.0).describe()
        report = {
            "machine": {"cpu": "x"}, "tiny": False, "numbers": {"C1": "warm load"},
            "rows": [missed, met], "unmeasured": [{"id": "C2", "what": "w", "reason": "why"}],
        }  # fmt: skip
        text = markdown(report)
        with tempfile.TemporaryDirectory() as name:
            (path,) = plots(report, Path(name))
            tree = ET.fromstring(path.read_text())

        self.assertIn(">= 0.9 | missed |", text)
        self.assertIn(">= 0.9 | met |", text)
        self.assertIn("- C2 w: why", text)
        bars = [one for one in tree.iter() if one.tag.endswith("rect")]
        self.assertEqual(1 + 2, len(bars))


if __name__ == "__main__":
    unittest.main()
