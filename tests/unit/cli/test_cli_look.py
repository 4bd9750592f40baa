"""Mirrors `vua.cli.output` and `vua.cli.args`: how commands look."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import unicodedata
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

from commands import CliTest, run
from helpers import flip
from vua.cli import main
from vua.cli import output as text
from vua.cli.command import ENTRIES

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def on_terminal(words: Sequence[object], **environment: str) -> str:
    """What a command writes to stdout that is a terminal of 90 columns."""
    return drawn(lambda: main([str(word) for word in words]), 90, **environment)


def drawn(work: Callable[[], object], columns: int, **environment: str) -> str:
    """What `work` writes to stdout that is a terminal of so many columns."""
    here, other = pty.openpty()
    variables = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "20", **environment}
    shown = b""
    with os.fdopen(here, "rb", buffering=0) as screen:
        with (
            os.fdopen(other, "w", encoding="utf-8") as stdout,
            mock.patch.dict(os.environ, variables),
            mock.patch("sys.stdout", stdout),
            mock.patch("sys.stderr", io.StringIO()),
        ):
            for name in {"NO_COLOR", "FORCE_COLOR"} - set(environment):
                os.environ.pop(name, None)
            work()
        with contextlib.suppress(OSError):  # EIO: all was read, and the other end is closed
            while data := screen.read(1 << 16):
                shown += data
    return shown.decode().replace("\r\n", "\n")


def columns(line: str) -> int:
    """How many columns a terminal needs for a line."""
    return sum(1 + (unicodedata.east_asian_width(one) in "WF") for one in line)


class TestLook(CliTest):
    """The same words in a pipe, and on a terminal."""

    def setUp(self) -> None:
        """Have a damaged file, and a name that is wider than a terminal."""
        super().setUp()
        self.put("a model's name that goes on and on, wider than any column", 2)
        flip(self.entries()[0], 4100)

    def test_width(self) -> None:
        """Tables keep to the terminal's width, and nothing of a long cell is lost."""
        shown = COLOURS.sub("", on_terminal(["ls", self.root]))
        lines = shown.splitlines()
        self.assertLessEqual(max(map(len, lines)), 90)
        self.assertGreater(max(map(len, run("ls", self.root)[1].splitlines())), 90)
        for whole in ("namespace", "column", *(one.parts[-4][:12] for one in self.files())):
            self.assertIn(whole, shown)

    def test_names(self) -> None:
        """A name is folded on a terminal alone, with colours and without; all of it is there."""
        name = "some-organisation/" + "a-model" * 20 + "-Instruct"
        self.put(name, 1)
        self.assertIn(name, run("ls", self.root)[1])
        for term in ("xterm", "dumb"):
            shown = COLOURS.sub("", on_terminal(["ls", self.root], TERM=term))
            self.assertNotIn(name, shown)
            folded = [line[14:].split("  ")[0].strip() for line in shown.splitlines()]
            self.assertIn(name, "".join(folded))

    def test_narrow(self) -> None:
        """A terminal that is too narrow for a row's numbers shows all their digits."""
        table = ["chunks", " bytes", " a rate", " another rate", " a third rate", "name"]
        row = ["145867", "9876543", "1111111", "2222222", "3333333", "some/long/path"]
        for width in (20, 40, 60, 80, 200):
            with self.subTest(width):
                shown = COLOURS.sub("", drawn(lambda: text.table(table, [row]), width))
                for cell in row[:5]:
                    self.assertIn(cell, shown.split(), shown)

    def test_colours(self) -> None:
        """What judges has a colour on a terminal, unless NO_COLOR is set; a pipe has none."""
        words = ["verify", self.root]
        self.assertIn("\x1b[1;31mcorrupt: ", on_terminal(words))
        for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
            with self.subTest(environment):
                shown = on_terminal(words, **environment)
                self.assertNotIn("\x1b[1;31m", shown)
                self.assertNotIn("\x1b[31m", shown)
                self.assertIn("corrupt: ", shown)
        self.assertNotIn("\x1b", run(*words)[1])

    def test_same_words(self) -> None:
        """On a terminal the words are the same, where there is room for them."""
        for words in (["verify", self.root], ["inspect", self.entries()[1]], ["pin", self.root]):
            with self.subTest(words):
                shown = COLOURS.sub("", on_terminal(words, COLUMNS="300"))
                self.assertEqual(run(*words)[1].split(), shown.split())


class TestProgress(unittest.TestCase):
    """Lines of progress."""

    def test_where(self) -> None:
        """It is shown on a terminal, taken away in the end, and nowhere else."""
        for tty, term, shown in ((True, "xterm", True), (False, "xterm", False),
                                 (True, "dumb", False)):  # fmt: skip
            stream = io.StringIO()
            stream.isatty = lambda tty=tty: tty  # type: ignore[method-assign,misc]
            environment = mock.patch.dict(os.environ, TERM=term, COLUMNS="40")
            with environment, mock.patch("sys.stderr", stream), text.progress() as show:
                show("half and half, and more than there is room for", 1, 2)
            self.assertEqual(shown, "50%  half" in stream.getvalue())
            self.assertEqual(shown, stream.getvalue().endswith("\r\x1b[K"))
            self.assertLess(len(stream.getvalue()), 40 + 2 * len("\r\x1b[K"))


class TestCompletion(CliTest):
    """Shells complete words."""

    def test_bash(self) -> None:
        """A real bash that read the script completes an option."""
        script = Path(self.root, "vua")
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m vua "$@"\n')
        script.chmod(0o700)
        asked = """
            eval "$(_VUA_COMPLETE=bash_source vua)"
            COMP_WORDS=(vua verify --rep) COMP_CWORD=2
            _vua_completion vua; printf '%s\\n' "${COMPREPLY[@]}"
        """
        path = f"{self.root}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", asked],
            env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
            timeout=120,
        )  # fmt: skip
        self.assertEqual({"--repair"}, {one.strip() for one in done.stdout.split("\n")} - {""})

    def test_completion_imports_no_command(self) -> None:
        code = (
            "import sys; from vua.cli import main; code = main(sys.argv[1:]); "
            "print(code, *(name for name in sys.modules if name.startswith('vua.cli.')))"
        )
        asked = {"_VUA_COMPLETE": "bash_complete", "COMP_WORDS": "vua ", "COMP_CWORD": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        *found, imported = done.stdout.splitlines()
        self.assertEqual([f"plain,{name}" for name in ENTRIES], found)
        frame = {f"vua.cli.{name}" for name in ("command", "interrupts", "output", "root")}
        self.assertEqual({"0", *frame}, {*imported.split()})
