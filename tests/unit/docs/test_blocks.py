"""What the documentation shows can be done as it stands.

Of each page the blocks run in their order, in a new directory: ``python`` as one program, and of
``console`` the commands after ``$``, whose output must be what the page shows (``...`` stands for
anything; ``# exit status 1`` behind a command for another status than 0). Of ``bash`` the commands
of `vua` and `dev.py` are parsed, not run; ``json`` must be JSON. ``<!-- part -->`` on the line
before a block of python: a part of a program, which must be Python, but does not run.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from helpers import ROOT
from vua.cli import command as cli
from vua.cli import main

BLOCK = re.compile(r"^(<!-- part -->\n)?( *)```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
STATUS = re.compile(r"\s+# exit status (\d)$")
RUN = ("python", "console")
HELP = [sys.executable, str(ROOT / "dev.py"), "help"]


class Block(NamedTuple):
    """A block of code of a page."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, without their indentation."""
    found = []
    for part, space, name, text in BLOCK.findall(page.read_text("utf-8")):
        language = "part" if part and name == "python" else name
        found.append(Block(language, re.sub(f"^{space}", "", text, flags=re.MULTILINE)))
    return found


@functools.cache
def commands_of_dev() -> list[str]:
    ran = subprocess.run(HELP, capture_output=True, text=True, check=True)
    return re.findall(r"^  ([\w-]+) ", ran.stdout, re.MULTILINE)


def pages() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in found if blocks(page)]


def call(words: list[str]) -> tuple[int, str]:
    """Run a command of `vua` here; return its status, and what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = main(words)
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue()


def session(text: str) -> list[tuple[str, int, str]]:
    """The commands of a console block, each with its status and the output that is shown."""
    found: list[tuple[str, int, str]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            status = STATUS.search(line)
            command = STATUS.sub("", line[2:])
            found.append((command, int(status[1]) if status else 0, ""))
        else:
            command, code, shown = found[-1]
            found[-1] = (command, code, f"{shown}{line}\n")
    return found


def fits(shown: str, printed: str) -> bool:
    """Whether the output is as it is shown; nothing shown: whatever was printed."""
    parts = [re.escape(re.sub(r"[ \t]+", " ", one)) for one in shown.strip().split("...")]
    plain = re.sub(r"[ \t]+", " ", printed.strip())
    return not shown.strip() or re.fullmatch(".*?".join(parts), plain, re.DOTALL) is not None


def commands(text: str) -> list[list[str]]:
    """Our own commands in a bash block, without comments, pipes and redirections."""
    joined = text.replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        if not re.match(r"(vua|python3? dev\.py) ", line):
            continue
        words = shlex.split(line, comments=True)
        for end in ("|", ">", "<", "&&", "||", ";", "&"):
            words = words[: words.index(end)] if end in words else words
        found.append(words)
    return found


class BlockTest(unittest.TestCase):
    def run_page(self, page: Path) -> None:
        """Run the page's blocks of python and console."""
        space: dict[str, Any] = {"__name__": "__main__"}
        with tempfile.TemporaryDirectory() as name, mock.patch.dict(os.environ):
            os.environ.pop("VUA_PATH", None)
            before = Path.cwd()
            try:
                os.chdir(name)
                for block in blocks(page):
                    if block.language == "python":
                        with contextlib.redirect_stdout(io.StringIO()):
                            exec(compile(block.text, page.name, "exec"), space)
                    elif block.language == "console":
                        self.converse(page, block.text)
            finally:
                os.chdir(before)

    def converse(self, page: Path, text: str) -> None:
        for command, status, shown in session(text):
            words = shlex.split(command)
            self.assertEqual("vua", words[0], f"{page.name}: only `vua` is run in a console block")
            code, printed = call(words[1:])
            self.assertEqual(status, code, f"{page.name}: {command}\n{printed}")
            self.assertTrue(
                fits(shown, printed), f"{page.name}: {command}\n{printed}\nnot\n{shown}"
            )

    def test_run(self) -> None:
        """Every block of python and console runs, and shows what the page says."""
        count = 0
        for page in pages():
            with self.subTest(page=page.name):
                self.run_page(page)
                count += sum(block.language in RUN for block in blocks(page))
        self.assertLess(2, count)

    def test_parse(self) -> None:
        """Every other command exists, with these arguments; JSON is JSON."""
        count = 0
        for page in pages():
            for block in blocks(page):
                with self.subTest(page=page.name, block=block.text[:60]):
                    if block.language == "json":
                        json.loads(block.text)
                    if block.language == "part":
                        compile(block.text, page.name, "exec")
                    for words in commands(block.text) if block.language == "bash" else []:
                        self.parse(words)
                        count += 1
        self.assertLess(20, count)

    def parse(self, words: list[str]) -> None:
        if words[0] == "vua":
            with cli.vua.make_context("vua", words[1:]) as context:
                name, command, more = cli.vua.resolve_command(context, words[1:])
                assert command is not None
                command.make_context(name, more, parent=context)
        else:
            self.assertIn(words[2], commands_of_dev())
