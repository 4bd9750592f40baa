"""The tables of the documentation that are made from the code are as the code is."""

from __future__ import annotations

import re
import unittest
from dataclasses import fields
from unittest import mock

import reference
from vua.config import VUAConfig
from vua.connector.config import ConnectorConfig, defaults
from vua.connector.metrics import METRICS, Metric


def names(page: str) -> set[str]:
    text = (reference.DOCS / page).read_text("utf-8")
    return set(re.findall(r"^- `([^`]+)` \(", text, re.MULTILINE))


class ReferenceTest(unittest.TestCase):
    def test_pages(self) -> None:
        """Every page holds the tables that would be made now."""
        used = set()
        for page in reference.pages():
            text = page.read_text("utf-8")
            used |= {found[1] for found in reference.REGION.finditer(text)}
            with self.subTest(page=page.name):
                wrong = "is not as the code says: run `python3 dev.py docs`"
                self.assertTrue(reference.filled(text) == text, f"{page.name} {wrong}")
        self.assertEqual(set(reference.TABLES), used)

    def test_no_setting_is_missing(self) -> None:
        """Every setting of connector and library, and every metric, has its row."""
        settings = names("settings.md")
        inner = set(defaults())
        groups = {one.partition(".")[0] for one in inner if "." in one}
        self.assertEqual({one.name for one in fields(ConnectorConfig)} - groups - settings, set())
        self.assertEqual(inner - settings, set())
        self.assertEqual(set(VUAConfig._FIELDS) - settings, set())
        self.assertEqual(set(METRICS), names("metrics.md"))

    def test_installed_from_one_place(self) -> None:
        """One constant says where pip finds VUA: all pages and the README follow it."""
        self.assertIn(reference.DOCS.parent / "README.md", reference.pages())
        with mock.patch.object(reference, "SOURCE", "vua"):
            changed = [page for page in reference.pages()
                       if reference.filled(text := page.read_text("utf-8")) != text]  # fmt: skip
            self.assertLess(5, len(changed))
            for page in changed:
                new = reference.filled(page.read_text("utf-8"))
                self.assertNotRegex(new, r"pip install '?\.[\['\s]")
        self.assertEqual("pip install '.[vllm]' x", reference.filled("pip install 'vua[vllm]' x"))
        self.assertEqual("pip install vllm", reference.filled("pip install vllm"))

    def test_new_metric(self) -> None:
        """What the code says anew is noticed."""
        page = reference.DOCS / "metrics.md"
        text = page.read_text("utf-8")
        with mock.patch.dict(METRICS, {"vua_new_total": Metric("counter", "What is new.")}):
            self.assertNotEqual(text, reference.filled(text))
            self.assertIn("`vua_new_total`", reference.filled(text))
