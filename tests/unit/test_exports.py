"""The public names, frozen: a name that appears or goes away has to be meant."""

from __future__ import annotations

import importlib
import subprocess
import sys
import unittest
from importlib import metadata

import vua
from helpers import ROOT

ERRORS = [
    "ConfigError",
    "CorruptEntryError",
    "EntryError",
    "ForeignEntryError",
    "InputError",
    "LayoutError",
    "NotWritableError",
    "StorageError",
    "StorageFullError",
    "UntrustedError",
    "VUAError",
]
EXPECTED = {
    "vua": [
        "VUA",
        "ClosestKV",
        "VUAConfig",
        "__version__",
        "bytes_to_tensor",
        "tensor_to_bytes",
        *ERRORS,
    ],
    "vua.core": ["VUA", "ClosestKV", "VUAConfig"],
    "vua.errors": ERRORS,
    "vua.lmcache.gpu_connector": [
        "GPUConnectorInterface",
        "MemoryFormat",
        "MemoryObj",
        "VLLMNestedTupleGPUConnector",
        "VLLMPagedMemGPUConnector",
        "VLLMPagedMemGPUConnectorV2",
    ],
    "vua.testing": ["FaultyStorage"],
    "vua.serdes": ["bytes_to_tensor", "tensor_to_bytes"],
}
TREE = {
    "VUAError": "Exception",
    "ConfigError": "VUAError ValueError",
    "InputError": "VUAError ValueError",
    "LayoutError": "InputError",
    "StorageError": "VUAError OSError",
    "NotWritableError": "StorageError",
    "StorageFullError": "StorageError",
    "EntryError": "VUAError",
    "CorruptEntryError": "EntryError",
    "ForeignEntryError": "EntryError",
    "UntrustedError": "ForeignEntryError",
}


class TestExports(unittest.TestCase):
    def test_public_names(self) -> None:
        """Each public module exports exactly the names that are listed here, and has them."""
        for name, expected in EXPECTED.items():
            with self.subTest(module=name):
                module = importlib.import_module(name)

                self.assertEqual(sorted(expected), sorted(module.__all__))
                for exported in expected:
                    self.assertTrue(hasattr(module, exported), exported)

    def test_only_public(self) -> None:
        """No other module lists its names but packages, and the contract of a storage."""
        found = {
            path for path in (ROOT / "src/vua").rglob("*.py") if "__all__ = " in path.read_text()
        }
        public = {ROOT / "src" / f"{name.replace('.', '/')}.py" for name in EXPECTED}
        public |= {*(ROOT / "src/vua").rglob("__init__.py"), ROOT / "src/vua/storage/base.py"}
        self.assertEqual(set(), found - public)
        self.assertTrue(found)

    def test_error_tree(self) -> None:
        """Each error can be caught by the names that its place in the tree promises."""
        actual = {
            name: " ".join(base.__name__ for base in getattr(vua, name).__bases__)
            for name in ERRORS
        }

        self.assertEqual(TREE, actual)

    def test_storage_errors_carry_errno(self) -> None:
        """A storage error says which errno it stands for, as any OSError does."""
        error = vua.StorageFullError(28, "no room", "/some/where")

        self.assertEqual((28, "/some/where"), (error.errno, error.filename))
        self.assertIs(vua.StorageFullError, type(error))

    def test_version(self) -> None:
        """The version in the code is the version that was installed."""
        self.assertEqual(metadata.version("vua"), vua.__version__)

    def test_import_is_light(self) -> None:
        """Importing vua starts no thread and imports no engine."""
        script = (
            "import sys, threading, vua\n"
            "engines = {'vllm', 'transformers', 'sglang', 'lmcache'} & set(sys.modules)\n"
            "print(sorted(engines), threading.active_count())"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )

        self.assertEqual("[] 1", done.stdout.strip())
