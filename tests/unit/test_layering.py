"""The code keeps to its layers: imports point one way, engines stay in their adapters."""

from __future__ import annotations

import ast
import re
import unittest
from itertools import chain, pairwise

from helpers import ROOT, TESTS
from imports import FLOORS, circle, existing, imported_names, sources
from properties import settings

FACES = ("llama_cpp", "lmcache", "sglang", "transformers", "vllm")
"""Of the engines: only what tests them imports them."""
TESTING = "vua.testing"
ENGINES = ("llama_cpp", "lmcache", "sglang", "transformers", "vllm")

NAMERS = {
    "vua.format.keys",
    "vua.store.namespace",
    "vua.testing.conformance",
}
"""What makes a `KeyChain`. All others ask `Namespace.keys`, which knows whether names are secret.
The last one needs plain names, of no cache."""
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
        return []
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
        elif isinstance(node, ast.Attribute) and _is_torch_load(node):
            found.append(f"{module}:{node.lineno} uses torch.load: it unpickles")
        elif names_chunks(node) and module not in NAMERS:
            found.append(f"{module}:{node.lineno} makes a KeyChain: Namespace.keys does")
    return found


def names_chunks(node: ast.AST) -> bool:
    """Whether it makes a `KeyChain`, whatever it calls that class by, or gives it another name."""
    if isinstance(node, ast.alias):
        return node.name == "KeyChain" and node.asname is not None
    called = node.func if isinstance(node, ast.Call) else None
    name = getattr(called, "attr", getattr(called, "id", ""))
    return str(name).endswith("KeyChain")


def _is_torch_load(node: ast.Attribute) -> bool:
    return node.attr == "load" and ast.unparse(node) == "torch.load"


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
        self.assertEqual(
            ["b", "c", "d", "b"], circle({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}})
        )
        self.assertEqual([], circle({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}}))

    def test_page(self) -> None:
        """docs/architecture.md lists the rooms in the order of the layers, the lowest last."""
        text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
        listed = text[text.index("## Rooms") : text.index("## Three")]
        first = [line.split(": ")[0] for line in listed.splitlines() if line.startswith("- ")]
        rows = [re.findall(r"`([a-z_]+)`", rooms) for rooms in first]
        floors = [[floor_of(f"vua.{room}") or 0 for room in row] for row in rows]
        self.assertEqual(sorted(chain(*FLOORS)), sorted(chain(*rows)))
        for above, below in pairwise(floors):
            self.assertGreater(min(above), max(below), rows)

    def test_namers(self) -> None:
        """Each module that may make a `KeyChain` does: a stale exception hides the next fault."""
        found = {
            name
            for name, source in sources().items()
            if "KeyChain" in source and any(map(names_chunks, ast.walk(ast.parse(source))))
        }

        self.assertEqual(NAMERS, found)

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
            ("vua.cli.prompt", "x = KeyChain(ids, 64)"): "Namespace.keys",
            ("vua.cli.prompt", "x = keys.KeyChain(ids, 64)"): "Namespace.keys",
            ("vua.cli.prompt", "from vua.format.keys import KeyChain as K"): "Namespace.keys",
            ("vua.helpers", ""): "no place",
        }
        for (module, source), expected in broken.items():
            with self.subTest(module=module, source=source):
                found = faults(module, source, modules)

                self.assertEqual(1, len(found), found)
                self.assertIn(expected, found[0])


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
