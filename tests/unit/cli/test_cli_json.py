"""`docs/commands.md` says what `--json` prints: no field is missing there, and none is too many."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from commands import PAGE, CliTest, documented, run, verbs
from helpers import flip

SNAPSHOTS: Final = Path(__file__).with_name("snapshots")
WHOLE: Final = frozenset(
    ["identity", "layout", "first_missing", "damaged", "others", "loads", "salts", "parted",
     "used_within", "sealed", "authentic", "temporary", "quarantined", "model"]
)  # fmt: skip
"""Fields that are described as one."""
GROUPED: Final = (("rm", "ttl", "pin", "key"), ("export", "import"))
"""Verbs that a section describes together."""


def fields(value: object, at: str = "") -> Iterator[str]:
    """The fields of a report, as the page writes them."""
    whole = at.rsplit(".", 1)[-1] in WHOLE
    if not whole and isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for one in value:
            yield from fields(one, f"{at}[]")
    elif not whole and isinstance(value, dict):
        for name, one in value.items():
            yield from fields(one, f"{at}.{_data(at, name, one)}".lstrip("."))
    else:
        yield at


def _data(at: str, name: str, value: object) -> str:
    """A field's name, or * where names are data."""
    return "*" if at == "deleted" and isinstance(value, dict) else name


def below(inner: str, outer: str) -> bool:
    """Whether a field is another one, or in it (an empty list shows no field of its items)."""
    return inner == outer or inner.startswith((f"{outer}.", f"{outer}[]"))


def reports() -> list[tuple[str, Any]]:
    """What commands on a directory print, with the words of each."""
    said = SNAPSHOTS.joinpath("directory.txt").read_text("utf-8").split("$ vua ")[1:]
    decode = json.JSONDecoder().raw_decode
    return [
        (one.partition("\n")[0], decode(one.partition("stdout:\n")[2])[0])
        for one in said
        if "stdout:" in one
    ]


class JsonTest(unittest.TestCase):
    def test_every_verb(self) -> None:
        """What a verb prints is what the page says; what runs on or has an engine is elsewhere."""
        seen: dict[str, set[str]] = {}
        for words, report in reports():
            verb = words.split(" ")[0]
            section = next(one for one in (*GROUPED, (verb,)) if verb in one)[0]
            seen.setdefault(section, set()).update(fields(report))
        tried = {verb for one in seen for verb in next((g for g in GROUPED if one in g), (one,))}
        self.assertEqual({"ui", "warm"}, verbs() - tried)
        for verb in seen.keys() - {"events"}:
            with self.subTest(verb):
                known = documented(verb)
                extra = {one for one in seen[verb] if not any(below(one, two) or below(two, one)
                                                              for two in known)}  # fmt: skip
                lacking = {one for one in known if not any(below(two, one) for two in seen[verb])}
                self.assertEqual(set(), extra, "printed, and not described")
                self.assertEqual(set(), lacking, "described, and not printed")


class ExitStatusTest(CliTest):
    """The table of exit status, which is the only one."""

    def test_table(self) -> None:
        """It has each status that commands end with."""
        flip(self.entries()[0], 4200)
        missing = str(self.root / "missing")
        found = {
            0: [run("ls", self.root)[0], run("--help")[0], run("--version")[0], run()[0]],
            1: [run("verify", self.root)[0], run("inspect", self.entries()[0])[0]],
            2: [run("ls", missing)[0], run("unheard")[0], run("rm", self.root)[0],
                run("import", self.root, missing)[0], run("ttl", self.root, "soon")[0]],
            130: [self.interrupted()],
        }  # fmt: skip
        for status, codes in found.items():
            self.assertEqual({status}, set(codes))
        listed = re.findall(r"^- (\d+): ", PAGE.read_text("utf-8"), re.MULTILINE)
        self.assertEqual(list(found), list(map(int, listed)))

    def interrupted(self) -> int:
        """The status of a command that Ctrl-C ends after its first lines."""
        command = [sys.executable, "-m", "vua", "top", str(self.root), "--interval", "0.01"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            self.assertTrue(running.stdout.readline())
            running.send_signal(signal.SIGINT)
            running.stdout.read()
            return running.wait(120)
