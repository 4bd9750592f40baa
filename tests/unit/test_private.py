"""Tests use what VUA's modules show; a private name only to force a race, which they then name.

Private constants do not count: tests make a pause short or a limit small.
"""

from __future__ import annotations

import ast
import unittest
from collections.abc import Iterable, Iterator

import pytest

from helpers import ROOT, TESTS
from imports import sources

RACE = "# race: "
"""On a use's line, or on the one above: which race the test forces at that point."""
BY_NAME = ("delattr", "getattr", "hasattr", "instead", "object", "patch", "setattr")
"""Functions that are given names of attributes: Python's own, `mock.patch`'s, `sim.test_sim`'."""
PROTOCOL = {"_asdict", "_fields", "_make", "_replace"}
"""Of named tuples: public, but for a field of the same name."""


def is_private(name: str) -> bool:
    """Whether a name is its module's or class's own, and no constant."""
    return name.startswith("_") and not name.endswith("__") and name != name.upper()


def is_own(node: ast.Attribute) -> bool:
    """Whether it is an attribute of the object whose method this is."""
    return ast.unparse(node.value) in ("self", "cls")


def defined(trees: Iterable[ast.AST]) -> set[str]:
    """The private names of functions, classes, variables and attributes."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            found.add(node.attr)
    return {name for name in found if is_private(name)} - PROTOCOL


def uses(tree: ast.AST, names: set[str]) -> Iterator[tuple[int, str]]:
    """Where one of the names is used from outside: the line, and how."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names and not is_own(node):
            yield node.end_lineno or 0, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vua."):
            imported = (one for one in node.names if one.name.startswith("_"))
            yield from ((one.lineno, f"{node.module}.{one.name}") for one in imported)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
            words = [one for one in node.args if isinstance(one, ast.Constant)]
            for word in (one for one in words if isinstance(one.value, str)):
                parts = str(word.value).split(".")
                if names.intersection(parts) or (parts[0] == "vua" and any(map(is_private, parts))):
                    yield word.lineno, str(word.value)


def faults(source: str, names: set[str]) -> list[str]:
    """Uses in one file of tests that name no race, in words."""
    lines = ["", *source.splitlines()]
    return [
        f"line {at} uses {use}"
        for at, use in uses(ast.parse(source), names)
        if not any(RACE in line for line in lines[at - 1 : at + 1])
    ]


class TestPrivate(unittest.TestCase):
    """The rule, and that it is really checked."""

    @pytest.mark.thorough
    def test_tests(self) -> None:
        """No test reaches into VUA's objects but where it says which race needs that."""
        names = defined(map(ast.parse, sources().values()))
        self.assertIn("_lock", names)
        found = [
            f"{path.relative_to(ROOT)}: {fault}"
            for path in sorted(TESTS.rglob("*.py"))
            for fault in faults(path.read_text(encoding="utf-8"), names)
        ]

        self.assertEqual([], found)

    def test_faults_are_found(self) -> None:
        """Each way to use a private name is a fault; with the race it is none."""
        names = {"_lock", "_run", "_Store"}
        for line in (
            "made._lock.acquire()",
            "self.made._lock = None",
            "with mock.patch.object(Made, '_run'): pass",
            "with mock.patch('vua.made._run'): pass",
            "with mock.patch('vua.made._Store.use'): pass",
            "with mock.patch('vua.made._Gone.use'): pass",
            "getattr(made, '_lock')",
            "from vua.made import _Store",
            "from vua.made import _WHATEVER",
        ):
            with self.subTest(line):
                self.assertEqual(1, len(faults(line, names)))
                self.assertEqual([], faults(f"{line}  # race: with another writer", names))
                self.assertEqual([], faults(f"# race: with another writer\n{line}", names))
                self.assertEqual(1, len(faults(f"# race: so\n\n{line}", names)))
