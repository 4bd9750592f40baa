"""docs/architecture.md names files and functions that there are."""

from __future__ import annotations

import ast
import re
import unittest

from helpers import ROOT

SOURCE = ROOT / "src" / "vua"
NAMED = re.compile(r"`([a-z_0-9]+/[a-z_0-9/]+\.py)(?:: ([A-Za-z_.0-9]+))?`")


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
        """Every file and function of the ways exists, and every room has its line."""
        text = (ROOT / "docs" / "architecture.md").read_text()
        named = [
            (path, name) for path, name in NAMED.findall(text) if not path.startswith("tests/")
        ]
        self.assertLess(30, len(named))
        for path, name in named:
            with self.subTest(path=path, name=name):
                self.assertTrue((SOURCE / path).is_file())
                self.assertIn(name, functions(path) | {""})
        rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
        rooms |= {path.stem for path in SOURCE.glob("*.py")} - {"__init__"}
        table = text[text.index("| room |") : text.index("## Three")]
        self.assertEqual(rooms, set(re.findall(r"`([a-z_]+)`", table.replace("`vua`", ""))) & rooms)


if __name__ == "__main__":
    unittest.main()
