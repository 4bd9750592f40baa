import json
import os
import subprocess
import sys
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path

import pytest

import mutation
from gpu import first_run
from helpers import ROOT

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
            done = run("benchmarks/connector.py", "--quick", "--json", str(out), timeout_s=600)

            self.assertEqual(0, done.returncode, done.stderr)
            parts = {"overhead", "time to first token", "after a restart"}
            self.assertLessEqual(parts, json.loads(out.read_text()).keys())

    def test_scaling_benchmark(self) -> None:
        """A load by 1 to 8 threads over slow reads is right, and not faster than they are."""
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "result.json"
            sizes = ("--mib", "8", "--rounds", "1", "--mb-per-s", "100")
            done = run("benchmarks/scaling.py", *sizes, "--dir", name, "--json", str(out))

            self.assertEqual(0, done.returncode, done.stderr)
            rows = json.loads(out.read_text())
        self.assertEqual([1, 2, 4, 8], [row["threads"] for row in rows])
        self.assertTrue(all(0 < row["of streams"] < 1.1 for row in rows), rows)

    def test_errors_by_name(self) -> None:
        """Each error that `dev.py mutate` makes by name still has its place in the source."""
        for named in mutation.NAMED:
            with self.subTest(named.name):
                self.assertEqual(named.name, mutation.named_mutant(named).name)

    @pytest.mark.thorough
    def test_directory_benchmark(self) -> None:
        """The tools on a directory, and its use beside a small one; wrong bytes are an error."""
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "result.json"
            arguments = (f"{name}/kv", "2048", "--seconds", "2", "--out", str(out))
            done = run("benchmarks/directory.py", *arguments)

            self.assertEqual(0, done.returncode, done.stderr)
            found = json.loads(out.read_text())
            self.assertEqual(12, len(found["serving"]))
            self.assertEqual(9, len(found["commands"]))
            self.assertFalse(Path(name, "kv").exists())

    @pytest.mark.vllm
    @unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
    @pytest.mark.thorough
    def test_first_gpu_run(self) -> None:
        """All steps of the first run on a GPU work, small and on the CPU; each checks its bytes."""
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "result.json"
            program = ("benchmarks/gpu/first_run.py", str(out), "--cpu", "--dir", name)
            done = run(*program, timeout_s=1200)

            self.assertEqual(0, done.returncode, done.stderr)
            found = json.loads(out.read_text())
        self.assertEqual({"1", "2", "3", "4", "5", "6"}, {name[0] for name in found})
        parts = {name: part for name, part in found.items() if "exit" in part}
        self.assertEqual({}, {name: part for name, part in parts.items() if part["exit"] != 0})
        rows = parts["2 transfers"]["results"]
        self.assertEqual({f"G{n}" for n in (1, 2, 3, 5, 6, 7)}, {row["id"] for row in rows})
        self.assertIn("GDS, verified, to blocks", {row["arm"] for row in rows})
        self.assertEqual(8, len(parts["3 loads"]["results"]))
        self.assertTrue(parts["4 vllm"]["results"]["eager"]["good"])
        self.assertEqual(8, len(parts["5 engine"]["results"]))

    def test_first_gpu_run_goes_on(self) -> None:
        """A part that hangs, with what it has started, or fails, ends alone; all is written."""
        forks = "import os, time; os.fork(); print('begun', flush=True); time.sleep(3600)"
        results = "import sys; open(sys.argv[1], 'w').write('[1]'); sys.exit(3)"
        parts = (
            first_run.Part(1, "hangs", 1, (), ("-c", forks)),
            first_run.Part(2, "fails", 600, (), ("-c", results, "{json}")),
            first_run.Part(3, "is missing", 600, (), ("-c", ""), ("/nowhere/program",)),
            first_run.Part(4, "works", 600, (), ("-c", "print('well')")),
            first_run.Part(5, "is for a GPU", 600, ("-c", "")),
        )
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "result.json"
            for some in (parts[:2], parts[2:]):
                first_run.go_through(some, out, name, cpu=True)
            hangs, fails, missing, works, gpu = json.loads(out.read_text()).values()

        self.assertEqual("ended at its limit of 1 s", hangs["status"])
        self.assertEqual((3, [1]), (fails["exit"], fails["results"]))
        self.assertIn("cannot be started", missing["status"])
        self.assertEqual((0, "well\n"), (works["exit"], works["output"]))
        self.assertEqual("not without a GPU", gpu["status"])
