"""docs/models.md: its tables are those of the rows, whose tests exist."""

from __future__ import annotations

import ast
import re
import unittest
from functools import cache

from model_classes import PAGE, REGION, ROOT, ROWS, text


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text("utf-8"))


class TestModelsPage(unittest.TestCase):
    """The matrix of models."""

    def test_the_page(self) -> None:
        """The page shows the rows."""
        shown = REGION.search(PAGE.read_text("utf-8"))
        assert shown is not None
        self.assertEqual(f"{shown[1]}{text()}{shown[2]}", shown[0])

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
