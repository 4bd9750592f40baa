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
    def test_readme_example(self) -> None:
        """The README's Python example runs as it stands."""
        text = (ROOT / "README.md").read_text()
        code = text.split("```python\n")[1].split("```")[0]
        with tempfile.TemporaryDirectory() as name:
            done = run("-c", code, cwd=name)

        self.assertEqual(0, done.returncode, done.stderr)
        self.assertIn("Retrieved tokens: tensor([[", done.stdout)
