"""What pages say is as the code, the results and the help are; they do not grow."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import unittest
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import evaluation
import lab.shares
import lab.sweeps
import manpage
import model_classes
import olympics.page
import reference
from commands import run, verbs
from helpers import ROOT, DirectoryTest
from vua.cli.command import EXAMPLES
from vua.connector.config import ConnectorConfig, defaults
from vua.connector.metrics import METRICS, Metric
from vua.core import VUAConfig

DOCS = ROOT / "docs"
MEASURED = DOCS / "measurements"
NAMED = re.compile(r"`([\w./-]+\.(?:py|c|h|sh))(?:::?\s*([\w., *]+))?`")
PLACES = ("src", "tests", "benchmarks", "docs", "examples", "implementations", "bin")
ELSEWHERE = frozenset({"tests/v1/core/test_scheduler.py"})
"""What is vLLM's."""
MADE = re.compile(r"<!-- ([a-z]+).*? -->.*?<!-- /\1 -->", re.DOTALL)
"""What a program writes into a page."""
MOST_WORDS_OF_README, MOST_WORDS_OF_PAGES = 900, 29_500
"""Of docs/ without its decisions and what programs write. To add a page, shorten others."""
MOST_DECISIONS, MOST_WORDS_OF_A_DECISION = 30, 400
MOST_LINES_OF_PERFORMANCE = 350


class LengthTest(unittest.TestCase):
    def test_pages(self) -> None:
        """The README, all pages together, and the page of measurements do not grow."""

        def length(*chosen: Path) -> int:
            texts = [MADE.sub("", page.read_text("utf-8")) for page in chosen]
            return sum(len(re.findall(r"\S*\w\S*", text)) for text in texts)

        docs = [page for page in DOCS.rglob("*.md") if "decisions" not in page.parts]
        self.assertLessEqual(length(ROOT / "README.md"), MOST_WORDS_OF_README)
        self.assertLessEqual(length(*docs), MOST_WORDS_OF_PAGES)
        lines = (DOCS / "performance.md").read_text("utf-8").splitlines()
        self.assertLessEqual(len(lines), MOST_LINES_OF_PERFORMANCE)

    def test_decisions(self) -> None:
        """Few records, each short: one subject, one record; what names one finds it."""
        records = sorted((DOCS / "decisions").glob("*.md"))
        self.assertLessEqual(len(records), MOST_DECISIONS, "merge two that have one subject")
        for path in records:
            words = path.read_text("utf-8").split()
            self.assertLessEqual(len(words), MOST_WORDS_OF_A_DECISION, path.name)
            self.assertEqual(["#", path.name[:4]], words[:2], path.name)
        names = {path.name for path in records} | {path.name[:4] for path in records}
        for path in [one for folder in PLACES for one in (ROOT / folder).rglob("*.*")]:
            if path.suffix in (".py", ".md", ".c", ".h", ".js", ".html"):
                text = path.read_text("utf-8")
                named = set(re.findall(r"decisions/(\d{4}(?:-[a-z\d-]+\.md)?)", text))
                self.assertLessEqual(named, names, path.relative_to(ROOT))


class NamesTest(unittest.TestCase):
    def test_names(self) -> None:
        """Every file of ours that a page names exists, and holds what is named in it."""
        files = [ROOT / "dev.py", ROOT / "hatch_build.py"]
        files += [path for place in PLACES for path in (ROOT / place).rglob("*") if path.is_file()]
        known = {path.relative_to(ROOT).as_posix(): path for path in files}
        for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
            for name, inside in set(NAMED.findall(page.read_text("utf-8"))):
                with self.subTest(page=page.name, name=name, inside=inside):
                    found = [known[one] for one in known if f"/{one}".endswith(f"/{name}")]
                    self.assertTrue(found or name in ELSEWHERE, "no such file")
                    text = "\n".join(one.read_text("utf-8") for one in found)
                    for word in re.split(r"[,\s]+", inside.strip()) if inside else []:
                        self.assertRegex(text, rf"\b{re.escape(word.split('.')[-1])}\b")

    def test_models(self) -> None:
        """Every test that a row of docs/models.md names is in its file."""
        for row in model_classes.ROWS:
            for test in row.tests.values():
                module, *inside = test.split("::")
                tree = ast.parse((ROOT / module).read_text("utf-8"))
                names = {getattr(one, "name", "") for one in ast.walk(tree)}
                self.assertLessEqual({inside[0], inside[1].partition("[")[0]}, names, test)


class ResultsTest(DirectoryTest):
    """Tables of measurements are what the files of results give."""

    def results(self, name: str) -> Any:
        return json.loads((MEASURED / f"{name}.json").read_text("utf-8"))

    def test_tables(self) -> None:
        """Of each page that a program writes parts of."""
        shares, sweeps = (self.results(one)["traces"] for one in ("policies", "sweeps"))
        report = self.results("olympics")
        made = [
            (olympics.page.PAGE, olympics.page.REGIONS[name], text)
            for name, text in olympics.page.made_of(report).items()
        ]
        made += [
            (model_classes.PAGE, model_classes.region("models"), model_classes.text()),
            (lab.shares.PAGE, lab.shares.REGION, lab.shares.text(shares)),
            (lab.sweeps.PAGE, lab.sweeps.REGION, lab.sweeps.text(sweeps)),
        ]
        for page, region, text in made:
            shown = region.search(page.read_text("utf-8"))
            assert shown is not None
            self.assertTrue(f"{shown[1]}{text}{shown[2]}" == shown[0], f"{page}, {region}")
        whole = evaluation.PAGE.read_text("utf-8")
        self.assertTrue(evaluation.page(self.results("evaluation")) == whole, evaluation.PAGE)
        self.assertEqual([], [one for trace in shares for one in lab.shares.differing(trace)])
        self.assertGreaterEqual(lab.sweeps.lowest(sweeps), 0.99)


class ReferenceTest(unittest.TestCase):
    def test_pages(self) -> None:
        """Tables of settings, metrics and errors are what would be made of the code now."""
        used = set()
        for page in reference.pages():
            text = page.read_text("utf-8")
            used |= {found[1] for found in reference.REGION.finditer(text)}
            wrong = "is not as the code says: run `python3 dev.py docs`"
            self.assertTrue(reference.filled(text) == text, f"{page.name} {wrong}")
        self.assertEqual(set(reference.TABLES), used)
        text = (DOCS / "metrics.md").read_text("utf-8")
        with mock.patch.dict(METRICS, {"vua_new_total": Metric("counter", "What is new.")}):
            self.assertIn("`vua_new_total`", reference.filled(text))  # control

    def test_no_setting_is_missing(self) -> None:
        """Every setting of connector and library, and every metric, has its row."""

        def names(page: str) -> set[str]:
            text = (DOCS / page).read_text("utf-8")
            return set(re.findall(r"^- `([^`]+)` \(", text, re.MULTILINE))

        inner = set(defaults())
        groups = {one.partition(".")[0] for one in inner if "." in one}
        every = {one.name for one in fields(ConnectorConfig)} - groups | inner
        self.assertLessEqual(every | set(VUAConfig._FIELDS), names("settings.md"))
        self.assertEqual(set(METRICS), names("metrics.md"))


class ManPageTest(DirectoryTest):
    def test_all_is_told(self) -> None:
        """Each command's arguments, options and examples are in it; groff renders it."""
        file = self.root / "man" / "vua.1"
        manpage.main(str(file))
        page = file.read_text("utf-8").replace("\\-", "-")
        told = [part.partition("\n") for part in re.split(r"^\.SS ", page, flags=re.MULTILINE)]
        by_name = {head.split()[1]: body for head, _, body in told[1:]}
        self.assertEqual(verbs(), by_name.keys())
        for name, body in by_name.items():
            shown = run(name, "--help")[1]
            for words in re.findall(r"^  (--?\w[\w-]*)", shown, re.MULTILINE):
                self.assertRegex(body, rf"\n\\fB[^\n]*{words}\b")
            for line in EXAMPLES[name]:
                self.assertIn(f"\n{line}\n", body)
        if groff := shutil.which("groff"):
            words = [groff, "-man", "-Tascii", "-ww", str(file)]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            self.assertEqual((0, ""), (done.returncode, done.stderr))
