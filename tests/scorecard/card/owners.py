"""32 and 37: what is not VUA's stays as it is; tools of another user leave a cache usable."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Final
from unittest import mock

from foreign import FOREIGN, digest, make
from scorecard.stores import VuaSubject
from scorecard.subject import Key
from scorecard.trial import Trial, scored
from vua.cli import main

_USER: Final = 12345
"""A user id that owns nothing on any machine."""
_NBYTES: Final = 4096
_COMMANDS: Final = (
    ("gc",),
    ("gc", "--max-bytes", "1K"),
    ("gc", "--max-bytes", "1K", "--yes"),
    ("rm", "--all"),
    ("rm", "--all", "--yes"),
    ("verify", "--repair"),
)


def _vua(*words: str | Path) -> tuple[int, str]:
    """Run the command `vua`, which finds no terminal; return its status and what it said."""
    said = io.StringIO()
    with (
        open(os.devnull) as nothing,  # noqa: PTH123
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        mock.patch.object(sys, "stdin", nothing),
    ):
        try:
            status = main(list(map(str, words)))
        except SystemExit as refusal:
            status = refusal.code if isinstance(refusal.code, int) else 1
    return status, said.getvalue().strip()[-150:]


@scored(
    32, "Foreign directories", gate=True, quick=20, full=20,
    bar="gc, rm, verify --repair: in what is not a cache of VUA not one byte or name is changed",
)  # fmt: skip
def foreign(trial: Trial) -> None:
    """Let every command that deletes loose on directories of others, and on such inside a cache."""
    trial.needs_vua("the command line")
    for name in list(FOREIGN)[: trial.scale]:
        root = trial.directory / "foreign" / name.replace(" ", "-")
        make(name, root)
        before = digest(root)
        for command in _COMMANDS:
            _vua(command[0], root, *command[1:])
        after = digest(root)
        changed = sorted(path for path in before if after.get(path) != before[path])
        trial.must(f"{name}: as it was", not changed, ", ".join(changed[:3]))
    cache = trial.make(_NBYTES)
    trial.stored(cache, 4)
    for name in FOREIGN:
        make(name, cache.root / f"trash-{name.replace(' ', '-')}")
    before = digest(cache.root)
    guests = {path for path in before if path.startswith("trash-")}
    status, said = _vua("gc", cache.root)
    after = digest(cache.root)
    changed = sorted(path for path in guests if after.get(path) != before[path])
    trial.must("what others keep inside a cache is as it was", not changed, ", ".join(changed[:3]))
    trial.must("control: gc ends well", status == 0, said)
    trial.must("control: the entries stay", trial.look(cache, Key(0)) == "hit")


@scored(
    37, "Tools by another user", quick=6, full=60,
    bar="root's first gc, du and verify leave the cache usable, and bounded, for its owner",
)  # fmt: skip
def tools(trial: Trial) -> None:
    """Make a cache as one user, run the tools as root, go on as that user."""
    trial.needs_vua("the command line")
    trial.needs("root", os.geteuid() == 0)
    trial.directory.chmod(0o755)
    for parent in trial.directory.parents:
        trial.needs("a directory that others may enter", bool(parent.stat().st_mode & 0o001))
    root = trial.directory / "theirs"
    root.mkdir(mode=0o700)
    os.chown(root, _USER, _USER)
    count = max(trial.scale, 4)
    trial.must("control: the owner stores", _as_owner(root, 0, count) == count)
    answers = [_vua(word, root) for word in ("gc", "du", "verify")]
    problems = "; ".join(said for status, said in answers if status)
    trial.must("root's tools work on it", not problems, problems)
    others = [str(path) for path in _below(root) if path.lstat().st_uid != _USER]
    trial.must("everything still belongs to its owner", not others, ", ".join(others[:3]))
    stored = _as_owner(root, count, 3 * count)
    held = sum(path.lstat().st_size for path in _below(root) if path.suffix == ".safetensors")
    bound = 2 * count * 2 * _NBYTES  # room for two thirds of them, each with a page of header
    trial.must("the owner goes on storing", stored == 2 * count, f"{stored} of {2 * count}")
    trial.must("within the limit", held <= bound * 1.1, f"{held} of {bound}")


def _below(root: Path) -> list[Path]:
    return [Path(at, name) for at, folders, files in os.walk(root) for name in (*folders, *files)]


def _as_owner(root: Path, first: int, last: int) -> int:
    """Store entries in a process of the owner's, in no more than twice as many; count them."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        stored = 0
        try:
            os.setgroups([])
            os.setgid(_USER)
            os.setuid(_USER)
            bound = max(last - first, 4) * _NBYTES if first else None
            subject = VuaSubject(root, _NBYTES, max_bytes=bound and 2 * bound)
            for number in range(first, last):
                key = Key(number)
                stored += subject.put(key, key.payload(_NBYTES))
            subject.close()
        finally:
            os.write(writing, str(stored).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return int(said or 0)
