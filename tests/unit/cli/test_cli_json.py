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
from typing import Final

import numpy as np
from safetensors.numpy import save_file

from commands import PAGE, TOKENS, CliTest, documented, run, run_json, verbs
from helpers import flip
from vua.connector.load_policy import PrefillSpeed
from vua.connector.savings import Savings
from vua.security.settings import Security

SNAPSHOTS: Final = Path(__file__).with_name("snapshots")
WHOLE: Final = frozenset(
    ["identity", "layout", "first_missing", "damaged", "others", "loads", "salts", "parted",
     "used_within", "sealed", "authentic", "temporary", "quarantined", "model"]
)  # fmt: skip
"""Fields that are described as one."""


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


class JsonTest(CliTest):
    def setUp(self) -> None:
        super().setUp()
        self.beside = self.root.with_name(f"{self.root.name}-beside")
        self.beside.mkdir()
        self.addCleanup(lambda: [one.unlink() for one in self.beside.iterdir()]
                        and self.beside.rmdir())  # fmt: skip
        save_file({"w": np.zeros(1)}, self.beside / "model.safetensors")
        (self.beside / "tokens").write_text(json.dumps(TOKENS.tolist() + [1] * 8))
        order = {"prefix": TOKENS.tolist(), "documents": [[1] * 8]}
        (self.beside / "order").write_text(json.dumps(order))
        engine = Savings(PrefillSpeed(64))
        engine.keep_at(self.root, "", Security())
        engine.looked_up(self.entries()[0].parents[2].name, 1, 2, 4)
        engine.close()

    def commands(self) -> dict[str, list[list[object]]]:
        """Verbs by the section that describes them; together they show every field of it."""
        root, beside = self.root, self.beside
        short = {one.parent.name for one in self.entries(1)}
        chunk = next(name for one in self.entries() if (name := one.parent.name) not in short)
        found: dict[str, list[list[object]]] = {
            "ls": [["ls", root, "-l"]],
            "inspect": [["inspect", self.entries()[0]]],
            "du": [["du", root]],
            "top": [["top", root, "--once", "--interval", "0.01"]],
            "doctor": [["doctor", root]],
            "explain": [["explain", root, "--tokens", beside / "tokens"],
                        ["explain", root, "--order", beside / "order"],
                        ["explain", root, "--recent"]],
            "export": [["export", root, beside / "tar", "--all"], ["import", root, beside / "tar"]],
            "verify": [["verify", root]],
            "gc": [["gc", root]],
            "completion": [["completion", "bash"]],
            "identify": [["identify", beside]],
            "args": [["args", "vllm", "/kv"]],
            "rm": [["pin", root, chunk], ["ttl", root], ["key", beside / "key"],
                   ["rm", root, chunk, "--pinned"]],
        }  # fmt: skip
        return found

    def test_every_verb(self) -> None:
        """What a verb prints is what the page says; what runs on or has an engine is elsewhere."""
        tried = {words[0] for commands in self.commands().values() for words in commands}
        self.assertEqual({"ui", "events", "warm"}, verbs() - tried)
        for verb, commands in self.commands().items():
            if verb == "verify":
                flip(self.entries()[0], 4200)
            seen: set[str] = set()
            for words in commands:
                _, report = run_json(*words)  # type: ignore[arg-type]
                seen |= set(fields(report))
            with self.subTest(verb):
                known = documented(verb)
                extra = {one for one in seen if not any(below(one, two) or below(two, one)
                                                        for two in known)}  # fmt: skip
                lacking = {one for one in known if not any(below(two, one) for two in seen)}
                self.assertEqual(set(), extra, "printed, and not described")
                self.assertEqual(set(), lacking, "described, and not printed")


def differences(one: object, other: object, at: str = "") -> Iterator[str]:
    """The fields that only one of two reports has; null stands for what a field may hold."""
    if isinstance(one, dict) and isinstance(other, dict):
        yield from (f"{at}.{name}" for name in one.keys() ^ other.keys())
        for name in one.keys() & other.keys() - {"salts"}:  # whose names are data
            yield from differences(one[name], other[name], f"{at}.{name}")
    elif isinstance(one, list) and isinstance(other, list):
        for pair in zip(one, other, strict=False):
            yield from differences(*pair, at=f"{at}[]")


class CommonTest(unittest.TestCase):
    def test_every_verb(self) -> None:
        """A directory and a bucket are told of by the same fields; what one cannot fill is null."""
        kinds = []
        for kind in ("directory", "bucket"):
            said = SNAPSHOTS.joinpath(f"{kind}.txt").read_text("utf-8").split("\n$ vua ")
            reports = [json.JSONDecoder().raw_decode(part.partition("stdout:\n")[2])[0]
                       for part in said]  # fmt: skip
            kinds.append([*zip(said, reports, strict=True)])
        for (words, one), (_, other) in zip(*kinds, strict=False):
            with self.subTest(words.partition("\n")[0]):
                self.assertEqual([], list(differences(one, other)))
        self.assertLess(20, len(kinds[1]))


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
