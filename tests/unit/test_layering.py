"""The code keeps to its layers: imports point one way, engines stay in their adapters."""

from __future__ import annotations

import ast
import re
import unittest
from functools import cache
from pathlib import Path

import vua
from helpers import ROOT, TESTS
from properties import settings

SOURCE = Path(vua.__file__).parent

# From the bottom up: a room, which is a package or one of the flat modules, may import those before
# it. Rooms of one line may not import each other.
FLOORS = (
    ("errors",),
    ("serdes",),
    ("io",),  # what the operating system gives
    ("native",),
    ("weights",),
    ("format",),
    ("security",),
    ("storage",),
    ("capacity", "device"),
    ("store",),
    ("config",),
    ("core", "connector"),
    ("lmcache", "transformers", "vllm"),
    ("cli",),
    ("testing",),
)
FACES = ("lmcache", "transformers", "vllm")
"""Of the engines: only what tests them imports them."""
TESTING = "vua.testing"
ENGINES = ("lmcache", "sglang", "transformers", "vllm")

PROGRAMS = (TESTS, ROOT / "benchmarks")
"""From where tests and benchmarks import; besides, each finds what lies beside it."""
IMPORT_IN_TEXT = re.compile(r"^ *(?:from|import) +([a-z0-9_.]+)", re.MULTILINE)

UNSAFE_MODULES = ("cloudpickle", "dill", "marshal", "pickle", "shelve")
UNSAFE_CALLS = ("eval", "exec")


def within(module: str, package: str) -> bool:
    """Whether the module is the package or lies in it."""
    return f"{module}.".startswith(f"{package}.")


def room_of(module: str) -> str:
    """The package or flat module of VUA that the module is, or lies in."""
    return module.split(".")[1]


def floor_of(module: str) -> int | None:
    """How high a module stands, bottom first; None if it has no place."""
    found = (at for at, rooms in enumerate(FLOORS) if room_of(module) in rooms)
    return next(found, None)


def may_import(importer: str, imported: str) -> bool:
    """Whether one module of VUA may import another one, as far as their rooms go."""
    if imported == "vua":  # the public names, which are the core's
        return importer != "vua" and (floor_of(importer) or 0) > (floor_of("vua.core") or 0)
    if importer == "vua":
        return room_of(imported) in ("core", "errors", "serdes")
    if room_of(importer) == room_of(imported):
        return True  # test_no_circles looks at these
    above, below = floor_of(importer), floor_of(imported)
    if above is None or below is None or below >= above:
        return False
    return room_of(imported) not in FACES or room_of(importer) == "testing"


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, the first one also at the end; empty: none."""
    done: set[str] = set()
    path: list[str] = []

    def walk(module: str) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        path.append(module)
        for imported in sorted(imports.get(module, ())):
            found = walk(imported)
            if found:
                return found
        done.add(path.pop())
        return []

    return next(filter(None, map(walk, sorted(imports))), [])


def imported_names(tree: ast.AST) -> list[str]:
    """Every module that is named in an import, with `from a import b` counted as `a.b` too."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = "." * node.level + (node.module or "")
            names += [f"{package}.{alias.name}" for alias in node.names]
    return names


def existing(name: str, modules: set[str]) -> str:
    """`from vua.errors import X` names no module vua.errors.X: the part that is one."""
    while name not in modules:
        name = name.rpartition(".")[0]
    return name


def import_faults(importer: str, name: str, modules: set[str]) -> list[str]:
    """What is wrong with one import, in words."""
    if name.startswith("."):
        return [f"{importer} imports {name}: imports are absolute"]
    root = name.partition(".")[0]
    if root in UNSAFE_MODULES:
        return [f"{importer} imports {root}: nothing is executed from stored bytes"]
    if root in ENGINES and not any(within(importer, p) for p in (f"vua.{root}", TESTING)):
        return [f"{importer} imports {root}: only vua.{root} and {TESTING} may"]
    if root != "vua":
        here = program(TESTS, root)
        return [f"{importer} imports {root}: that is not installed"] if here else []
    imported = existing(name, modules)
    if may_import(importer, imported):
        return []
    return [f"{importer} imports {imported}: that lies above or beside it"]


def faults(module: str, source: str, modules: set[str]) -> list[str]:
    """Everything in a module's source that the rules forbid, in words."""
    tree = ast.parse(source)
    placed = module == "vua" or floor_of(module) is not None
    found = [] if placed else [f"{module} has no place in the layers"]
    for name in imported_names(tree):
        found += import_faults(module, name, modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append(f"{module}:{node.lineno} asserts: that vanishes under -O")
        elif isinstance(node, ast.Name) and node.id in UNSAFE_CALLS:
            found.append(f"{module}:{node.lineno} uses {node.id}")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            found.append(f"{module}:{node.lineno} uses torch.load: it unpickles")
    return found


def sources() -> dict[str, str]:
    """The source of every module of VUA, by the module's name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = path.read_text(encoding="utf-8")
    return found


def programs() -> list[Path]:
    """Every module of the tests and benchmarks."""
    return [path for root in PROGRAMS for path in sorted(root.rglob("*.py"))]


@cache
def program(beside: Path, name: str) -> Path | None:
    """The module of the tests or benchmarks that an import means; None if it means another one."""
    for folder in (beside, *PROGRAMS):
        place = folder.joinpath(*name.split("."))
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path
    package = name.rpartition(".")[0]
    return program(beside, package) if package else None


def imported_programs(importer: Path, source: str) -> set[Path]:
    """The modules of the tests and benchmarks that a source imports, or a program in its text."""
    tree = ast.parse(source)
    names = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names += IMPORT_IN_TEXT.findall(node.value)
    found = {program(importer.parent, name) for name in names}
    return {path for path in found if path is not None}


@cache
def programs_imported(path: Path) -> set[Path]:
    """The modules of the tests and benchmarks that one of them imports."""
    return imported_programs(path, path.read_text(encoding="utf-8"))


class TestLayering(unittest.TestCase):
    """The rules, and that they are really checked."""

    def test_source(self) -> None:
        """No module of VUA imports upwards or sideways, asserts, or executes what it reads."""
        all_sources = sources()
        self.assertIn("vua.errors", all_sources)
        modules = set(all_sources)
        found = [
            fault for name in all_sources for fault in faults(name, all_sources[name], modules)
        ]

        self.assertEqual([], found)

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

    def test_circles_are_found(self) -> None:
        """Short ones, long ones, and those behind others; a diamond is none."""
        self.assertEqual(["a", "b", "a"], circle({"a": {"b"}, "b": {"a"}}))
        self.assertEqual(
            ["b", "c", "d", "b"], circle({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}})
        )
        self.assertEqual([], circle({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}}))

    def test_faults_are_found(self) -> None:
        """Each rule catches a line that breaks it."""
        modules = {"vua"} | {f"vua.{room}" for rooms in FLOORS for room in rooms}
        broken = {
            ("vua.errors", "import vua.core"): "above or beside",
            ("vua.format.keys", "from vua import store"): "above or beside",
            ("vua.format.keys", "from vua import VUA"): "above or beside",
            ("vua.format.keys", "def f():\n    from vua.storage import X"): "above or beside",
            ("vua.storage.local", "from vua.store.store import Store"): "above or beside",
            ("vua.capacity.lru", "from vua.device import X"): "above or beside",
            ("vua.connector.scheduler", "from vua.core import VUA"): "above or beside",
            ("vua.core", "from vua.testing import X"): "above or beside",
            ("vua.cli", "from vua.testing import X"): "above or beside",
            ("vua.cli", "from vua.vllm import X"): "above or beside",
            ("vua", "from vua.vllm import X"): "above or beside",
            ("vua.vllm.worker", "from vua.lmcache import X"): "above or beside",
            ("vua.core", "from . import keys"): "absolute",
            ("vua.core", "import vllm.config"): "only vua.vllm",
            ("vua.connector.worker", "from vllm import X"): "only vua.vllm",
            ("vua.vllm.worker", "from transformers import X"): "only vua.transformers",
            ("vua.core", "import pickle"): "executed",
            ("vua.core", "from pickle import loads"): "executed",
            ("vua.core", "x = eval('1')"): "eval",
            ("vua.core", "x = torch.load(f)"): "unpickles",
            ("vua.core", "assert x"): "-O",
            ("vua.testing.models", "from scorecard import X"): "not installed",
            ("vua.cli", "from suite.measure import X"): "not installed",
            ("vua.helpers", ""): "no place",
        }
        for (module, source), expected in broken.items():
            with self.subTest(module=module, source=source):
                found = faults(module, source, modules)

                self.assertEqual(1, len(found), found)
                self.assertIn(expected, found[0])

    def test_sound_lines_pass(self) -> None:
        """What the layers allow is not called a fault."""
        modules = {"vua"} | {f"vua.{room}" for rooms in FLOORS for room in rooms}
        sound = (
            ("vua", "from vua.core import VUA"),
            ("vua.store.store", "from vua.device import X"),
            ("vua.core", "from vua.format import keys\nfrom vua.storage.local import X"),
            ("vua.storage.local", "from vua.storage.base import Storage\nimport vua.errors"),
            ("vua.cli", "from vua.core import VUA\nfrom vua.store import X"),
            ("vua.vllm", "import vllm\nfrom vua.vllm.worker import X\nfrom vua import VUA"),
            ("vua.testing", "import vllm, transformers\nfrom vua.vllm import X"),
            ("vua.transformers", "import torch\nmodel.eval()"),
        )
        for module, source in sound:
            with self.subTest(module=module, source=source):
                self.assertEqual([], faults(module, source, modules))


class TestProperties(unittest.TestCase):
    """Tests of properties run under one profile."""

    def test_no_deadline(self) -> None:
        """No example of any test fails for taking long, and no module leaves the profile out."""
        direct = re.compile(
            r"^(import hypothesis\b|from hypothesis import (?!strategies))", re.MULTILINE
        )
        others = [
            path.name
            for path in sorted(TESTS.rglob("*.py"))
            if path.name != "properties.py" and direct.search(path.read_text(encoding="utf-8"))
        ]

        self.assertEqual([], others)
        self.assertIsNone(settings().deadline)


if __name__ == "__main__":
    unittest.main()
