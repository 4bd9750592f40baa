"""Mirrors `vua.cli.output` and `vua.cli.command`: how commands look, and what a terminal gets."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Sequence
from unittest import mock

import pytest

from commands import CliTest, run
from helpers import flip
from vua.cli import main
from vua.cli import output as text
from vua.cli.transfer import Writer

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def on_terminal(words: Sequence[object], **environment: str) -> str:
    """What a command writes to stdout that is a terminal."""
    here, other = pty.openpty()
    variables = {"TERM": "xterm-256color", **environment}
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
            main([str(word) for word in words])
        with contextlib.suppress(OSError):  # EIO: all was read, and the other end is closed
            while data := screen.read(1 << 16):
                shown += data
    return shown.decode().replace("\r\n", "\n")


class TestLook(CliTest):
    """The same words in a pipe, and on a terminal."""

    def setUp(self) -> None:
        """Have a damaged file."""
        super().setUp()
        flip(self.entries()[0], 4100)

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
        """On a terminal the words are the same."""
        for words in (["verify", self.root], ["pin", self.root]):
            with self.subTest(words):
                shown = COLOURS.sub("", on_terminal(words))
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


class TestBorder(CliTest):
    """What a terminal is shown: printable characters and ends of lines."""

    EVIL = "\x1b[2J\x1b]0;owned\x07\r\x9b31m\x7f\u202eevil"

    @pytest.mark.thorough
    def test_progress(self) -> None:
        """On a terminal the line that changes has no other control characters than its own."""
        self.put(self.EVIL, 2)
        for command in (["verify", str(self.root)], ["import", str(self.root), "-"]):
            shown = self.on_terminal(command)
            own = shown.replace("\r\x1b[K", "").replace("\r\n", "\n")
            own = re.sub(r"\x1b\[[0-9;]*m", "", own)  # colours
            with self.subTest(command=command):
                self.assertNotEqual(shown, own)  # there was a line
                self.assertEqual(set(), {one for one in own if not one.isprintable()} - {"\n"})

    def on_terminal(self, command: list[str]) -> str:
        """What the command writes to a terminal; an archive with names of evil comes by stdin."""
        archive = io.BytesIO()
        writer = Writer(archive)
        for number in range(3):
            writer.add(f"{number}{self.EVIL[:9]}", b"x")  # tar has ASCII names only
        archive.seek(0)
        main_, other = pty.openpty()
        with tempfile.TemporaryFile() as stdin:
            stdin.write(archive.read())
            stdin.seek(0)
            done = subprocess.Popen(
                [sys.executable, "-m", "vua", *command], stdin=stdin, stdout=other, stderr=other
            )
            os.close(other)
            shown = b""
            with contextlib.suppress(OSError):  # EIO: the other end is closed
                while data := os.read(main_, 4096):
                    shown += data
            os.close(main_)
            done.wait(60)
        return shown.decode()


class TestDirectory(CliTest):
    """The directory from the environment."""

    def test_left_out(self) -> None:
        """Where VUA_PATH names the directory a command without other words takes it."""
        for words in (
            ["ls", "-l"],
            ["verify"],
            ["ttl", "--off"],
            ["pin"],
            ["rm", "--all", "--dry-run"],
        ):
            expected = run(words[0], self.root, *words[1:])
            with mock.patch.dict(os.environ, VUA_PATH=str(self.root)):
                self.assertEqual(expected, run(*words))
                self.assertEqual(2, run(words[0], "30d")[0])

    def test_given(self) -> None:
        """A directory that is given is taken; without either there is a clear error."""
        empty = self.root / "empty"
        empty.mkdir()
        with mock.patch.dict(os.environ, VUA_PATH=str(self.root)):
            self.assertEqual((0, f"{empty}: no namespaces\n", ""), run("ls", empty))
            self.assertEqual(2, run("ls", empty, empty)[0])
        with mock.patch.dict(os.environ):
            os.environ.pop("VUA_PATH", None)
            code, _, err = run("ls")
            self.assertEqual(2, code)
            self.assertIn("Missing argument 'DIR'", err)
