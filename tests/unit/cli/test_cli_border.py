"""Mirrors `vua.cli.output` and `vua.cli.command`: what comes out of a command, and what goes in."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from unittest import mock

import pytest

from commands import CliTest, run
from vua.catalog.archive import Writer


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
