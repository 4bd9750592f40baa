"""Mistakes that users make: each message says what was found, what is expected, what to do.

Nothing of an engine is imported before its configuration is known to be usable.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from unittest import mock

import torch

import vua
from commands import CliTest, run
from helpers import caches_of
from vua.core import VUA, VUAConfig
from vua.errors import VUAError
from vua.security.settings import Security
from vua.vllm import serve

TOKENS = torch.arange(128)


def said(work: Callable[[], object]) -> str:
    """What the caller reads when the library refuses."""
    try:
        got = work()
    except (VUAError, ImportError, AttributeError) as problem:
        return str(problem)
    raise AssertionError(f"nothing was said, and {got!r} returned")


def kv(tokens: int = 128, dtype: torch.dtype = torch.float16) -> list[list[torch.Tensor]]:
    return caches_of(layers=1, heads=2, tokens=tokens, dim=16, dtype=dtype)


class MistakesTest(CliTest):
    def setUp(self) -> None:
        super().setUp()
        self.beside = self.root.parent / f"{self.root.name}-beside"
        self.beside.mkdir()
        self.addCleanup(shutil.rmtree, self.beside)
        self.foreign, self.open = self.beside / "foreign", self.beside / "open"
        self.foreign.mkdir()
        (self.foreign / "notes.txt").write_text("a")
        self.open.mkdir()
        self.open.chmod(0o777)
        environment = mock.patch.dict(os.environ)
        environment.start()
        self.addCleanup(environment.stop)
        os.environ.pop("VUA_PATH", None)

    def shows(self, text: str, *words: str) -> None:
        """All words are there, in what a user reads as one line or a few."""
        for word in words:
            self.assertIn(word, text)

    def serve(self, *arguments: object) -> str:
        """What `vua-vllm serve` says instead of starting; vLLM itself is not imported for it."""
        words = ["serve", "m", *map(str, arguments)]
        out, loaded = io.StringIO(), "vllm" in sys.modules
        with (
            contextlib.redirect_stderr(out),
            mock.patch("importlib.util.find_spec", return_value=True),
        ):
            self.assertEqual(2, serve.main(words))
        self.assertEqual(loaded, "vllm" in sys.modules, "the engine's modules are not loaded")
        return out.getvalue()

    def test_vllm_directory(self) -> None:
        missing = self.beside / "no" / "kv"
        self.shows(self.serve(), "no directory", "--vua-path", "VUA_PATH")
        text = self.serve("--vua-path", missing)
        self.shows(text, f"{missing}: no such directory", f"{missing.parent}", "mount")
        self.shows(self.serve("--vua-dir", "x"), "--vua-dir", "did you mean --vua-path")
        text = self.serve("--vua-path", self.foreign)
        self.shows(text, "not empty (it holds 'notes.txt')", "vua-cache", 'write {"format"')
        text = self.serve("--vua-path", self.open)
        self.shows(text, "mode 777", "every user", str(self.open / "vua"))

    def test_library(self) -> None:
        missing = self.beside / "no" / "kv"
        self.shows(said(lambda: VUA(VUAConfig, missing)), f"{missing}: no such directory", "mount")
        self.assertFalse(missing.parent.exists(), "nothing is made in the place of a mount")
        self.shows(said(lambda: VUA(VUAConfig, self.foreign)), "notes.txt", "vua-cache")
        self.shows(said(lambda: VUAConfig(chunk_tokens=3)), "'chunk_tokens'", "'split_factor'")
        self.shows(said(lambda: VUAConfig(max_byte=3)), "'max_byte'", "'max_bytes'")
        self.shows(said(lambda: VUAConfig(max_bytes="5Q")), "'5Q'", "'500G'")
        key = Security(key_file=str(self.beside / "nokey"))
        text = said(lambda: VUA(VUAConfig(security=key), self.root))
        self.shows(text, "nokey: No such file", "`vua key FILE`")

    def test_tensors(self) -> None:
        with VUA(VUAConfig(model="x"), self.root) as cache:
            text = said(lambda: cache.put(torch.arange(100), kv(100)))
            self.shows(text, "100 tokens", "split_factor 64", "trim_to_split_factor()")
            mixed = kv()
            mixed[0][1] = mixed[0][1].float()
            text = said(lambda: cache.put(TOKENS, mixed))
            self.shows(text, "torch.float16", "torch.float32", "expected [K, V]")
            cache.put(TOKENS, kv())
            text = said(lambda: cache.put(TOKENS + 5, kv(dtype=torch.float32)))
            self.shows(text, "F32", "stored: F16", "Nothing was written", "VUAConfig.model")
            text = said(lambda: cache.put(TOKENS.float(), kv()))
            self.shows(text, "integers", "float32", ".long()")
            text = said(lambda: cache.get_closest(TOKENS, device="gpu"))
            self.shows(text, "'gpu'", "'cuda'")
            with mock.patch("torch.cuda.is_available", return_value=False):
                text = said(lambda: cache.get_closest(TOKENS, device="cuda"))
            self.shows(text, "'cuda'", "no GPU", "device='cpu'")
            self.assertEqual(128, cache.get_closest(TOKENS).num_tokens)  # control: it is stored

    @unittest.skipUnless(find_spec("transformers"), "transformers is not installed")
    def test_transformers(self) -> None:
        """A name in the place of a model; and `import vua` is enough for its modules."""
        from vua.transformers import reuse_prefixes

        self.assertIs(reuse_prefixes, vua.transformers.reuse_prefixes)

        def named() -> None:
            with reuse_prefixes("gpt2", str(self.root)):
                pass

        self.shows(said(named), "expected a model", "'gpt2'", "AutoModelForCausalLM")

    def test_gc_in_a_pipe(self) -> None:
        """A forgotten % deletes nothing."""
        before = run("ls", self.root)[1]
        code, _, problem = run("gc", self.root, "--max-bytes", "80")
        self.assertEqual(2, code)
        self.shows(problem, "'80'", "'80%'", "'80G'", "'80B'")
        self.assertEqual(before, run("ls", self.root)[1])
        self.shows(run("gc", self.root, "--max-bytes", "5Q")[2], "'5Q'", "'500G'")

    def test_without_obstore(self) -> None:
        """A bucket needs a package: said before vLLM starts. In a process that has none of it."""
        code = (
            "import sys; sys.modules['obstore'] = None; \n"
            "from vua.vllm import serve; import importlib.util; importlib.util.find_spec = bool\n"
            "sys.exit(serve.main(['serve', 'm', '--vua-path', 's3://bucket/prefix']))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        self.assertEqual(2, done.returncode, done.stderr)
        self.shows(done.stderr, "obstore", "pip install obstore")
