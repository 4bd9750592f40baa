"""`dev.py bench`: the arithmetic, the checks inside, and every benchmark once in its tiny form."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest

from helpers import ROOT, DirectoryTest, flip
from speed import MeasurementError
from suite.__main__ import main
from suite.context import Settings
from suite.loads import Stored
from suite.prompts import TINY, make
from suite.run import NUMBERS, run

WORKER = ROOT / "benchmarks" / "peers" / "worker.py"


def quiet(_line: str) -> None:
    """Show nothing."""


def command(*words: str) -> tuple[int, str]:
    """Run the suite in this process; return its exit code and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(words)
    return code, out.getvalue()


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
