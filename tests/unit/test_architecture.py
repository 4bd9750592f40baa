"""docs/architecture.md names files and functions that there are."""

from __future__ import annotations

import ast
import re
import unittest
from functools import cache
from itertools import pairwise

from helpers import ROOT
from imports import FLOORS

SOURCE = ROOT / "src" / "vua"
NAMED = re.compile(r"`([a-z_0-9]+/[a-z_0-9/]+\.py)(?:: ([A-Za-z_.0-9]+))?`")


@cache
def functions(path: str) -> set[str]:
    """Names of a module's functions and methods, the latter as ``Class.method``."""
    body = ast.parse((SOURCE / path).read_text()).body
    kinds = ast.FunctionDef | ast.ClassDef
    found = {node.name for node in body if isinstance(node, kinds)}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, kinds)}
    return found


class ArchitectureTest(unittest.TestCase):
    def test_names(self) -> None:
        """Every file and function of the ways exists."""
        text = (ROOT / "docs" / "architecture.md").read_text()
        named = [
            (path, name) for path, name in NAMED.findall(text) if not path.startswith("tests/")
        ]
        self.assertLess(30, len(named))
        for path, name in named:
            with self.subTest(path=path, name=name):
                self.assertTrue((SOURCE / path).is_file())
                self.assertIn(name, functions(path) | {""})

    def test_rooms(self) -> None:
        """The rooms stand in the order in which they may import each other, the lowest last."""
        text = (ROOT / "docs" / "architecture.md").read_text()
        listed = text[text.index("## Rooms") : text.index("## Three")]
        first = [line.split(": ")[0] for line in listed.splitlines() if line.startswith("- ")]
        rows = [re.findall(r"`([a-z_]+)`", rooms) for rooms in first]
        floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
        floors = [[floor_of[room] for room in row] for row in rows]
        self.assertEqual({*floor_of}, {room for row in rows for room in row})
        for above, below in pairwise(floors):
            self.assertGreater(min(above), max(below), rows)
