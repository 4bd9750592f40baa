import json
import os
import subprocess
import sys
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path

import pytest

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

    @pytest.mark.vllm
    @unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
    @pytest.mark.thorough
    def test_gpu_engine_benchmark(self) -> None:
        """The benchmark for vLLM on a GPU works, on the CPU and tiny, and checks what it loads."""
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "result.json"
            done = run("benchmarks/gpu/engine.py", "--tiny", "--json", str(out), timeout_s=600)

            self.assertEqual(0, done.returncode, done.stderr)
            self.assertEqual(8, len(json.loads(out.read_text())))

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

    @pytest.mark.thorough
    def test_gpu_transfers_benchmark(self) -> None:
        """The benchmark of transfers works on the CPU, with every way to the blocks checked."""
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "result.json"
            program = ("benchmarks/gpu/transfers.py", "--device", "cpu", "--rounds", "1")
            done = run(*program, "--dir", name, "--json", str(out), timeout_s=300)

            self.assertEqual(0, done.returncode, done.stderr)
            rows = json.loads(out.read_text())
        self.assertEqual({f"G{n}" for n in (1, 2, 3, 5, 6, 7)}, {row["id"] for row in rows})
        self.assertIn("GDS, verified, to blocks", {row["arm"] for row in rows})
