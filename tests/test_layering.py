"""The code keeps to its layers: imports point one way, engines stay in their adapters."""

from __future__ import annotations

import ast
import re
import unittest
from pathlib import Path

import vua
from properties import settings

SOURCE = Path(vua.__file__).parent

# From the bottom up: a module may import those before it. A package's submodules come right after
# the package and may not import each other, unless they are listed: then their order counts.
CORE = (
    "vua.errors",
    "vua.forks",
    "vua.threads",
    "vua.breaker",
    "vua.workers",
    "vua._linux",
    "vua.native.stamp",
    "vua.native.bindings",
    "vua.native.batches",
    "vua.native.moves",
    "vua.native.prefixes",
    "vua.native.saves",
    "vua.native",
    "vua.layout",
    "vua.part",
    "vua.states",
    "vua.security",
    "vua.keys",
    "vua.weights.content",
    "vua.weights.files",
    "vua.weights.memo",
    "vua.weights.fingerprint",
    "vua.weights.background",
    "vua.weights",
    "vua.identity",
    "vua.model_files",
    "vua.rope",
    "vua.claims",
    "vua.entry",
    "vua.serdes",
    "vua.agreement",
    "vua.storage.direct",
    "vua.storage.problems",
    "vua.storage.reader",
    "vua.storage",
    "vua.recency",
    "vua.bounds",
    "vua.namespace",
    "vua.mark",
    "vua.survey",
    "vua.usage",
    "vua.ours",
    "vua.lease",
    "vua.lineage",
    "vua.hints",
    "vua.eviction",
    "vua.removing",
    "vua.occupancy",
    "vua.room",
    "vua.inflight",
    "vua.keeper",
    "vua.lost",
    "vua.gc",
    "vua.slab",
    "vua.device.pages",
    "vua.device.moves",
    "vua.device.kernels",
    "vua.device.host",
    "vua.device.copies",
    "vua.device.staging",
    "vua.device.xxh3_kernel",
    "vua.device.xxh3",
    "vua.device.movers",
    "vua.device.gds",
    "vua.device",
    "vua.plan",
    "vua.seal",
    "vua.keyring",
    "vua.aim",
    "vua.misses",
    "vua.saver",
    "vua.store",
    "vua.directory",
    "vua.place",
    "vua.buffers",
    "vua.tensors",
    "vua.config",
    "vua.label",
    "vua.core",
)
# Above the core; none may import another one.
ADAPTERS = ("vua.lmcache", "vua.transformers", "vua.vllm", "vua.cli")
BENCH = "vua.bench"
"""Measures the core; the command line runs it."""
TESTING = "vua.testing"
ENGINES = ("lmcache", "sglang", "transformers", "vllm")

UNSAFE_MODULES = ("cloudpickle", "dill", "marshal", "pickle", "shelve")
UNSAFE_CALLS = ("eval", "exec")


def within(module: str, package: str) -> bool:
    """Whether the module is the package or lies in it."""
    return f"{module}.".startswith(f"{package}.")


def layer_of(module: str) -> str | None:
    """The entry of the lists above that the module belongs to; None if there is none."""
    layers = (*CORE, BENCH, *ADAPTERS, TESTING)
    return next((layer for layer in layers if within(module, layer)), None)


def rank_of(module: str) -> tuple[int, int]:
    """Where a core module stands, bottom first."""
    layer = layer_of(module)
    return (CORE.index(layer), int(module != layer)) if layer in CORE else (len(CORE), 0)


def may_import(importer: str, imported: str) -> bool:
    """Whether the layers allow one module of VUA to import another one."""
    if importer == "vua":
        return layer_of(imported) in CORE
    above, below = layer_of(importer), layer_of(imported)
    if below in CORE or imported == "vua":
        return above not in CORE or (imported != "vua" and rank_of(imported) < rank_of(importer))
    if below == TESTING:
        return above == TESTING
    if below == BENCH:
        return above in (BENCH, "vua.cli")
    return above in (below, TESTING)


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
    # `from vua.errors import X` names no module vua.errors.X: the module is the part that exists.
    imported = name
    while imported not in modules:
        imported = imported.rpartition(".")[0]
    if may_import(importer, imported):
        return []
    return [f"{importer} imports {imported}: that lies above or beside it"]


def faults(module: str, source: str, modules: set[str]) -> list[str]:
    """Everything in a module's source that the rules forbid, in words."""
    tree = ast.parse(source)
    found = [] if module == "vua" or layer_of(module) else [f"{module} has no place in the layers"]
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

    def test_faults_are_found(self) -> None:
        """Each rule catches a line that breaks it."""
        modules = {"vua", *CORE, BENCH, *ADAPTERS, TESTING}
        modules |= {"vua.storage.local", "vua.storage.memory"}
        broken = {
            ("vua.errors", "import vua.core"): "above or beside",
            ("vua.keys", "from vua import store"): "above or beside",
            ("vua.keys", "from vua import VUA"): "above or beside",
            ("vua.keys", "def f():\n    from vua.entry import encode"): "above or beside",
            ("vua.storage", "from vua.storage.local import X"): "above or beside",
            ("vua.storage.local", "from vua.storage import memory"): "above or beside",
            ("vua.storage.local", "from vua.store import Store"): "above or beside",
            ("vua.core", "from vua.testing import X"): "above or beside",
            ("vua.cli", "from vua.testing import X"): "above or beside",
            ("vua.cli", "from vua.vllm import X"): "above or beside",
            ("vua.bench", "from vua.cli import X"): "above or beside",
            ("vua.core", "from vua.bench import X"): "above or beside",
            ("vua.vllm.worker", "from vua.bench import X"): "above or beside",
            ("vua", "from vua.vllm import X"): "above or beside",
            ("vua.device.pages", "from vua.device import gather"): "above or beside",
            ("vua.device.copies", "from vua.device.staging import X"): "above or beside",
            ("vua.slab", "from vua.device import X"): "above or beside",
            ("vua.vllm.worker", "from vua.lmcache import X"): "above or beside",
            ("vua.core", "from . import keys"): "absolute",
            ("vua.core", "import vllm.config"): "only vua.vllm",
            ("vua.vllm.worker", "from transformers import X"): "only vua.transformers",
            ("vua.core", "import pickle"): "executed",
            ("vua.core", "from pickle import loads"): "executed",
            ("vua.core", "x = eval('1')"): "eval",
            ("vua.core", "x = torch.load(f)"): "unpickles",
            ("vua.core", "assert x"): "-O",
            ("vua.helpers", ""): "no place",
        }
        for (module, source), expected in broken.items():
            with self.subTest(module=module, source=source):
                found = faults(module, source, modules)

                self.assertEqual(1, len(found), found)
                self.assertIn(expected, found[0])

    def test_sound_lines_pass(self) -> None:
        """What the layers allow is not called a fault."""
        modules = {"vua", *CORE, BENCH, *ADAPTERS, TESTING}
        modules |= {"vua.storage.local", "vua.vllm.worker"}
        sound = (
            ("vua", "from vua.core import VUA"),
            ("vua.device", "from vua.device.pages import X"),
            ("vua.device.copies", "from vua.device import kernels"),
            ("vua.store", "from vua.device import X"),
            ("vua.core", "from vua import keys\nfrom vua.storage.local import X"),
            ("vua.storage.local", "from vua.storage import Storage\nfrom vua.errors import X"),
            ("vua.bench", "from vua.store import Store"),
            ("vua.cli", "from vua.bench import suite"),
            ("vua.vllm", "import vllm\nfrom vua.vllm.worker import X\nfrom vua import VUA"),
            ("vua.testing", "import vllm, transformers\nfrom vua.core import VUA"),
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
            for path in sorted(Path(__file__).parent.rglob("*.py"))
            if path.name != "properties.py" and direct.search(path.read_text(encoding="utf-8"))
        ]

        self.assertEqual([], others)
        self.assertIsNone(settings().deadline)


if __name__ == "__main__":
    unittest.main()
