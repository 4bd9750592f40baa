"""Runs the command line tool in this process."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from helpers import ROOT, DirectoryTest, caches_of
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
    ["inspect", "PLACE"], ["export", "PLACE", "TAR", "--all"],
    ["import", "PLACE", "TOKENS"],
    ["ttl", "PLACE"], ["ttl", "PLACE", "1d"], ["pin", "PLACE"], ["gc", "PLACE", "--dry-run"],
    ["gc", "PLACE", "--quick"], ["gc", "PLACE", "--max-bytes", "1G"],
    ["gc", "PLACE", "--ttl", "1h"], ["gc", "PLACE"], ["verify", "PLACE", "--repair"],
    ["rm", "PLACE", "--all", "--dry-run"], ["rm", "PLACE", "abcdef"],
    ["rm", "PLACE", "--all", "--yes"], ["args", "vllm", "PLACE"],
    ["identify", "PLACE"], ["key", "KEY"], ["warm", "TOKENS", "--server", "http://127.0.0.1:9"],
]  # fmt: skip
"""Every command in one or several forms, but for `ui`, which goes on."""


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
