"""32 and 37: what is not VUA's stays as it is; tools of another user leave a cache usable."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final
from unittest import mock

from scorecard.stores import VuaSubject
from scorecard.subject import Key
from scorecard.trial import Trial, scored
from vua.cli import main

_USER: Final = 12345
"""A user id that owns nothing on any machine."""
_NBYTES: Final = 4096
_HEX: Final = "0123456789abcdef" * 4
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


def _write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hashlib.sha256(name.encode()).digest() * 40)


def _links(root: Path) -> None:
    _write(root, "kept/original.jpg")
    (root / ".tmp-link").symlink_to(root / "kept")
    (root / "trash-link").symlink_to(root / "kept")
    os.link(root / "kept" / "original.jpg", root / "trash-hard")


def _special(root: Path) -> None:
    os.mkfifo(root / "trash-pipe")
    os.mkfifo(root / ".tmp-pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "trash-socket"))


def _strangers_cache(root: Path) -> None:
    """Directories and files whose names, and nothing else, are those of a cache of VUA."""
    _write(root, f"{_HEX}/{_HEX[:2]}/{_HEX}/l0-2.h0-2.safetensors", f"{_HEX}/notes.txt")


FOREIGN: Final[dict[str, Callable[[Path], None]]] = {
    "photographs": lambda root: _write(root, "trash-2023/photos/1.jpg", "2024/2.jpg"),
    "notes": lambda root: _write(root, "trash-notes.txt", "tmp.txt", "todo"),
    "work in progress": lambda root: _write(root, ".tmp-work/draft.tex", ".tmp-123"),
    "home": lambda root: _write(root, ".bashrc", ".ssh/id", ".cache/x/y", "trash/files/a"),
    "docker": lambda root: _write(root, f"{_HEX}/diff/etc/passwd", f"{_HEX}/link", "l/ABC"),
    "git": lambda root: _write(root, ".git/objects/ab/cdef", ".git/HEAD", "src/a.py"),
    "hub": lambda root: _write(root, f"models--a--b/blobs/{_HEX}", "models--a--b/refs/main"),
    "LMCache": lambda root: _write(root, "model@1@0@ab12.pt", "model@1@0@ab12.data"),
    "vLLM's tier": lambda root: _write(root, f"{_HEX[:16]}/block_0.bin", f"{_HEX}.bin"),
    "safetensors": lambda root: _write(root, "model.safetensors", "l0-2.h0-2.safetensors"),
    "pip": lambda root: _write(root, f"http-v2/0/1/2/3/4/{_HEX}", f"wheels/ab/cd/{_HEX}/a.whl"),
    "mail": lambda root: _write(root, "cur/1", "new/2", "tmp/3"),
    "shards of 256": lambda root: _write(root, *(f"{n:02x}/{n:02x}{_HEX[2:]}" for n in range(4))),
    "digests": lambda root: _write(root, f"{_HEX}/manifest.json", f"{_HEX[::-1]}/data"),
    "quarantine": lambda root: _write(root, "quarantine/virus.exe", f"{_HEX}/quarantine/a"),
    "backups": lambda root: _write(root, "trash-0/a", "trash-1/b", ".tmp-0/c"),
    "links": _links,
    "pipes and sockets": _special,
    "a stranger's cache": _strangers_cache,
    "deep": lambda root: _write(root, "/".join(["trash-a"] * 60)),
}
"""Directories that are not VUA's, by what people keep there."""


def _digest(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a directory: kind, mode, times, bytes."""
    found: dict[str, tuple[object, ...]] = {}
    for place, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(place, name)
            about = path.lstat()
            data = path.read_bytes() if stat.S_ISREG(about.st_mode) else b""
            target = str(path.readlink()) if stat.S_ISLNK(about.st_mode) else ""
            times = (about.st_mtime_ns, about.st_ino, about.st_uid)
            kept = hashlib.sha256(data).hexdigest()
            found[str(path.relative_to(root))] = (about.st_mode, *times, kept, target)
    return found


@scored(
    32, "Foreign directories", gate=True, quick=20, full=20,
    bar="gc, rm, verify --repair: in what is not a cache of VUA not one byte or name is changed",
)  # fmt: skip
def foreign(trial: Trial) -> None:
    """Let every command that deletes loose on directories of others, and on such inside a cache."""
    trial.needs_vua("the command line")
    for name in list(FOREIGN)[: trial.scale]:
        root = trial.directory / "foreign" / name.replace(" ", "-")
        root.mkdir(parents=True)
        FOREIGN[name](root)
        _age(root)
        before = _digest(root)
        for command in _COMMANDS:
            _vua(command[0], root, *command[1:])
        after = _digest(root)
        changed = sorted(path for path in before if after.get(path) != before[path])
        trial.must(f"{name}: as it was", not changed, ", ".join(changed[:3]))
    cache = trial.make(_NBYTES)
    trial.stored(cache, 4)
    for name, make in FOREIGN.items():
        guest = cache.root / f"trash-{name.replace(' ', '-')}"
        guest.mkdir()
        make(guest)
    _age(cache.root)
    before = _digest(cache.root)
    guests = {path for path in before if path.startswith("trash-")}
    status, said = _vua("gc", cache.root)
    after = _digest(cache.root)
    changed = sorted(path for path in guests if after.get(path) != before[path])
    trial.must("what others keep inside a cache is as it was", not changed, ", ".join(changed[:3]))
    trial.must("control: gc ends well", status == 0, said)
    trial.must("control: the entries stay", trial.look(cache, Key(0)) == "hit")


def _age(root: Path) -> None:
    """Make everything look as if it had been left there long ago."""
    for place, folders, files in os.walk(root, topdown=False):
        for name in (*files, *folders):
            os.utime(Path(place, name), (1e9, 1e9), follow_symlinks=False)


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
