"""Programs of `benchmarks/` work, small; wrong bytes end a measurement."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import unittest
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import speed
from buckets import memory_url
from e2e.harness import run_program
from gpu import first_run
from helpers import ROOT, DirectoryTest, flip
from lab.__main__ import main as lab_main
from lab.replay import Request, read, replay
from suite.context import Settings
from suite.loads import Stored
from suite.prompts import TINY, make
from suite.run import NUMBERS
from suite.run import run as run_suite
from suite.traces import multi_round
from vua.capacity.spaces import silent
from vua.errors import InputError
from vua.storage.bucket import Bucket

WITH_VLLM = ("plain", "cold", "warm", "cases")
"""Parts of the first run on a GPU; `plain` does `cold` and `warm` on a CPU."""


def printed(work: Any, *words: object) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        work([str(one) for one in words])
    return out.getvalue()


class ProgramTest(DirectoryTest):
    """Each as a user starts it."""

    def run_json(self, name: str, *words: str) -> Any:
        """What a program writes into the file that it is given last."""
        out = self.root / "result.json"
        status, said = run_program(ROOT / "benchmarks" / name, *words, str(out))
        self.assertEqual(0, status, said[-3000:])
        return json.loads(out.read_text("utf-8"))

    @pytest.mark.vllm
    @unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
    @pytest.mark.thorough
    def test_connector(self) -> None:
        found = self.run_json("connector.py", "--quick", "--json")
        self.assertLessEqual({"overhead", "time to first token", "after a restart"}, found.keys())

    @pytest.mark.thorough
    def test_directory(self) -> None:
        kv = f"{self.root}/kv"
        words = (kv, "--sizes", "64,128,256", "--only", "du", "--rounds", "1", "--enough", "0")
        (found,) = self.run_json("scale.py", *words, "--out").values()
        self.assertEqual({"64", "128", "256"}, {*found["costs"]["du"]})
        found = self.run_json("directory.py", kv, "2048", "--seconds", "0.2", "--out")
        self.assertEqual((12, 8), (len(found["serving"]), len(found["commands"])))
        self.assertFalse(Path(kv).exists())

    def test_speed(self) -> None:
        """A directory and a bucket are measured; nothing stays in the bucket."""
        words = ("--tiny", "--model", "Qwen3-8B", "--prefill", "1000")
        shown = printed(speed.main, self.root, *words)
        for expected in ("read, warm", "lookup, found", "worth from tokens", "GPU-direct"):
            self.assertIn(expected, shown)
        pytest.importorskip("obstore")
        url, file = memory_url(), self.root / "report.json"
        printed(speed.main, url, "--tiny", "--model", 1024, "--prefill", "0.001", "--json", file)
        report = json.loads(file.read_text("utf-8"))
        self.assertEqual([1, 4, 16], [one["chunks"] for one in report["load_times"]])
        self.assertEqual(64, report["worth_loading"]["worth_from_tokens"])
        self.assertEqual([], list(Bucket.at(url).walk()))


class SuiteTest(DirectoryTest):
    """`dev.py bench`."""

    def test_wrong_bytes(self) -> None:
        """A load that brings other bytes, or none, is no measurement; nor is a replay's hit."""
        stored = Stored(self.root, TINY[0])
        memory = make("staged", TINY[0])
        load = stored.loader(memory)
        stored.check(memory, load)
        flip(Path(stored.paths[1]), 5000)
        with self.assertLogs("vua", "WARNING"), self.assertRaises(speed.MeasurementError):
            stored.check(memory, load)
        for place in ("dense", "paged", "staged"):
            with self.assertRaises(speed.MeasurementError):
                stored.check(make(place, TINY[0]), lambda: None)
        requests, there = [Request((1, 2, 3), 1536)], self.root / "replayed"
        replay(there, requests, silent)
        flip(next(there.rglob("*.safetensors")), 4200)
        with self.assertLogs("vua", "WARNING"), self.assertRaises(speed.MeasurementError):
            replay(there, requests, silent)

    @pytest.mark.thorough
    def test_all(self) -> None:
        """Every number is measured or says why not; peers take their turns."""
        worker = str(ROOT / "benchmarks" / "peers" / "worker.py")
        peers = (sys.executable, worker, "raw", "safetensors", "torch")
        report: Any = run_suite(Settings(self.root, tiny=True, peers=peers), lambda _: None)
        skipped = {one["id"] for one in report["unmeasured"]}
        self.assertEqual(set(NUMBERS), {one["id"] for one in report["rows"]} | skipped - {"C1-C3"})
        self.assertLessEqual(skipped, {"C1-C3", "C2", "C3", "C5", "C6"})
        arms = {one["arm"] for one in report["rows"]}
        self.assertLessEqual({"peer: safetensors", "peer: torch.save and load"}, arms)
        self.assertEqual([], list(self.root.iterdir()))

    def test_replay(self) -> None:
        """An unbounded store serves every block that was there; policies are counted beside."""
        trace, bad = self.root / "trace", self.root / "bad"
        lines = [{"hash_ids": list(r.blocks), "input_length": r.tokens}
                 for r in multi_round(2, 2, 1)]  # fmt: skip
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        words = ("replay", trace, "--json", "--sizes", "100,20%")
        report = json.loads(printed(lab_main, *words))
        hits = {(one["policy"], one["blocks"]): one["hit_ratio"] for one in report["bounded"]}
        self.assertEqual((0.5, 0.5), (report["hit_ratio"], hits["LRU", 100]))
        self.assertEqual(0.3, hits["Belady", 1])  # of 5 distinct blocks: the one all have
        bad.write_text('{"hash_ids": [1], "input_length": 512}\n{"hash": 3}\n')
        with self.assertRaisesRegex(InputError, "bad, line 2"):
            read(bad)


class FirstRunTest(DirectoryTest):
    """The first run on a GPU, small and on the CPU."""

    @pytest.mark.thorough
    def test_all(self) -> None:
        """All parts but those with vLLM work; each checks its bytes."""
        out = self.root / "result.tar"
        words = ("--out", out, "--cpu", "--dir", self.root, "--done", ",".join(WITH_VLLM))
        program = ROOT / "benchmarks/gpu/first_run.py"
        status, said = run_program(program, *map(str, words))
        files = first_run.read(out)
        summary = json.loads(files["summary.json"])
        failed = [name for name, part in summary.items() if part.get("exit", 0)]
        self.assertEqual((0, []), (status, failed), said[-3000:])
        self.assertEqual([one for one in first_run.NAMES if one not in WITH_VLLM], list(summary))
        rows = json.loads(files["transfers.json"])
        self.assertEqual({f"G{n}" for n in (1, 2, 3, 5, 6, 7)}, {row["id"] for row in rows})

    @pytest.mark.vllm
    @unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
    @pytest.mark.thorough
    def test_with_vllm(self) -> None:
        """An engine in several set-ups, and times to the first token."""
        for part, keys in (("cases", {"eager"}), ("plain", {"plain", "cold", "warm"})):
            (words,) = (one.cpu for one in first_run.PARTS if one.name == part)
            out = self.root / f"{part}.json"
            path, *more = (word.format(dir=self.root, json=out) for word in words)
            status, said = run_program(Path(path), *more)
            self.assertEqual(0, status, said[-3000:])
            found = json.loads(out.read_text("utf-8"))
            self.assertLessEqual(keys, {one["phase"] for one in found} if part == "plain"
                                 else {one for one in found if found[one]["good"]})  # fmt: skip

    def test_chosen(self) -> None:
        """Parts fit into nine minutes, name each file with tests of a GPU, and can be left out."""
        self.assertLessEqual(sum(part.limit_s for part in first_run.PARTS), 540)
        tests = (ROOT / "tests").rglob("test_*.py")
        mark = "pytest.mark." + "gpu"
        marked = {str(path.relative_to(ROOT)) for path in tests if mark in path.read_text()}
        self.assertEqual(marked, set(first_run.TESTS))
        names = [part.name for part in first_run.chosen([], ["plain", "cold", "warm"])]
        self.assertEqual(first_run.NAMES[3:], names)
        with self.assertRaises(ValueError):
            first_run.chosen(["warm"], [])
