"""Runs the command line tool: in this process, `vua ui` and `vua events` with those who ask."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import ROOT, DirectoryTest, caches_of, until
from vua.capacity.limits import Limits, ResolvedLimits
from vua.capacity.removal import Collection
from vua.catalog import collect as collecting
from vua.catalog import open_catalog
from vua.cli import main
from vua.cli.ui import Files, overview
from vua.core import VUA, VUAConfig

TOKENS = torch.arange(500, 512)
PAGE = ROOT / "docs" / "commands.md"
COMMANDS: list[list[str]] = [
    ["ls", "PLACE"], ["ls", "PLACE", "-l"],
    ["ls", "PLACE", "--sort", "newest"], ["du", "PLACE"], ["du", "PLACE", "--exact"],
    ["verify", "PLACE"], ["verify", "PLACE", "--sample", "10%"],
    ["top", "PLACE", "--once", "--interval", "0.01"], ["doctor", "PLACE"],
    ["explain", "PLACE", "--tokens", "TOKENS"],
    ["explain", "PLACE", "--tokens", "TOKENS", "--quick"], ["events", "PLACE"],
    ["export", "PLACE", "TAR", "--all"],
    ["import", "PLACE", "TOKENS"],
    ["ttl", "PLACE"], ["ttl", "PLACE", "1d"], ["pin", "PLACE"], ["gc", "PLACE", "--dry-run"],
    ["gc", "PLACE", "--quick"], ["gc", "PLACE", "--max-bytes", "1G"],
    ["gc", "PLACE", "--ttl", "1h"], ["gc", "PLACE"], ["verify", "PLACE", "--repair"],
    ["rm", "PLACE", "--all", "--dry-run"], ["rm", "PLACE", "abcdef"],
    ["rm", "PLACE", "--all", "--yes"], ["args", "vllm", "PLACE"],
    ["identify", "PLACE"], ["key", "KEY"], ["warm", "TOKENS", "--server", "http://127.0.0.1:9"],
]  # fmt: skip
"""Every command in one or several forms, but for `ui`, which goes on."""


def put_prompt(
    place: str | Path, ids: Any, *, split_factor: int = 4, layers: int = 1, heads: int = 1,
    model: str = "m", **settings: Any,
) -> int:  # fmt: skip
    """Store the cache of a prompt's whole chunks; return how many were written."""
    whole = len(ids) // split_factor * split_factor
    cache = caches_of(layers=layers, heads=heads, tokens=whole, dim=8)
    with VUA(VUAConfig(split_factor=split_factor, model=model, **settings), place) as vua:
        return vua.put(torch.as_tensor(ids[:whole]), cache)


def run(*arguments: str | Path) -> tuple[int, str, str]:
    """Run the command in this process; return exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as problem:
            code = int(problem.code or 0)
    return code, out.getvalue(), err.getvalue()


def run_json(*arguments: str | Path) -> tuple[int, Any]:
    """Run the command with `--json`; return exit code and report."""
    code, out, _ = run(*arguments, "--json")
    return code, json.loads(out)


def collect(root: str | Path, limits: ResolvedLimits, **more: Any) -> Collection:
    """Bring a cache within limits."""
    return collecting.collect(open_catalog(str(root)), Limits(**asdict(limits)), **more)


def told(root: Path) -> str:
    """What `vua ls` says was saved today; `vua top` and the page say the same."""
    (line,) = (one for one in run("ls", root)[1].splitlines() if one.startswith("today: "))
    page, said = overview(open_catalog(str(root)), Files()), line.removeprefix("today: ")
    known = said.partition(" s saved")
    top = f"{known[0]} s saved today" if known[1] else "time saved today unknown"
    for whole, part in (
        (run("top", root, "--once", "--interval", "0.05s")[1], line),
        (page["summary"], line),
        (page["line"], top),
    ):
        if part not in whole:
            raise AssertionError(f"{part!r} is not in {whole!r}")
    return said


def verbs() -> set[str]:
    return set(re.findall(r"^  ([a-z]+)  ", run("--help")[1], re.MULTILINE))


def documented(verb: str) -> set[str]:
    """The fields that the page lists for a command: of each item what comes before its colon."""
    for section in re.split(r"^### ", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        if verb in section.split("\n", 1)[0].split(", "):
            heads = re.findall(r"^- ((?:`[^`]+`(?:, )?)+)", section, re.MULTILINE)
            return {name for head in heads for name in re.findall(r"`([^`]+)`", head)}
    raise AssertionError(verb)


def filled_in(command: list[str], place: str, beside: Path) -> list[str]:
    """A command of COMMANDS on a cache, with files in another directory."""
    tokens, archive = beside / "tokens", beside / "new.tar"
    tokens.write_text(json.dumps(TOKENS.tolist()))
    archive.unlink(missing_ok=True)
    given = {"PLACE": place, "TOKENS": str(tokens), "TAR": str(archive)}
    return [given.get(word, f"{beside}/own.key" if word == "KEY" else word) for word in command]


class CliTest(DirectoryTest):
    """A directory with two namespaces."""

    def setUp(self) -> None:
        """Store three chunks of one model and one of another."""
        super().setUp()
        self.put("llama", 3)
        self.put("qwen", 1, dtype=torch.bfloat16)

    def put(self, model: str, chunks: int, dtype: torch.dtype = torch.float32) -> None:
        with VUA(VUAConfig(split_factor=4, model=model), self.root) as vua:
            cache = caches_of(layers=3, heads=2, tokens=4 * chunks, dim=8, dtype=dtype)
            vua.put(TOKENS[: 4 * chunks], cache)

    def entries(self, chunks: int = 3) -> list[Path]:
        """The files of the namespace that has so many."""
        for path in self.root.iterdir():
            found = sorted(path.rglob("*.safetensors"))
            if len(found) == chunks:
                return found
        raise AssertionError(self.files())


class Served:
    """`vua ui` in a process of its own, asked over HTTP."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        place, _, self.token = url.partition("/#token=")
        self.port = int(place.rpartition(":")[2])

    def ask(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of an answer; by default with the token."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            said = {"Authorization": f"Bearer {self.token}", **headers}
            sent = None if body is None else json.dumps(body)
            line.request(method, path, body=sent, headers=said)
            answer = line.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            line.close()

    def overview(self) -> Any:
        status, _, content = self.ask("GET", "/api/overview")
        if status != 200:
            raise AssertionError(content)
        return json.loads(content)

    def looked(self, line: str = "") -> Any:
        """Wait until files were checked, and the first line begins so; return what is shown."""

        def done() -> Any:
            seen = self.overview()
            return seen if seen["level"] != "note" and seen["line"].startswith(line) else None

        return until(done)


@contextlib.contextmanager
def served(*words: object) -> Iterator[Served]:
    """Start `vua ui`, and end it with Ctrl-C."""
    command = [sys.executable, "-m", "vua", "ui", *map(str, words), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        said = "".join(iter(process.stdout.readline, "}\n"))
        yield Served(process, json.loads(said + "}")["url"])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)
        process.stdout.close()


PATIENCE_MS = 300_000


class SocketTest(CliTest):
    """A directory with two namespaces, and subscribers to its events."""

    def setUp(self) -> None:
        """Have a place for sockets beside the directory."""
        super().setUp()
        self.zmq = pytest.importorskip("zmq")
        self.msgpack = pytest.importorskip("msgspec").msgpack
        self.context = self.zmq.Context()
        self.addCleanup(self.context.destroy, linger=0)
        self.folder = self.root.with_name(f"{self.root.name}-s")
        self.folder.mkdir()
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.out = f"ipc://{self.folder}/out"

    def socket(self, kind: int, endpoint: str, *, bind: bool = False) -> Any:
        """A socket that waits for long, and then fails."""
        socket = self.context.socket(kind)
        self.addCleanup(socket.close, linger=0)
        socket.setsockopt(self.zmq.RCVTIMEO, PATIENCE_MS)
        (socket.bind if bind else socket.connect)(endpoint)
        return socket

    @contextlib.contextmanager
    def running(self, *words: str | Path) -> Iterator[list[int]]:
        """Run the command beside what is done within; gives its exit code when it has ended."""
        codes: list[int] = []
        arguments = ("events", self.root, "--zmq", self.out, *words)
        thread = threading.Thread(target=lambda: codes.append(run(*arguments)[0]))
        thread.start()
        try:
            yield codes
        except BaseException:
            shutil.rmtree(self.root, ignore_errors=True)  # ends it
            raise
        finally:
            thread.join(PATIENCE_MS / 1000)
            self.assertFalse(thread.is_alive())

    def received(self, socket: Any, number: int, topic: bytes = b"") -> list[dict[str, Any]]:
        got = socket.recv_multipart()
        self.assertEqual([topic, number.to_bytes(8, "big")], got[:2])
        _, events, rank = self.msgpack.decode(got[2])
        self.assertEqual(0, rank)
        return list(events)
