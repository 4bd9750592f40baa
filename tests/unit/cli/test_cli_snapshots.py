"""What every command prints is as it was: JSON, help, errors and exit codes, in `snapshots/`.

`python3 dev.py snapshots` writes these files anew: look at the difference before you commit it.
Times, sizes of the disk and what depends on the machine are replaced by the kind of the value.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import signal
import subprocess
import sys
import unittest
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from buckets import memory_url
from commands import PAGE, TOKENS, CliTest, documented, run, verbs
from helpers import DirectoryTest, caches_of, flip
from vua.connector.load_policy import PrefillSpeed, Savings
from vua.core import VUA, VUAConfig
from vua.security.settings import Security
from vua.storage import KINDS
from vua.storage.bucket import Bucket

pytest.importorskip("obstore")

SNAPSHOTS: Final = Path(__file__).with_name("snapshots")
WRITES: Final = "VUA_WRITE_SNAPSHOTS" in os.environ
VOLATILE: Final = frozenset([
    "created_s", "day", "file_nbytes", "first_s", "free_nbytes", "header_nbytes", "last_s",
    "level", "max_bytes", "min_free_bytes", "min_free_inodes", "modified_s", "newest_ns",
    "newest_s", "nbytes_per_s", "new_nbytes_per_s", "new_per_s", "oldest_ns", "oldest_s",
    "text", "ts", "gone_per_s", "room_nbytes", "seconds", "used_per_s", "requests",
    "requests_dollars", "writer", "chunk_nbytes",
])  # fmt: skip
"""Fields whose values depend on the moment or the machine."""
CLICK: Final = metadata.version("click").startswith("8.5.")
"""Whether it is the version of `click` whose texts are in the files; the tests' extra pins it."""


def kind_of(value: object) -> object:
    """The kind of a value, and of what an object's fields are."""
    if isinstance(value, dict):
        return {name: kind_of(one) for name, one in value.items()}
    if isinstance(value, list):
        return [kind_of(one) for one in value[:1]]
    return "<number>" if type(value) in (int, float) else f"<{type(value).__name__}>"


def masked(value: Any, name: str = "") -> object:
    """A report without what changes from run to run."""
    if name in VOLATILE and value is not None:
        return kind_of(value)
    if isinstance(value, dict):
        return {key: masked(one, key) for key, one in value.items()}
    return [masked(one, name) for one in value] if isinstance(value, list) else value


def shown(text: str, names: Mapping[str, str]) -> str:
    """A text with the places' names in place of what they are called today."""
    for found, name in names.items():
        text = text.replace(found, name)
    return text


def told(words: Sequence[object], names: Mapping[str, str]) -> str:
    """A command, its exit code and what it printed."""
    code, out, err = run(*map(str, words))  # type: ignore[arg-type]
    if words[:1] == ["events"] and "--json" in words:
        lines = [masked(json.loads(line)) for line in out.splitlines()]
        out = "".join(f"{json.dumps(line, sort_keys=True)}\n" for line in lines)
    elif "--json" in words and out:
        out = json.dumps(masked(json.loads(out)), indent=1, sort_keys=True) + "\n"
    judges_host = words[:1] == ["doctor"] and "--json" in words  # where something may be bad
    title = f"$ vua {' '.join(map(str, words))}".rstrip()
    parts = [
        title,
        f"exit {'0 or 1' if judges_host and code < 2 else code}",
        *(["stdout:", out] if out else []),
        *(["stderr:", err] * bool(err)),
    ]
    return shown("\n".join(part.rstrip("\n") for part in parts) + "\n", names)


def differences(one: object, other: object, at: str = "") -> Iterator[str]:
    """The fields that only one of two reports has; null stands for what a field may hold."""
    if isinstance(one, dict) and isinstance(other, dict):
        yield from (f"{at}.{name}" for name in one.keys() ^ other.keys())
        for name in one.keys() & other.keys() - {"salts"}:  # whose names are data
            yield from differences(one[name], other[name], f"{at}.{name}")
    elif isinstance(one, list) and isinstance(other, list):
        for pair in zip(one, other, strict=False):
            yield from differences(*pair, at=f"{at}[]")


def document(said: str) -> object:
    """The first JSON document in what a command printed."""
    return json.JSONDecoder().raw_decode(said.partition("stdout:\n")[2] or "null")[0]


class SnapshotTest(CliTest):
    """A directory with two namespaces, and the same in a bucket."""

    maxDiff = None

    def setUp(self) -> None:
        """Store the same in a bucket; have a prompt."""
        super().setUp()
        self.enterContext(mock.patch.dict(os.environ, COLUMNS="100", LINES="50"))
        os.environ.pop("VUA_PATH", None)
        self.url = memory_url()
        for model, chunks, dtype in (("llama", 3, torch.float32), ("qwen", 1, torch.bfloat16)):
            with VUA(VUAConfig(split_factor=4, model=model), self.url) as vua:
                cache = caches_of(layers=3, heads=2, tokens=4 * chunks, dim=8, dtype=dtype)
                vua.put(TOKENS[: 4 * chunks], cache)
        self.beside = Path(f"{self.root}-beside")
        self.beside.mkdir()
        self.addCleanup(self.remove_beside)
        (self.beside / "tokens").write_text(json.dumps([*TOKENS.tolist(), *[1] * 8]))
        order = {"prefix": TOKENS.tolist(), "documents": [[1] * 8]}
        (self.beside / "order").write_text(json.dumps(order))
        save_file({"w": np.zeros(1)}, self.beside / "model.safetensors")
        engine = Savings(PrefillSpeed(64))
        engine.keep_at(self.root, "", Security())
        engine.looked_up(self.entries()[0].parents[2].name, 1, 2, 4)
        engine.close()
        self.names = {
            str(self.beside): "BESIDE",
            str(self.root): "DIR",
            self.url: "URL",
            self.url.rpartition("/")[2]: "PLACE",
        }
        short = {one.parent.name for one in self.entries(1)}
        self.chunk = min(name for one in self.entries() if (name := one.parent.name) not in short)
        self.file = self.entries()[0]

    def remove_beside(self) -> None:
        for path in self.beside.iterdir():
            path.unlink()
        self.beside.rmdir()

    def check(self, name: str, texts: Iterator[str] | Sequence[str]) -> None:
        """Compare what was printed with a file, or write that."""
        text, path = "\n".join(texts), SNAPSHOTS / f"{name}.txt"
        if WRITES:
            path.write_text(text, encoding="utf-8")
        self.assertEqual(path.read_text(encoding="utf-8"), text)

    def commands(self, where: str, kind: str) -> Iterator[list[object]]:
        """Every command that speaks JSON, in an order in which each finds what it needs."""
        tokens, archive = self.beside / "tokens", self.beside / f"{kind}.tar"
        yield ["ls", where]
        yield ["ls", where, "--long", "--sort", "size"]
        yield ["du", where]
        yield ["du", where, "--exact"]
        yield ["verify", where]
        yield ["top", where, "--once", "--interval", "0.01"]
        yield ["explain", where, "--tokens", tokens, "--block-tokens", "4"]
        yield ["explain", where, "--order", self.beside / "order"]
        yield ["explain", where, "--recent"]
        yield ["doctor", where]
        yield ["events", where]
        yield ["export", where, archive, "--all"]
        yield ["import", where, archive]
        yield ["ttl", where]
        yield ["ttl", where, "30d"]
        yield ["ttl", where, "--off"]
        yield ["pin", where]
        yield ["pin", where, self.chunk]
        yield ["pin", where]
        yield ["gc", where, "--max-bytes", "0", "--dry-run"]
        yield ["rm", where, self.chunk, "--dry-run"]
        yield ["rm", where, self.chunk]
        yield ["pin", where, self.chunk, "--remove"]
        yield ["gc", where, "--max-bytes", "1G", "--yes"]
        yield ["gc", where, "--ttl", "1e9s", "--set", "--yes"]
        self.damage(where)
        yield ["verify", where]
        yield ["export", where, self.beside / f"{kind}-damaged.tar", "--all"]
        yield ["verify", where, "--repair"]
        yield ["rm", where, self.chunk]
        yield ["rm", where, "--all", "--yes"]
        yield ["du", where]

    def entry(self, where: str) -> str:
        return f"{where}/{self.file.relative_to(self.root)}"

    def damage(self, where: str) -> None:
        if where != self.url:
            flip(self.file, 4200)
            return
        bucket, key = Bucket.at(where), self.entry(where).removeprefix(f"{where}/")
        data = bytearray(bucket.get(key)[1])
        data[4200] ^= 1
        bucket.put(key, bytes(data))

    def test_json(self) -> None:
        """JSON of commands on a directory; of a bucket what differs, and the requests it takes."""
        counts, texts, others = Bucket.at(self.url).counts, list[str](), list[str]()
        both = self.commands(str(self.root), "dir"), self.commands(self.url, "far")
        tar = {"far.tar": "dir.tar", "far-damaged": "dir-damaged"}
        in_bucket = {**self.names, self.url: "DIR", **tar}
        for here, there in zip(*both, strict=True):
            texts.append(told([*here, "--json"], self.names))
            before = counts.copy()
            found, sent = told([*there, "--json"], in_bucket), counts - before
            with self.subTest(here):  # what one cannot fill is null
                self.assertEqual([], list(differences(document(texts[-1]), document(found))))
            lines = difflib.unified_diff(texts[-1].splitlines(), found.splitlines(), n=0)
            differs = [one for one in lines if not one.startswith(("---", "+++", "@@"))]
            requests = [f"{kind}: {sent[kind]}" for kind in KINDS if sent[kind]]
            others.append("\n".join([texts[-1].partition("\n")[0], *differs, *requests, ""]))
        for words in (
            ["key", self.beside / "key"],
            ["identify", self.beside],
            ["args", "vllm", "/kv"],
        ):
            texts.append(told([*words, "--json"], self.names))
        self.check("directory", texts)
        self.check("bucket", others)


class TextTest(DirectoryTest):
    """What depends on no cache that is stored."""

    maxDiff = None
    check = SnapshotTest.check

    def setUp(self) -> None:
        super().setUp()
        self.enterContext(mock.patch.dict(os.environ, COLUMNS="100", LINES="50"))
        os.environ.pop("VUA_PATH", None)

    @unittest.skipUnless(CLICK, "other versions lay out help otherwise")
    def test_help(self) -> None:
        """The help of all commands."""
        names = {str(self.root): "DIR"}
        texts = [told([], names), *(told([verb, "--help"], names) for verb in sorted(verbs()))]
        self.check("help", texts)

    @unittest.skipUnless(CLICK, "other versions say it otherwise")
    def test_errors(self) -> None:
        """Words that make no sense, places that are not there, and what may not be done."""
        root, empty = str(self.root / "none"), self.root / "empty"
        empty.mkdir()
        other = self.root / "other"
        other.mkdir()
        (other / "file").write_text("x")
        url = memory_url()
        commands: list[list[object]] = [
            ["unheard"], ["ls", "--unheard"], ["ls", "a", "b"], ["ls", root, "--sort", "age"],
            *([verb] for verb in sorted(verbs())), ["lst", empty],
            *([verb, root, *more] for verb, more in (
                ("ls", []), ("du", []), ("gc", []), ("ttl", []), ("pin", []), ("rm", ["--all"]),
                ("verify", []), ("doctor", []), ("top", ["--once"]), ("events", []),
                ("explain", ["--tokens", "none"]), ("export", ["x", "--all"]),
                ("ui", []),
            )),
            *([verb, url, *more] for verb, more in (
                ("gc", ["--min-free", "1G"]), ("gc", ["--max-per-salt", "1G"]),
                ("rm", []), ("rm", ["abcdef"]), ("pin", ["--remove"]), ("pin", ["abcdef"]),
                ("export", [self.root / "x", "--all"]),
            )),
            ["rm", empty], ["rm", empty, "abcd"], ["rm", empty, "abcdef"], ["rm", empty, "--all"],
            ["pin", empty, "--remove"], ["pin", empty, "abcdef"], ["ttl", empty, "soon"],
            ["ttl", empty, "-1d"], ["ttl", empty, "30"], ["gc", empty, "--max-bytes", "much"],
            ["explain", empty, "--key-file", self.root / "none"],
            ["verify", empty, "--sample", "2"], ["top", empty, "--interval", "x"],
            ["ls", other], ["rm", other, "--all"], ["gc", other],
            ["doctor", empty, "--trusted-uids", "me"], ["events", empty, "--topic", "x"],
            ["explain", empty],
            ["explain", empty, "--tokens", other / "file", "--prompt", other / "file"],
            ["explain", empty, "--tokens", other / "file"], ["explain", empty, "--prompt", "x"],
            ["explain", empty, "--tokens", empty, "--block-tokens", "0"],
            ["explain", empty, "--tokens", empty, "--block-tokens", "x"],
            ["export", empty, "x"], ["export", empty, "-", "--all", "--json"],
            ["export", empty, self.root / "x", "--all"], ["import", empty, other / "file"],
            ["import", empty, self.root / "none"],
            ["key", self.root / "k", "--salt", ""],
            ["warm", other / "file"], ["warm", self.root / "none", "--server", "http://127.0.0.1:9"],
            ["warm", other / "file", "--server", "ftp://x"],
            ["doctor", empty, "--prefill", "0"], ["doctor", empty, "--token-bytes", "x"],
            ["ls", "s3://user:secret@bucket/x"], ["ls", "ftp://bucket/x"], ["ls", "s3://"],
            ["ui", empty, "--port", "99999999"],
        ]  # fmt: skip
        names = {str(self.root): "ROOT", url: "URL"}
        texts = [told(words, names) for words in commands]
        self.check("errors", [re.sub(r"0x[0-9a-f]+", "0x...", text) for text in texts])


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
            1: [run("verify", self.root)[0]],
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
            return 128 - running.wait(120)  # as a shell says it
