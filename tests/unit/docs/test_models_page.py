"""docs/models.md: what it says is what the tests' results say."""

from __future__ import annotations

import ast
import re
import unittest
from functools import cache

from model_classes import PAGE, REGION, ROOT, ROWS, load, text


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text("utf-8"))


class TestModelsPage(unittest.TestCase):
    """The matrix of models."""

    def test_the_page(self) -> None:
        """The page shows what the file of results holds."""
        shown = REGION.search(PAGE.read_text("utf-8"))
        assert shown is not None
        self.assertEqual(f"{shown[1]}{text(load())}{shown[2]}", shown[0])

    def test_what_failed_is_shown(self) -> None:
        """Control: a test that failed, or never ran, is named as that in its row."""
        row, *_ = ROWS
        passed = {"outcome": "passed", "engine": "vllm 1", "date": "2026-01-01"}
        results = {"tests": dict.fromkeys(row.tests.values(), passed), "recipes": {}}
        self.assertNotIn("**", text(results))
        results["tests"] |= {row.tests["cold, restart"]: {"outcome": "failed"}}
        del results["tests"][row.tests["branch"]]
        for shown in ("**cold, restart: failed**", "**branch: not run**"):
            self.assertIn(shown, text(results).splitlines()[2])

    def test_tests_are_there(self) -> None:
        """Every test that a row names exists."""
        for row in ROWS:
            for test in row.tests.values():
                module, *inside = test.split("::")
                tree = parsed(module)
                classes = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}
                names, place = set[str](), classes.get(inside[0])
                while place is not None:  # and of the classes that it is made of, in this file
                    names |= {getattr(one, "name", "") for one in place.body}
                    bases = [one.id for one in place.bases if isinstance(one, ast.Name)]
                    place = next((classes[one] for one in bases if one in classes), None)
                self.assertIn(inside[1].partition("[")[0], names, test)

    def test_rows_are_told_apart(self) -> None:
        """No two rows have the same class, engine and place; none has a bar in it."""
        keys = [(row.name, row.engine, row.where) for row in ROWS]
        self.assertEqual(len(keys), len({*keys}))
        for row in ROWS:
            self.assertIsNone(re.search(r"\|", "".join([*row[:5], *row.tests])))
