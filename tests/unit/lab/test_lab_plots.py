"""Mirrors `lab.plots`: a page with plots of what was measured."""

from __future__ import annotations

import contextlib
import io
from html.parser import HTMLParser

from helpers import ROOT, DirectoryTest
from lab.__main__ import main


class Elements(HTMLParser):
    """Counts a page's elements; all that are opened are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.links += [name for name, _ in attrs if name in ("src", "href")]
        self.open += [tag] if tag not in ("meta", "!doctype") else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag


def elements(text: str) -> Elements:
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
