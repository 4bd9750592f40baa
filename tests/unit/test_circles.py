"""Nothing imports itself in a circle, and no test imports another one."""

from __future__ import annotations

import ast
import unittest

import pytest

from helpers import ROOT, TESTS
from imports import (
    SOURCE,
    c_uses,
    circle,
    existing,
    imported_names,
    imported_programs,
    programs,
    programs_imported,
    sources,
)


class TestCircles(unittest.TestCase):
    """In the package, the tests and benchmarks, and the C files."""

    def test_no_circles(self) -> None:
        """No modules of VUA import each other in a circle, whether now or when they are used."""
        all_sources = sources()
        modules = set(all_sources)
        imports = {
            module: {
                existing(name, modules)
                for name in imported_names(ast.parse(source))
                if name.partition(".")[0] == "vua"
            }
            - {module}
            for module, source in all_sources.items()
            if module != "vua"
        }

        self.assertEqual([], circle(imports))

    @pytest.mark.thorough
    def test_no_circles_beside_the_package(self) -> None:
        """Nor do the modules of tests and benchmarks."""
        imports = {
            str(path.relative_to(ROOT)): {
                str(one.relative_to(ROOT)) for one in programs_imported(path) if one != path
            }
            for path in programs()
        }

        self.assertIn("tests/helpers.py", imports["tests/commands.py"])
        self.assertIn("benchmarks/peers/stores.py", imports["benchmarks/peers/worker.py"])
        self.assertEqual([], circle(imports))

    @pytest.mark.thorough
    def test_tests_stand_alone(self) -> None:
        """What tests share lies in modules that are none."""
        found = [
            f"{path.relative_to(ROOT)} imports {one.name}: a test"
            for path in programs()
            for one in programs_imported(path)
            if one.name.startswith("test_")
        ]

        self.assertEqual([], found)

    def test_imported_tests_are_found(self) -> None:
        """Beside a test, in its package, and in a program's text."""
        here = TESTS / "unit" / "store" / "test_x.py"
        for source, test in (
            ("from {} import X", "test_store"),
            ("import {}", "test_store"),
            ("from e2e import {}", "test_lora"),
            ("from {} import X", "e2e.test_lora"),
            ("def f():\n    import {}", "scorecard.test_attacks"),
            ("run('import sys\\nfrom {} import X')", "test_store"),
        ):
            with self.subTest(source):
                found = imported_programs(here, source.format(test))
                self.assertIn(f"{test.rpartition('.')[2]}.py", {path.name for path in found})
        self.assertEqual(set(), imported_programs(here, "import os\nfrom vua.core import VUA"))

    def test_no_circles_in_c(self) -> None:
        """Nor do the C files call each other in a circle."""
        paths = [path for path in (SOURCE / "native").iterdir() if path.suffix in (".c", ".h")]
        uses = c_uses({path.name: path.read_text(encoding="utf-8") for path in paths})

        self.assertIn("load.h", uses["save.c"])
        self.assertEqual([], circle(uses))

    def test_calls_in_c_are_found(self) -> None:
        """A call and a use as a pointer are; a declaration and a comment are none."""
        sources = {
            "a.c": '#include "a.h"\nint one(int x)\n{\n    return two(x);\n}\n',
            "b.c": "int two(int x,\n    int y)\n{\n    return run(one);\n}\n",
            "c.c": "/* one() */\nint three(void)\n{\n    return 0;\n}\n",
            "a.h": "int one(int x);\n",
        }
        uses = c_uses(sources)

        self.assertEqual({"a.h", "b.c"}, uses["a.c"])
        self.assertEqual([{"a.c"}, set(), set()], [uses[name] for name in ("b.c", "c.c", "a.h")])
        self.assertEqual(["a.c", "b.c", "a.c"], circle(uses))

    def test_circles_are_found(self) -> None:
        """Short ones, long ones, and those behind others; a diamond is none."""
        self.assertEqual(["a", "b", "a"], circle({"a": {"b"}, "b": {"a"}}))
        self.assertEqual(
            ["b", "c", "d", "b"], circle({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}})
        )
        self.assertEqual([], circle({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}}))
