"""Mirrors `lab.plots`: a page with plots of what was measured."""

from __future__ import annotations

import contextlib
import io
import json
import unittest
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import speed
from helpers import ROOT, DirectoryTest
from lab.__main__ import main
from lab.plots import page, plots_of, read

ONE: Final = {"low": 1.0, "high": 3.0}
TOKENS: Final = {
    "time to first token": {
        f"{length} tokens: {what}, s": {**ONE, "median": took}
        for length, took in ((256, 0.5), (4096, 8.0))
        for what in ("computed", "loaded", "own hit")
    }
}
HITS: Final = {
    "trace": "<trace>",
    "bounded": [
        {"policy": policy, "blocks": blocks, "hit_ratio": ratio}
        for policy, blocks, ratio in (("LRU", 100, 0.1), ("LRU", 10, 0.05), ("Belady", 10, 0.2))
    ],
}


class Elements(HTMLParser):
    """Counts a page's elements; all that are opened are closed."""

    def __init__(self) -> None:
        """Begin."""
        super().__init__()
        self.counts: dict[str, int] = {}
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.links += [name for name, _ in attrs if name in ("src", "href")]
        self.open += [tag] if tag not in ("meta", "!doctype") else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an empty element."""
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        """Close the latest."""
        assert self.open.pop() == tag, tag


def elements(text: str) -> Elements:
    """The elements of a page."""
    found = Elements()
    found.feed(text)
    found.close()
    return found


def lab(*words: object) -> tuple[int, str, str]:
    """Run `python -m lab` in this process; return exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as problem:
            code = int(problem.code or 0)
    return code, out.getvalue(), err.getvalue()


class ReportTest(DirectoryTest):
    def write(self, name: str, report: Any) -> Path:
        """A file with a report."""
        path = self.root / name
        path.write_text(json.dumps(report))
        return path

    def test_page(self) -> None:
        """All plots on one page, that is whole and asks for nothing from elsewhere."""
        files = [self.write("a", TOKENS), self.write("<b>", HITS)]
        out = self.root / "page.html"
        self.assertEqual((0, f"{out}: 2 plots\n", ""), lab("plots", *files, "--out", out))
        text = out.read_text()
        found = elements(text)
        self.assertEqual([], found.open)
        self.assertEqual((2, 3 + 2), (found.counts["svg"], found.counts["polyline"]))
        self.assertEqual(([], 0), (found.links, found.counts.get("script", 0)))
        self.assertIn("With a prefix of 4,096 tokens: 8.00 s computed, 8.000 s loaded", text)
        self.assertIn("&lt;trace&gt;", text)
        self.assertNotIn("<trace>", text)

    def test_places(self) -> None:
        """Points stand where their numbers say: sorted, the higher ratio higher up."""
        (plot,) = plots_of(HITS, "x")
        self.assertEqual([(10, 0.05), (100, 0.1)], plot.lines["LRU"])
        text = page([(plot, "x")])
        points = text.split('<polyline points="')[1].split('"')[0].split()
        (x1, y1), (x2, y2) = (tuple(map(float, one.split(","))) for one in points)
        self.assertLess(x1, x2)
        self.assertGreater(y1, y2)

    def test_path(self) -> None:
        """What `benchmarks/speed.py` writes becomes a plot of loading against computing."""
        directory = self.root / "d"
        directory.mkdir()
        out = self.root / "path.json"
        words = ["--model", "1000", "--prefill", "100", "--tiny", "--json", str(out)]
        with contextlib.redirect_stdout(io.StringIO()):
            speed.main([str(directory), *words])
        (plot,) = plots_of(read(out), "x")
        self.assertIn("compute", plot.lines)
        self.assertGreater(len(plot.lines), 1)
        self.assertEqual([], elements(page([(plot, "x")])).open)

    def test_unusable(self) -> None:
        """What is no report is named, with what is one."""
        out = self.root / "page.html"
        broken = {"time to first token": {"x tokens: computed, s": 1}}
        for report, expected in (({}, "nothing to plot"), ([], "expected a report"),
                                 (broken, "not as a benchmark writes it")):  # fmt: skip
            code, _, err = lab("plots", self.write("a", report), "--out", out)
            self.assertEqual(2, code)
            self.assertIn(expected, err)
        self.assertIn("--out", lab("plots", self.root / "a")[2])
        self.assertFalse(out.exists())

    def test_committed(self) -> None:
        """The measurements in the repository give the page in the documentation."""
        folder = ROOT / "docs" / "measurements"
        files = [folder / f"{name}.json" for name in ("gpu", "first-token", "path", "replay")]
        out = self.root / "page.html"
        words = ("--out", out, "--pictures", self.root)
        self.assertEqual(f"{out}: 4 plots\n", lab("plots", *files, *words)[1])
        made = "is not what its files give: see docs/measurements/README.md"
        self.assertTrue(out.read_text("utf-8") == (folder / "plots.html").read_text("utf-8"), made)
        pictures = sorted(self.root.glob("*.svg"))
        self.assertEqual(4, len(pictures))
        for one in pictures:
            text = one.read_text("utf-8")
            self.assertEqual([], elements(text).open)
            shown = (ROOT / "docs" / "images" / one.name).read_text("utf-8")
            self.assertTrue(text == shown, f"docs/images/{one.name} {made}")


if __name__ == "__main__":
    unittest.main()
