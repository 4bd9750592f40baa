import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def run(*command: str, cwd: str | Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs a program of the repository as a user would."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


class TestPrograms(unittest.TestCase):
    def test_benchmark(self) -> None:
        """The byte path benchmark runs, verifies what it loads and writes its JSON."""
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "result.json"
            done = run("benchmarks/bytepath.py", "--quick", "--json", str(out))

            self.assertEqual(0, done.returncode, done.stderr)
            self.assertEqual(3, len(json.loads(out.read_text())["loads"]))

    def test_readme_example(self) -> None:
        """The README's Python example runs as it stands."""
        text = (ROOT / "README.md").read_text()
        code = text.split("```python\n")[1].split("```")[0]
        with tempfile.TemporaryDirectory() as name:
            done = run("-c", code, cwd=name)

        self.assertEqual(0, done.returncode, done.stderr)
        self.assertIn("Retrieved tokens: tensor([[", done.stdout)
