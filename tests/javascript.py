"""Runs the implementation of the format in JavaScript."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path
from typing import Any

from helpers import ROOT

HERE = ROOT / "implementations" / "javascript"
NODE = shutil.which("node") or ""
OLDEST = 20
TIMEOUT_S = 300


def _is_new_enough() -> bool:
    """Whether there is a node that the implementation runs with."""
    said = subprocess.check_output([NODE, "--version"], text=True) if NODE else "v0.0"
    return int(said[1:].partition(".")[0]) >= OLDEST


needs_node = unittest.skipUnless(
    _is_new_enough(), f"node {OLDEST} is not installed: `python3 dev.py tools` installs one"
)


def node(*arguments: str | Path) -> str:
    """Run a program of the implementation; return what it prints."""
    ran = subprocess.run(
        [NODE, *map(str, arguments)],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    return ran.stdout


def run_command(name: str, **arguments: Any) -> list[str]:
    """Run a command of `judge.js`; return the lines that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "arguments.json")
        path.write_text(json.dumps(arguments))
        return node("judge.js", name, path).splitlines()
