import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import mutation
from e2e.harness import run_program
from gpu import first_run
from helpers import ROOT

WITH_VLLM = ("plain", "cold", "warm", "cases")
"""Parts of the first run on a GPU; `plain` does `cold` and `warm` on a CPU."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def run(
    *command: str, cwd: str | Path = ROOT, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """Runs a program of the repository as a user would."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class TestPrograms(unittest.TestCase):
    @pytest.mark.vllm
    @unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
    @pytest.mark.thorough
    def test_connector_benchmark(self) -> None:
        """The benchmark with vLLM runs; it ends with an error where tokens or hits are wrong."""
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "result.json"
            program = ROOT / "benchmarks" / "connector.py"
            status, said = run_program(program, "--quick", "--json", str(out))

            self.assertEqual(0, status, said[-3000:])
            parts = {"overhead", "time to first token", "after a restart"}
            self.assertLessEqual(parts, json.loads(out.read_text()).keys())

    def test_errors_by_name(self) -> None:
        """Each error that `dev.py mutate` makes by name still has its place in the source."""
        for named in mutation.NAMED:
            with self.subTest(named.name):
                self.assertEqual(named.name, mutation.named_mutant(named).name)

    @pytest.mark.thorough
    def test_scale_benchmark(self) -> None:
        """What grows with chunks is measured and fitted; the largest size tests the fit."""
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "result.json"
            words = ("--sizes", "64,128,256", "--only", "du", "--rounds", "1", "--enough", "0")
            done = run("benchmarks/scale.py", f"{name}/kv", *words, "--out", str(out))

            self.assertEqual(0, done.returncode, done.stderr)
            self.assertIn("predictions of the largest size are within 25 %", done.stdout)
            (found,) = json.loads(out.read_text()).values()
            self.assertEqual([64, 128, 256], found["sizes"])
            self.assertEqual({"64", "128", "256"}, {*found["costs"]["du"]})
            self.assertFalse(Path(name, "kv").exists())

    @pytest.mark.thorough
    def test_directory_benchmark(self) -> None:
        """The tools on a directory, and its use beside a small one; wrong bytes are an error."""
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "result.json"
            arguments = (f"{name}/kv", "2048", "--seconds", "0.2", "--out", str(out))
            done = run("benchmarks/directory.py", *arguments)

            self.assertEqual(0, done.returncode, done.stderr)
            found = json.loads(out.read_text())
            self.assertEqual(12, len(found["serving"]))
            self.assertEqual(9, len(found["commands"]))
            self.assertFalse(Path(name, "kv").exists())

    @pytest.mark.thorough
    def test_first_gpu_run(self) -> None:
        """All parts of the first run on a GPU work, small and on the CPU; each checks its bytes.

        Those with vLLM are tests of their own.
        """
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "result.tar"
            program = ("benchmarks/gpu/first_run.py", "--out", str(out), "--cpu", "--dir", name)
            done = run(*program, "--done", ",".join(WITH_VLLM), timeout_s=1200)
            files = first_run.read(out)

        summary = json.loads(files["summary.json"])
        failed = [name for name, part in summary.items() if part.get("exit", 0)]
        logs = [files[f"{name}.log"].decode()[-3000:] for name in failed]
        self.assertEqual([], failed, "\n".join(logs))
        self.assertEqual(0, done.returncode, done.stderr[-3000:])
        self.assertEqual([one for one in first_run.NAMES if one not in WITH_VLLM], list(summary))
        found = {
            part: json.loads(files[f"{part}.json"]) for part in summary if f"{part}.json" in files
        }
        rows = found["transfers"]
        self.assertEqual({f"G{n}" for n in (1, 2, 3, 5, 6, 7)}, {row["id"] for row in rows})
        self.assertIn("GDS, verified, to blocks", {row["arm"] for row in rows})
        self.assertEqual({"load", "save"}, {row["way"] for row in found["sweep"]})
        self.assertTrue(found["library"][1]["tokens equal"])

    def of_vllm(self, part: str) -> Any:
        """What a part of the first run finds with vLLM on the CPU."""
        (words,) = (one.cpu for one in first_run.PARTS if one.name == part)
        with tempfile.TemporaryDirectory() as name:
            out = Path(name, "found.json")
            path, *more = (word.format(dir=name, json=out) for word in words)
            status, said = run_program(Path(path), *more)
            self.assertEqual(0, status, said[-3000:])
            return json.loads(out.read_text())

    @pytest.mark.vllm
    @unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
    @pytest.mark.thorough
    def test_first_gpu_run_of_vllm(self) -> None:
        """The same of an engine in several set-ups, and of times to the first token."""
        self.assertTrue(self.of_vllm("cases")["eager"]["good"])
        phases = {phase["phase"]: phase["rows"] for phase in self.of_vllm("plain")}
        self.assertEqual({"plain", "cold", "warm"}, phases.keys())
        loaded = {row["what"]: row for row in phases["warm"] if row["size"] == 256}
        self.assertEqual({"restart", "after a reset"}, loaded.keys())
        for row in loaded.values():
            self.assertEqual(([256], True), (row["cached"], row["tokens equal"]))
            self.assertIn("get_num_new_matched_tokens", row["hooks ms"][0])
        self.assertIn("of computed, plain", loaded["restart"])

    @pytest.mark.vllm
    @unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
    @pytest.mark.thorough
    def test_first_tokens_are_judged(self) -> None:
        """What was stored and not loaded, and other tokens than before, are told as failures."""
        with tempfile.TemporaryDirectory() as name:
            program = ROOT / "benchmarks" / "gpu" / "first_token.py"
            words = ("--tiny", "--dir", name, "warm")
            early, why = run_program(program, *words)
            rows = [{"size": size, "what": "computed", "median ms": 1.0} for size in (64, 256)]
            before = {"answers": {"64/0": [1, 2, 3, 4]}, "rows": rows}
            Path(name, "cold.json").write_text(json.dumps(before))
            warm, said = run_program(program, *words)

        self.assertEqual((2, 1), (early, warm))
        self.assertIn("run that first", why)
        self.assertIn("restart, prompt 256/0: 0 tokens cached, not 256", said)
        self.assertIn("restart, prompt 64/0: tokens [", said)
        self.assertNotIn("restart, prompt 64/1: tokens [", said)

    def test_first_gpu_run_in_time(self) -> None:
        """The limits add up to nine minutes; what matters most comes first."""
        self.assertLessEqual(sum(part.limit_s for part in first_run.PARTS), 540)
        self.assertEqual(["plain", "cold", "warm", "sweep"], first_run.NAMES[:4])
        self.assertEqual(len(first_run.NAMES), len(set(first_run.NAMES)))

    def test_first_gpu_run_names_files(self) -> None:
        """Each program of a part exists; each file with a test that needs a GPU is named."""
        mark = "pytest.mark." + "gpu"
        for part in first_run.PARTS:
            for word in (*part.gpu, *part.cpu):
                if word.endswith(".py"):
                    self.assertTrue((ROOT / word).is_file(), word)
        marked = {
            str(path.relative_to(ROOT))
            for path in (ROOT / "tests").rglob("test_*.py")
            if mark in path.read_text()
        }
        self.assertEqual(marked, set(first_run.TESTS))

    def test_first_gpu_run_chooses(self) -> None:
        """Parts are left out by name; `warm` is refused without `cold`; unknown names, too."""

        def names(*, only: str = "", done: str = "") -> list[str]:
            return [part.name for part in first_run.chosen(*map(first_run.names, (only, done)))]

        self.assertEqual(first_run.NAMES, names())
        self.assertEqual(first_run.NAMES[3:], names(done="plain,cold,warm"))
        self.assertEqual(["cold", "warm", "cases"], names(only="cases,warm,cold"))
        self.assertEqual(["sweep"], names(only="sweep,tests", done="tests"))
        for wrong in ({"only": "warm"}, {"done": "plain,cold"}, {"only": "sweeps"}):
            with self.subTest(wrong=wrong), self.assertRaises(ValueError):
                names(**wrong)

    @pytest.mark.thorough
    def test_first_gpu_run_goes_on(self) -> None:
        """A part that hangs, with what it has started, or fails, ends alone; all is kept.

        What hangs is aborted, and shows where it was.
        """
        hanging = "import os, time; os.fork(); print('begun', flush=True); time.sleep(3600)"
        failing = "import sys; open(sys.argv[1], 'w').write('[1]'); sys.exit(3)"
        parts = (
            first_run.Part("hangs", 3, ("-c", hanging)),
            first_run.Part("fails", 600, ("-c", failing, "{json}")),
            first_run.Part("works", 600, ("-c", "print('well')")),
        )
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "result.tar"
            self.assertFalse(first_run.go_through(parts[:2], out, name, cpu=False))
            self.assertTrue(first_run.go_through(parts[2:], out, name, cpu=False))
            files = first_run.read(out)
            self.assertTrue(first_run.go_through(parts[:1], out, name, cpu=True))
            again = first_run.read(out)
            self.assertEqual([out], list(Path(name).iterdir()))

        hangs, fails, works = json.loads(files["summary.json"]).values()
        self.assertEqual("ended at its limit of 3 s", hangs["status"])
        self.assertEqual(-signal.SIGABRT, hangs["exit"])
        self.assertIn(b"Fatal Python error: Aborted", files["hangs.log"])
        self.assertEqual((3, b"[1]"), (fails["exit"], files["fails.json"]))
        self.assertEqual((0, b"well\n"), (works["exit"], files["works.log"]))
        self.assertEqual("not on the CPU", json.loads(again["summary.json"])["hangs"]["status"])
        self.assertEqual({*files} - {"hangs.log"}, {*again})
