import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import mutation
import scale
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

    @pytest.mark.thorough
    def test_scaling_benchmark(self) -> None:
        """A load by 1 to 8 threads over slow reads is right; its speed is for people to judge."""
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "result.json"
            sizes = ("--mib", "8", "--rounds", "1", "--mb-per-s", "100")
            done = run("benchmarks/scaling.py", *sizes, "--dir", name, "--json", str(out))

            self.assertEqual(0, done.returncode, done.stderr)
            rows = json.loads(out.read_text())
        self.assertEqual([1, 2, 4, 8], [row["threads"] for row in rows])
        self.assertTrue(all(row["of streams"] > 0 for row in rows), rows)

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
            words = ("--sizes", "64,128,256", "--only", "du", "--rounds", "1", "--out", str(out))
            done = run("benchmarks/scale.py", f"{name}/kv", *words)

            self.assertEqual(0, done.returncode, done.stderr)
            self.assertIn("predictions of the largest size are within 25 %", done.stdout)
            (found,) = json.loads(out.read_text()).values()
            self.assertEqual([64, 128, 256], found["sizes"])
            self.assertEqual({"64", "128", "256"}, {*found["costs"]["du"]})
            self.assertFalse(Path(name, "kv").exists())

    def test_memory_is_the_commands_own(self) -> None:
        """What the measuring process occupies does not count."""
        kept = np.ones(64 << 20, dtype=np.uint8)
        cost = scale.cost_of([sys.executable, "-I", "-S", "-c", "pass"], lambda: 0)
        self.assertLess(cost.peak_mb, kept.nbytes >> 20)
        with self.assertRaises(SystemExit):
            scale.cost_of([sys.executable, "-c", "raise SystemExit(3)"], lambda: 0)

    def test_lines_are_fitted(self) -> None:
        """A line that is measured predicts what comes; neither part of it is negative."""
        line = [(n, 3.0 + 0.5 * n) for n in (10, 30, 100)]
        np.testing.assert_allclose((3.0, 0.5), scale.fitted(line), rtol=1e-6)
        np.testing.assert_allclose(
            (0.0, 2.0), scale.fitted([(n, 2.0 * n) for n in (1, 2, 4)]), atol=1e-9
        )
        base, slope = scale.fitted([(1, 5.0), (2, 4.0), (4, 1.0)])
        self.assertTrue(base >= 0 and slope >= 0)
        costs = {
            n: {"cpu_s": 1 + n / 100, "peak_mb": 50, "requests": n * n} for n in (100, 200, 400)
        }
        by_size = {"x": {str(n): one for n, one in costs.items()}}
        report = {"kind": "ext4", "sizes": [*costs], "costs": by_size}
        rows = {one["measure"]: one for one in scale.predictions(report)}
        self.assertAlmostEqual(1.0, rows["cpu_s"]["of_measured"], places=6)
        self.assertAlmostEqual(1e7, rows["cpu_s"]["goals"][2], delta=10)
        self.assertLess(rows["requests"]["of_measured"], 0.75)  # control: it is no line
        self.assertIn("2 of 3", scale.summary(report | {"date": "today"}))
        other = report | {"kind": "nfs4", "sizes": [100, 400]}  # without processor times
        heads, _, kind, cells, guest, few = scale.table(report, other).splitlines()
        self.assertTrue(heads.startswith("| | 100 | 400 | predicted / measured | 10^7 |"))
        self.assertTrue(kind.startswith("| **ext4**: s, MB, requests | | |"))
        self.assertIn("| x | 2; 50; 10,000 | 5; 50; 160,000 | 1.00; 1.00; 0.30 | ", cells)
        self.assertIn("| 100,001; 50; - |", cells)
        self.assertTrue(guest.startswith("| **nfs4**: MB, requests |"))
        self.assertIn("| x | 50; 10,000 | 50; 160,000 |", few)

    def test_samples_are_flat(self) -> None:
        """What looks at 131,072 names costs no more from there on; control: a bucket is listed."""
        sizes = (10_000, 30_000, 100_000, 1 << 20)
        by_size = {str(n): {"cpu_s": 1 + min(n, 1 << 17) / 1e5, "peak_mb": 0, "requests": 0}
                   for n in sizes}  # fmt: skip
        report = {"sizes": [*sizes], "costs": {"du --quick": by_size}}
        (flat,) = scale.predictions(report | {"kind": "ext4"})
        (listed,) = scale.predictions(report | {"kind": "bucket, moto"})
        self.assertAlmostEqual(1.0, flat["of_measured"], places=6)
        self.assertAlmostEqual(flat["measured"][-1], flat["goals"][0], places=6)
        self.assertGreater(listed["of_measured"], 2)

    def test_memory_of_a_bucket(self) -> None:
        """It grows by the pages that are held at a time; control: in a directory by chunks."""
        parts = {10_000: 1, 100_000: 6, 1_000_000: 6}
        by_size = {
            str(n): {"cpu_s": 0, "peak_mb": 60 + 2 * held, "requests": 0}
            for n, held in parts.items()
        }
        report = {"sizes": [*parts], "costs": {"du": by_size}}
        (held,) = scale.predictions(report | {"kind": "bucket, seaweedfs"})
        (grown,) = scale.predictions(report | {"kind": "ext4"})
        self.assertAlmostEqual(1.0, held["of_measured"], places=6)
        self.assertAlmostEqual(72, held["goals"][2], places=6)
        self.assertGreater(grown["of_measured"], 2)

    def test_what_is_held_of_each_chunk(self) -> None:
        """It is known beside the pages; control: `du` holds nothing of a chunk."""
        parts = {10_000: 1, 100_000: 6, 1_000_000: 6}
        by_size = {
            str(n): {"cpu_s": 0, "peak_mb": 60 + 2 * held + 16e-6 * n, "requests": 0}
            for n, held in parts.items()
        }
        report = {"kind": "bucket, seaweedfs", "sizes": [*parts]}
        (held,) = scale.predictions(report | {"costs": {"top --once": by_size}})
        (pages,) = scale.predictions(report | {"costs": {"du": by_size}})
        self.assertAlmostEqual(1.0, held["of_measured"], places=6)
        self.assertAlmostEqual(72 + 16_000, held["goals"][2], places=6)
        self.assertLess(pages["of_measured"], 0.9)

    def test_noise_is_no_slope(self) -> None:
        """Processor time that hardly differs is constant; control: with a bit more it grows."""
        for second, grows in ((1.2, False), (1.3, True)):
            costs = {10_000: 1.0, 100_000: second, 1_000_000: 1.1}
            by_size = {
                str(n): {"cpu_s": cost, "peak_mb": 0, "requests": 0} for n, cost in costs.items()
            }
            report = {"kind": "ext4", "sizes": [*costs], "costs": {"x": by_size}}
            (row,) = scale.predictions(report)
            self.assertEqual(grows, row["of_measured"] > 2)

    def test_a_mount_asks_again(self) -> None:
        """RPCs of whole folders, of an engine's start, and of a second look that comes late."""
        sizes = (10_000, 100_000, 1_000_000)
        folders = {10_000: 256, 100_000: 256, 1_000_000: 34}
        quick = {n: 3 * 256 + 5 * many + many * n / 256 / 400 for n, many in folders.items()}
        asked = {
            "du": {n: 100 + 3 * n for n in sizes},
            "du --quick": quick,
            scale.USE: {n: 600 + many for n, many in quick.items()},
            "top --once": {n: 2000 + n / 300 + n * (n == 1_000_000) for n in sizes},
        }
        costs = {
            name: {
                str(n): {"cpu_s": 1, "peak_mb": 0, "requests": many, "wall_s": 2 + n / 6000}
                for n, many in by_size.items()
            }
            for name, by_size in asked.items()
        }
        report = {"kind": "nfs4", "sizes": [*sizes], "costs": costs}
        for row in scale.predictions(report):
            self.assertAlmostEqual(1.0, row["of_measured"], 2, row["what"])
        del costs["du"]  # control: as a line
        rows = {row["what"]: row["of_measured"] for row in scale.predictions(report)}
        self.assertGreater(rows["du --quick"], 1.25)

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
        """All parts of the first run on a GPU work, small and on the CPU; each checks its bytes."""
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "result.tar"
            program = ("benchmarks/gpu/first_run.py", "--out", str(out), "--cpu", "--dir", name)
            done = run(*program, timeout_s=1200)
            files = first_run.read(out)

        logs = {part: log.decode()[-3000:] for part, log in files.items() if part[-4:] == ".log"}
        self.assertEqual(0, done.returncode, (done.stdout, done.stderr, logs))
        summary = json.loads(files["summary.json"])
        self.assertEqual(first_run.NAMES, list(summary))
        self.assertEqual({0}, {part.get("exit", 0) for part in summary.values()})
        found = {
            part: json.loads(files[f"{part}.json"]) for part in summary if f"{part}.json" in files
        }
        rows = found["transfers"]
        self.assertEqual({f"G{n}" for n in (1, 2, 3, 5, 6, 7)}, {row["id"] for row in rows})
        self.assertIn("GDS, verified, to blocks", {row["arm"] for row in rows})
        self.assertEqual({"load", "save"}, {row["way"] for row in found["sweep"]})
        self.assertTrue(found["cases"]["eager"]["good"])
        self.assertTrue(found["library"][1]["tokens equal"])
        phases = {phase["phase"]: phase["rows"] for phase in found["plain"]}
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
            program = ("benchmarks/gpu/first_token.py", "--tiny", "--dir", name)
            early = run(*program, "warm")
            cold = run(*program, "cold")
            results = Path(name, "cold.json")
            before = json.loads(results.read_text())
            before["answers"]["64/0"][0] += 1
            results.write_text(json.dumps(before))
            for path in Path(name, "vua").rglob("*.safetensors"):
                path.unlink()
            warm = run(*program, "warm")

        self.assertEqual((2, 0, 1), (early.returncode, cold.returncode, warm.returncode))
        self.assertIn("run that first", early.stderr)
        self.assertIn("restart, prompt 256/0: 0 tokens cached, not 256", warm.stdout)
        self.assertIn("restart, prompt 64/0: tokens [", warm.stdout)
        self.assertNotIn("restart, prompt 64/1: tokens [", warm.stdout)

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
