"""Mirrors `lab.plots`: a page with plots of what was measured."""

from __future__ import annotations

import contextlib
import io

from helpers import ROOT, DirectoryTest
from lab.__main__ import main


class ReportTest(DirectoryTest):
    def test_committed(self) -> None:
        """The measurements in the repository give the page in the documentation."""
        folder = ROOT / "docs" / "measurements"
        files = [folder / f"{name}.json" for name in ("gpu", "first-token", "path", "replay")]
        out, said = self.root / "page.html", io.StringIO()
        words = ["plots", *files, "--out", out, "--pictures", self.root]
        with contextlib.redirect_stdout(said):
            main([str(word) for word in words])
        self.assertEqual(f"{out}: 4 plots\n", said.getvalue())
        made = "is not what its files give: see docs/measurements/README.md"
        self.assertTrue(out.read_text("utf-8") == (folder / "plots.html").read_text("utf-8"), made)
        pictures = sorted(self.root.glob("*.svg"))
        self.assertEqual(4, len(pictures))
        for one in pictures:
            shown = (ROOT / "docs" / "images" / one.name).read_text("utf-8")
            self.assertTrue(one.read_text("utf-8") == shown, f"docs/images/{one.name} {made}")
