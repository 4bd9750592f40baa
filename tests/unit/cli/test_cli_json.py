"""`docs/commands.md` says what `--json` prints: no field is missing there, and none is too many."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import numpy as np
import pytest
from safetensors.numpy import save_file

from buckets import memory_url
from commands import PAGE, TOKENS, CliTest, documented, run, run_json, verbs
from helpers import caches_of, flip
from vua.connector.load_policy import PrefillSpeed
from vua.connector.savings import Savings
from vua.core import VUA, VUAConfig
from vua.security.settings import Security
from vua.storage.bucket import Bucket

WHOLE: Final = {
    "identity",
    "layout",
    "first_missing",
    "damaged",
    "others",
    "loads",
    "salts",
    "parted",
}
WHOLE_TOO: Final = {"used_within", "sealed", "authentic", "temporary", "quarantined", "model"}
WHOLE_OF_BENCH: Final = {
    "machine",
    "write_cpu_ms_per_mib",
    "metadata_us",
    "unmeasured",
    "by_length",
}
"""Fields that are described as one."""


def fields(value: object, at: str = "") -> Iterator[str]:
    """The fields of a report, as the page writes them."""
    whole = at.rsplit(".", 1)[-1] in WHOLE | WHOLE_TOO | WHOLE_OF_BENCH
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


class CommonTest(JsonTest):
    """A directory and a bucket are told of by the same fields."""

    def setUp(self) -> None:
        pytest.importorskip("obstore")
        super().setUp()
        self.url = memory_url()
        for model, chunks in (("llama", 3), ("qwen", 1)):
            with VUA(VUAConfig(split_factor=4, model=model), self.url) as vua:
                cache = caches_of(layers=3, heads=2, tokens=4 * chunks, dim=8)
                vua.put(TOKENS[: 4 * chunks], cache)

    @pytest.mark.thorough
    def test_every_verb(self) -> None:
        """Of every command that takes both; a field that one of them cannot fill is null."""
        short = {one.parent.name for one in self.entries(1)}
        chunk = next(one.parent.name for one in self.entries() if one.parent.name not in short)
        keys = sorted(one.key for one in Bucket.at(self.url).walk() if one.key.endswith("tensors"))
        tried = set()
        for words in (
            ["ls"], ["ls", "--long"], ["du"], ["du", "--quick"], ["verify"], ["ttl"], ["ttl", "1d"],
            ["top", "--once", "--interval", "0.01"], ["doctor"], ["inspect"],
            ["explain", "--tokens", self.beside / "tokens"], ["pin", chunk], ["pin"],
            ["gc", "--max-bytes", "1G", "--yes"], ["gc", "--dry-run"], ["pin", chunk, "--remove"],
            ["rm", chunk, "--dry-run"], ["export", "FILE", "--all"],
            ["import", "FILE"], ["rm", "--all", "--yes"],
        ):  # fmt: skip
            reports = []
            for number, where in enumerate((str(self.root), self.url)):
                file = str(self.beside / f"{number}.tar")
                asked = [words[0], where, *words[1:]]
                if words[0] == "inspect":
                    asked[1] = (str(self.entries()[0]), f"{where}/{keys[0]}")[number]
                asked = [file if word == "FILE" else word for word in asked]
                reports.append(run_json(*asked)[1])
            with self.subTest(words):
                self.assertEqual([], list(differences(*reports)))
            tried.add(words[0])
        others = {
            "args",
            "completion",
            "events",
            "identify",
            "key",
            "ui",
            "warm",
        }  # of one kind, or of none
        self.assertEqual(verbs(), tried | others)


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
        listed = re.findall(r"^\| (\d+) \|", PAGE.read_text("utf-8"), re.MULTILINE)
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
