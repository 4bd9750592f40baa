"""Mirrors `docs/_tools/manpage.py`: the manual page says what `--help` does, and is one."""

from __future__ import annotations

import re
import shutil
import subprocess
import unittest

import manpage
from commands import run, verbs
from helpers import DirectoryTest
from vua.cli.command import EXAMPLES


class ManPageTest(DirectoryTest):
    """`dev.py man`."""

    def test_all_is_told(self) -> None:
        """Each command's arguments, options and examples are in it, and the exit status."""
        page = manpage.page().replace("\\-", "-")
        told = [part.partition("\n") for part in re.split(r"^\.SS ", page, flags=re.MULTILINE)]
        by_name = {head.split()[1]: body for head, _, body in told[1:]}
        self.assertEqual(verbs(), by_name.keys())
        for name, body in by_name.items():
            shown = run(name, "--help")[1]
            for words in re.findall(r"^  (--?\w[\w-]*)", shown, re.MULTILINE):
                self.assertRegex(body, rf"\n\\fB[^\n]*{words}\b")
            for line in EXAMPLES[name]:
                self.assertIn(f"\n{line}\n", body)
        self.assertIn("Exit status: 0 success", page)

    @unittest.skipUnless(shutil.which("groff"), "groff is not installed")
    def test_is_one(self) -> None:
        """Groff renders it without a warning."""
        file = self.root / "man" / "vua.1"
        manpage.main(str(file))
        done = subprocess.run(
            ["groff", "-man", "-Tascii", "-ww", str(file)],
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual((0, ""), (done.returncode, done.stderr))
        shown = re.sub(r"\x1b\[\d*m|.\x08", "", done.stdout)
        self.assertIn("--max-bytes SIZE", shown)
        self.assertIn('eval "$(vua completion bash)"', shown)
