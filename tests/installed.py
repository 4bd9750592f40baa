"""What an installed VUA does with an interpreter: `dev.py pythons` runs this with each of them.

Needs no pytest, and torch only for what needs it. It looks at the entries of `tests/golden`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import pkgutil
import shutil
import subprocess
import sys
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import vua
from vua.cli import main

GOLDEN = Path(__file__).with_name("golden")
OPTIONAL = {
    *("torch", "triton", "transformers", "vllm", "sglang", "lmcache", "llama_cpp", "msgspec"),
    *("cryptography", "obstore", "prometheus_client"),
}
"""What is installed beside VUA for an engine or an extra; torch is there or not."""


class InstalledTest(unittest.TestCase):
    def setUp(self) -> None:
        """Have a cache directory: a copy of the golden entries that VUA may change."""
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.place = Path(place.name)
        self.root = self.place / "kv"
        shutil.copytree(GOLDEN, self.root)
        self.root.chmod(0o700)
        (self.root / "vua.json").write_text('{"format": "vua.root.v1"}')

    def run_vua(self, *words: str | Path, code: int = 0) -> Any:
        """Run a command with `--json`; return its report."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.assertEqual(code, main([*map(str, words), "--json"]))
        return json.loads(out.getvalue())

    def test_modules(self) -> None:
        """Every module of the wheel can be imported, but for what lacks an optional package."""
        self.assertNotIn(GOLDEN.parents[1], Path(vua.__file__).parents)  # what is installed
        every = [one.name for one in pkgutil.walk_packages(vua.__path__, "vua.")]
        names = [name for name in every if not name.endswith("__main__")]
        self.assertGreater(len(names), 100)
        for name in names:
            with self.subTest(name):
                try:
                    importlib.import_module(name)
                except ImportError as problem:
                    self.assertIn((problem.name or "").split(".")[0], OPTIONAL)
                    self.assertIsNone(find_spec((problem.name or "").split(".")[0]))

    def test_version(self) -> None:
        """The command is there, and says what was built in."""
        vua_ = Path(sys.executable).with_name("vua")
        ran = subprocess.run([vua_, "--version"], capture_output=True, text=True, check=True)
        self.assertIn(f"vua {vua.__version__}\n", ran.stdout)
        self.assertIn("native code", ran.stdout)

    def test_commands(self) -> None:
        """What is stored is listed, verified, carried elsewhere, found damaged and taken away."""
        files = sorted(self.root.rglob("*.safetensors"))
        other, archive = self.place / "other", self.place / "archive.tar"
        other.mkdir(mode=0o700)
        self.assertTrue(self.run_vua("verify", self.root)["sound"])
        self.assertEqual(len(files), self.run_vua("export", self.root, archive, "--all")["files"])
        self.assertEqual(len(files), self.run_vua("import", other, archive)["written"])
        self.assertTrue(self.run_vua("verify", other)["sound"])
        data = bytearray(files[0].read_bytes())
        data[-1] ^= 1
        files[0].write_bytes(data)
        self.assertFalse(self.run_vua("verify", self.root, code=1)["sound"])
        self.assertTrue(self.run_vua("verify", self.root, "--repair")["sound"])
        chunks = self.run_vua("ls", other)["namespaces"]
        gone = self.run_vua("rm", other, "--all")["chunks"]
        self.assertEqual(sum(one["chunks"] for one in chunks), gone)

    def test_program(self) -> None:
        """`python -m vua` is the command, which imports no torch; others of its commands work."""
        code = "import sys, vua.cli; vua.cli.main(['ls', '.']); sys.exit('torch' in sys.modules)"
        for how in (["-m", "vua", "ls", "."], ["-c", code]):
            subprocess.run([sys.executable, *how], check=True, cwd=self.root)
        tokens = self.place / "tokens.json"
        tokens.write_text(json.dumps(list(range(200))))
        for words in (["du"], ["doctor"], ["gc", "--dry-run"], ["explain", "--tokens", tokens]):
            self.run_vua(words[0], self.root, *words[1:])

    @unittest.skipIf(find_spec("torch"), "torch is installed")
    def test_how_to_get_torch(self) -> None:
        """What needs torch says how to get it, for CUDA and for CPUs, and is an ImportError."""
        for code in (
            "from vua import VUA", "from vua.core import VUA", "import vua; vua.ClosestKV",
            "import vua.serdes", "from vua.lmcache.gpu_connector import VLLMPagedMemGPUConnectorV2",
        ):  # fmt: skip
            with self.subTest(code), self.assertRaises(ImportError) as raised:
                exec(code, {})
            self.assertEqual("torch", raised.exception.name)
            for word in ("No module named 'torch'", "`pip install torch`", "whl/cpu"):
                self.assertIn(word, str(raised.exception))
        for code, name in (
            ("import vua.transformers", "torch"),
            ("from vua.llama_cpp import VUALlamaCache", "llama"),
        ):
            with self.subTest(code), self.assertRaises(ImportError) as raised:
                exec(code, {})
            self.assertIn("pip install", str(raised.exception))
            self.assertIn(name, str(raised.exception))

    @unittest.skipUnless(find_spec("torch"), "torch is not installed")
    def test_library(self) -> None:
        """What is stored comes back bit for bit, as far as two sequences agree."""
        import torch

        tokens = torch.arange(192)
        kv = [[torch.randn(1, 2, 192, 16) for _ in "KV"] for _layer in range(3)]
        with vua.VUA(vua.VUAConfig(model="m"), self.place / "mine") as stored:
            self.assertEqual(3, stored.put(tokens, kv))
        with vua.VUA(vua.VUAConfig(model="m"), self.place / "mine") as stored:
            found = stored.get_closest(torch.cat([tokens[:130], tokens]))
            self.assertEqual(128, found.num_tokens)
            for layer, loaded in zip(kv, found.data, strict=True):
                for one, two in zip(layer, loaded, strict=True):
                    self.assertTrue(torch.equal(one[:, :, :128], two))


if __name__ == "__main__":
    unittest.main()
