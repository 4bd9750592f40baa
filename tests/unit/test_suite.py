"""`dev.py bench`: the arithmetic, the checks inside, and every benchmark once in its tiny form."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from helpers import ROOT, DirectoryTest, flip
from speed import MeasurementError
from suite.__main__ import main
from suite.context import Settings
from suite.loads import Stored
from suite.measure import Arm, Row, measure
from suite.prompts import TINY, make
from suite.report import markdown, plots
from suite.run import NUMBERS, run
from vua.errors import InputError

WORKER = ROOT / "benchmarks" / "peers" / "worker.py"


def quiet(_line: str) -> None:
    """Show nothing."""


def command(*words: str) -> tuple[int, str]:
    """Run the suite in this process; return its exit code and what it printed."""
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
        _, first = command(*words)
        code, again = command("report", str(out), "--plots", str(drawn))

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
