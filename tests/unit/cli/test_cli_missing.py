"""Every command says alike that a directory is missing, and counts in the right number."""

from __future__ import annotations

import re
from pathlib import Path

from commands import CliTest, run, verbs
from vua.cli.command import EXAMPLES
from vua.io import words

MAKES = {"import": "it makes the directory", "key": "it makes the folder of keys"}
"""Commands for which nothing has to be there."""
TAKES = {
    "ls": [], "du": [], "top": ["--once"], "ui": [], "events": [], "verify": [], "doctor": [],
    "inspect": ["abcdef"], "explain": ["--tokens", "none"], "gc": [], "ttl": [], "pin": [],
    "rm": ["--all"], "export": ["x.tar", "--all"], "identify": [],
}  # fmt: skip
"""Commands that begin with a directory, and what they need beside it."""


class MissingTest(CliTest):
    """A directory that is not there, and a file in its place."""

    def test_all_commands(self) -> None:
        """Each has a row here."""
        others = {"args", "completion", "warm"}  # take an engine, a shell, a file
        self.assertEqual(verbs(), {*TAKES, *MAKES, *others})
        self.assertEqual(verbs(), EXAMPLES.keys())

    def test_missing(self) -> None:
        """One line: what was expected, what was found, what to do."""
        none = self.root / "none"
        for name, more in TAKES.items():
            with self.subTest(name):
                code, out, err = run(name, none, *more)
                self.assertEqual((2, ""), (code, out))
                what = "model" if name == "identify" else "cache"
                found = "expected a directory, found nothing; name the directory of the"
                self.assertEqual(f"vua {name}: {none}: {found} {what}\n", err)
        _, _, err = run("args", "docker", none)
        self.assertIn(f"{none}: expected a directory, found nothing; make it first: mkdir", err)

    def test_file(self) -> None:
        """Likewise of a file in its place."""
        file = self.root / "file"
        file.touch()
        for name in sorted(TAKES.keys() - {"inspect", "identify"}):
            with self.subTest(name):
                code, out, err = run(name, file, *TAKES[name])
                self.assertEqual((2, ""), (code, out))
                self.assertIn(f"vua {name}: {file}: expected a directory, found a file; name", err)

    def test_missing_files(self) -> None:
        """A file that is not there is named, without the system's number."""
        none = self.root / "none"
        for asked in (
            ("import", self.root, none),
            ("warm", none, "--server", "http://127.0.0.1:1"),
            ("explain", self.root, "--tokens", none),
            ("explain", self.root, "--order", none),
        ):
            with self.subTest(asked[0]):
                code, out, err = run(*asked)
                self.assertEqual((2, ""), (code, out))
                self.assertEqual(f"vua {asked[0]}: {none}: No such file or directory\n", err)


class CountedTest(CliTest):
    """Numbers of things."""

    def test_nouns(self) -> None:
        """One is one, none and several are many."""
        self.assertEqual("1 chunk", words.counted(1, "chunk"))
        self.assertEqual("0 chunks", words.counted(0, "chunk"))
        self.assertEqual("1,234 entries are", words.counted(1234, "entry", "is", "are"))
        self.assertEqual("1 entry is", words.counted(1, "entry", "is", "are"))
        self.assertEqual(["17 B", "1.0 KiB"], [words.size(17), words.size(1024)])

    def test_reports(self) -> None:
        """No command counts one of many: a stray, a temporary file, one of quarantine."""
        space: Path = self.entries(1)[0].parents[2]
        (self.root / "stray").touch()
        (space / ".tmp-mine").touch()
        for asked in (
            ["ls"],
            ["du"],
            ["verify"],
            ["gc", "--dry-run"],
            ["rm", "--all", "--dry-run"],
        ):
            with self.subTest(asked):
                _, out, err = run(asked[0], self.root, *asked[1:])
                self.assertNotRegex(out + err, r"(?<![\d,.])1 [a-z]+(?: [a-z]+)? (?:are|stay)\b")
                wrong = re.findall(r"(?<![\d,.])1 (?:[a-z]+ )?(?:files|chunks|names|spaces)\b", out)
                self.assertEqual([], wrong)
