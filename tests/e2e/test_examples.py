"""The examples and the auditor run as they stand; they load what they say."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest

from e2e.harness import ENVIRONMENT, SOURCE, llama, needs_vllm
from e2e.sglang_server import PYTHON, Server, extra_config
from helpers import ROOT, DirectoryTest
from real_model import first_layers, wheel_file

EXAMPLES = SOURCE.parent / "examples"
CHUNK_TOKENS = 64
BLOCK_TOKENS = 128
"""vLLM's on a CPU, which loads, and so stores, whole blocks alone."""
STARTERS = ("agents.py", "engines.py")
"""Those that start engines or processes."""
PRINTED = re.compile(r"(\d+) of (\d+) tokens loaded", re.MULTILINE)


@pytest.mark.thorough
@unittest.skipUnless(EXAMPLES.exists(), "not in a checkout")
@unittest.skipUnless(wheel_file(), "the wheel of the real model is not installed")
class ExamplesTest(DirectoryTest):
    model: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.model = first_layers(Path(folder.name, "model"))

    def output_of(self, name: str, *more: str) -> str:
        """Run it on an empty directory, as a program; return what it prints."""
        shared = ("--path", str(self.root), "--new-tokens", "3")
        if name not in STARTERS:
            return self.output_here(name, *shared, *more)
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / name), *shared, *more],
            env=os.environ
            | {"PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1", "VUA_REAL_MODEL": str(self.model)},
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(0, done.returncode, done.stderr[-3000:])
        return done.stdout

    def output_here(self, name: str, *words: str) -> str:
        """The same in this process, which has imported transformers: that takes longest."""
        here = {"HF_HUB_OFFLINE": "1", "VUA_REAL_MODEL": str(self.model)}
        with (
            mock.patch.dict(os.environ, here),
            mock.patch.object(sys, "argv", [name, *words]),
            mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()) as out,
        ):
            warnings.simplefilter("ignore")
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return out.getvalue()

    def run_example(self, name: str, *more: str) -> list[tuple[int, int]]:
        """Run it; return of each prompt the tokens loaded, and all."""
        prompts = PRINTED.findall(self.output_of(name, *more))
        return [(int(loaded), int(length)) for loaded, length in prompts]

    def test_chat(self) -> None:
        """Each turn loads at least the whole chunks of the prompt before it."""
        turns = self.run_example("chat.py")
        self.assertEqual(3, len(turns))
        self.assertEqual(0, turns[0][0])
        for (_, before), (loaded, _) in itertools.pairwise(turns):
            self.assertGreaterEqual(loaded, before // CHUNK_TOKENS * CHUNK_TOKENS)

    def test_one_document_or_system_prompt(self) -> None:
        """The first prompt is computed; the others load all but their last words."""
        for name in ("rag.py", "agents.py"):
            with self.subTest(name):
                (nothing, _), *others = self.run_example(name)
                self.assertEqual((0, 2), (nothing, len(others)))
                for loaded, length in others:
                    self.assertGreater(loaded, length - 2 * CHUNK_TOKENS)

    def test_documents(self) -> None:
        """The second question finds the first one's documents in another order, and loads them."""
        (nothing, length), (all_three, _), (one, _) = self.run_example("documents.py")
        self.assertEqual(0, nothing)
        self.assertGreater(all_three, length - 2 * CHUNK_TOKENS)
        self.assertGreater(one, CHUNK_TOKENS)
        self.assertLess(one, all_three)

    def test_prompts_that_hit(self) -> None:
        """By each advice more is found, and the page has the numbers."""
        _, *rows = re.findall(r"^\| .*$", self.output_of("prompts_that_hit.py"), re.MULTILINE)
        page = (ROOT / "docs" / "hits.md").read_text(encoding="utf-8")
        self.assertEqual(rows, re.findall(r"^\| .* of .* of .*$", page, re.MULTILINE))
        self.assertEqual(8, len(rows))
        for row in rows:
            without, with_it = (int(cell.split()[0]) for cell in row.split("|")[2:4])
            self.assertGreater(with_it, without + 15, row)

    @pytest.mark.vllm
    def test_recipe(self) -> None:
        """A model's chunks are stored and loaded; the answer stays."""
        same = {"block_size": 32, "dtype": "float32", "max_model_len": 4096}
        same |= {"kv_cache_memory_bytes": 128 << 20, "skip_tokenizer_init": True}
        words = [str(llama()), "--path", str(self.root / "kv"), "--engine", json.dumps(same)]
        extra = json.dumps({"witness_every": 0, "timeouts": {"lookup_s": 60.0}})
        program = [sys.executable, str(EXAMPLES / "recipe.py"), *words, "--extra", extra]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(SOURCE)}
        self.assertEqual(0, subprocess.run(program, env=environment, check=False).returncode)

    @pytest.mark.vllm
    def test_engines(self) -> None:
        """Servers compute their first prompt; transformers loads all that one has stored of it."""
        more: list[str] = []
        if PYTHON:
            extra = extra_config(self.root)
            server = Server(self.model, "--dtype", "float32", backend="dynamic", extra=extra)
            self.addCleanup(server.close)
            more = ["--sglang", server.url]
        *servers, (loaded, length) = self.run_example("engines.py", *more)
        self.assertEqual([0] * (2 if PYTHON else 1), [loaded for loaded, _ in servers])
        stored = CHUNK_TOKENS if PYTHON else BLOCK_TOKENS  # SGLang stores more of it than vLLM
        self.assertEqual(length // stored * stored, loaded)


AUDIT = ROOT / "benchmarks" / "audit"


def load(name: str) -> object:
    """A program of the auditor's folder, as a module."""
    found = importlib.util.spec_from_file_location(name, AUDIT / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


cache_audit = load("cache_audit")


class BoundTest(unittest.TestCase):
    def test_clopper_pearson(self) -> None:
        """The bounds are those of the tables; with none wrong it is the rule of three."""
        for wrong, tried, bound in ((0, 10, 0.2589), (1, 20, 0.2161), (5, 100, 0.1023),
                                    (0, 3000, 0.000998), (4, 4, 1.0), (0, 0, 1.0)):  # fmt: skip
            with self.subTest(wrong=wrong, tried=tried):
                self.assertAlmostEqual(bound, cache_audit.upper_bound(wrong, tried), places=4)


@needs_vllm
@pytest.mark.vllm
@pytest.mark.thorough
class EnginesTest(unittest.TestCase):
    def reports(self, name: str, *faults: str) -> list[dict[str, object]]:
        """What the auditor finds; what the engine answers meanwhile is right in any case."""
        found = list(load("shown").shown(name, faults))
        self.assertEqual([True] * len(faults), [one["answers_right"] for one in found])
        return found

    def test_vua(self) -> None:
        """VUA: hits of a good cache are right; damaged chunks and another model's do not hit."""
        right, flipped, other = self.reports("VUA", "none", "flipped bits", "other weights")
        self.assertEqual((right["hits"], 0), (right["audited"], right["hits_wrong"]))
        self.assertGreater(right["hits"], 6)  # prompts before the weights are known are no hits
        self.assertEqual((0, 0), (flipped["audited"], flipped["hits_wrong"]))
        self.assertEqual(0, other["hits"])
