"""Files, classes and functions that the documentation names are there."""

from __future__ import annotations

import re
import unittest

from helpers import ROOT

NAMED = re.compile(r"`([\w./-]+\.(?:py|c|h|sh))(?:::?\s*([\w., *]+))?`")
PLACES = ("src", "tests", "benchmarks", "docs", "examples", "implementations", "bin")
ELSEWHERE = frozenset({"tests/v1/core/test_scheduler.py"})
"""What is vLLM's."""


class NamesTest(unittest.TestCase):
    def test_names(self) -> None:
        """Every file of ours that a page names exists, and holds what is named in it."""
        files = [ROOT / "dev.py", ROOT / "hatch_build.py"]
        files += [path for place in PLACES for path in (ROOT / place).rglob("*") if path.is_file()]
        known = {path.relative_to(ROOT).as_posix(): path for path in files}
        count = 0
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
            for name, inside in NAMED.findall(page.read_text("utf-8")):
                if name in ELSEWHERE:
                    continue
                count += 1
                with self.subTest(page=page.name, name=name, inside=inside):
                    found = [known[one] for one in known if f"/{one}".endswith(f"/{name}")]
                    self.assertTrue(found, "no such file")
                    text = "\n".join(one.read_text("utf-8") for one in found)
                    for word in re.split(r"[,\s]+", inside.strip()) if inside else []:
                        self.assertRegex(text, rf"\b{re.escape(word.split('.')[-1])}\b")
        self.assertLess(50, count)
