"""Directories of others that look a little like a cache, and a digest that sees any change."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

HEX64 = "0123456789abcdef" * 4
HEX16 = "0123456789abcdef"
OLD_S = 100 * 86400
"""Everything is so old that any sweep would think it left behind."""


def digest(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a directory, itself too: kind, mode, owner, links, time and bytes."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        status = path.lstat()
        content = ""
        if stat.S_ISREG(status.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(status.st_mode):
            content = str(path.readlink())
        found[str(path.relative_to(root))] = (
            *(status.st_mode, status.st_uid, status.st_gid, status.st_nlink, status.st_size),
            *(status.st_mtime_ns, content),
        )
    return found


def _write(root: Path, *names: str, text: str = "precious") -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _home(root: Path) -> None:
    _write(root, ".bashrc", "photos/a.jpg", ".ssh/id_ed25519", "trash-2023/photos/b.jpg",
           ".tmp-work/draft.odt", "trash-notes.txt", ".cache/x", "quarantine/list")  # fmt: skip


def _docker(root: Path) -> None:
    for digit in "abc":
        layer = digit * 64
        _write(root, f"{layer}/diff/etc/passwd", f"{layer}/link", f"{layer}/lower")
        (root / layer / "work").mkdir()
    (root / "l").mkdir()
    (root / "l" / "SHORT").symlink_to(f"../{'a' * 64}/diff")


def _git(root: Path) -> None:
    _write(root, ".git/HEAD", ".git/objects/ab/cdef0123", ".git/refs/heads/main", "src/a.c")
    _write(root, *(f".git/objects/{digit * 2}/{digit * 62}" for digit in "0123"))


def _git_objects(root: Path) -> None:
    _write(root, *(f"{digit * 2}/{digit * 62}" for digit in "0123"), "pack/pack-1.idx", "info/a")


def _hub(root: Path) -> None:
    _write(root, f"models--a--b/blobs/{HEX64}", "models--a--b/refs/main")
    snapshot = root / "models--a--b" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{HEX64}")


def _models(root: Path) -> None:
    _write(root, "config.json", "model.safetensors", "l0-2.h0-2.safetensors", f"{HEX64}/a.bin")


def _lmcache(root: Path) -> None:
    _write(root, f"vllm@model@1@0@{HEX64}.pt", f"{HEX64}.pt", "metadata.json")


def _vllm_tier(root: Path) -> None:
    _write(root, *(f"{HEX64}/{digit * 3}/{digit * 2}/{HEX16}.bin" for digit in "0f"))


def _pip(root: Path) -> None:
    _write(
        root, "http-v2/0/1/2/3/4/0123", "selfcheck/" + "a" * 56, f"wheels/ab/cd/ef/{HEX64}/x.whl"
    )


def _maildir(root: Path) -> None:
    _write(root, "cur/1:2,S", "new/1", "tmp/1.host", ".Trash/cur/2", "dovecot.index")


def _our_names(root: Path) -> None:
    _write(root, f"trash-{HEX16}/photos/a.jpg", f".tmp-{HEX16}", f"{HEX64}/namespace.json",
           f"{HEX64}/trash-{HEX16}/a.jpg", f"{HEX64}/.tmp-{HEX16}", f"{HEX64}/ttl/{HEX64}",
           f"{HEX64}/quarantine/a", f"{HEX64}/01/{HEX64}/notes.txt",
           f"{HEX64}/01/{HEX64}/.tmp-mine", f"{HEX64}/01/{HEX64}/after-noon")  # fmt: skip
    (root / f"trash-{'f' * 16}" / "ab").mkdir(parents=True)
    _write(root, f"trash-{'f' * 16}/ab/letter.txt")


def _hex_only(root: Path) -> None:
    (root / HEX64).mkdir()
    (root / ("f" * 64) / "ab").mkdir(parents=True)
    _write(root, "a" * 64, f"{'e' * 64}/01/{HEX64}/{HEX64}")


def _deep(root: Path) -> None:
    path = root / f"trash-{HEX16}"
    for _ in range(200):
        path /= "ab"
    _write(path, "letter.txt")


def _specials(root: Path) -> None:
    os.mkfifo(root / f"trash-{HEX16}")
    os.mkfifo(root / f".tmp-{HEX16}")
    with socket.socket(socket.AF_UNIX) as one:
        where = os.open(root, os.O_RDONLY)
        one.bind(f"/proc/self/fd/{where}/s")
        os.close(where)
    (root / "s").rename(root / f".tmp-{'a' * 16}")


def _links_out(root: Path) -> None:
    outside = root.parent / "outside"
    _write(outside, "letter.txt", f"01/{HEX64}/l0-1.h0-1.safetensors")
    (root / f"trash-{HEX16}").symlink_to(outside)
    (root / HEX64).symlink_to(outside)
    (root / f".tmp-{HEX16}").symlink_to(outside / "letter.txt")
    (root / "bounds.jsonl").symlink_to(outside / "letter.txt")


def _hard_links(root: Path) -> None:
    _write(root, "letter.txt")
    os.link(root / "letter.txt", root / f".tmp-{HEX16}")
    (root / f"trash-{HEX16}").mkdir()
    os.link(root / "letter.txt", root / f"trash-{HEX16}" / "letter.txt")


def _others(root: Path) -> None:
    _write(root, f"trash-{HEX16}/a", f".tmp-{HEX16}", "b")
    if os.geteuid() == 0:
        for path in (root / f"trash-{HEX16}", root / f"trash-{HEX16}" / "a", root / "b"):
            os.chown(path, 4242, 4242)


def _database(root: Path) -> None:
    _write(root, "PG_VERSION", "base/1/1259", "pg_wal/000000010000000000000001", "vua.json")


def _logs(root: Path) -> None:
    _write(root, "bounds.json", "syslog", "syslog.1", ".upkeep/search", ".upkeep/history")


def _mirror(root: Path) -> None:
    _write(root, *(f"{number:02x}/{number:02x}{'0' * 62}" for number in range(5)), "index.html")


def _builds(root: Path) -> None:
    _write(root, "bazel/cas/ab/" + "ab" * 32, "ccache/0/1/abc", f"{HEX64}/stdout")


FOREIGN: dict[str, Callable[[Path], None]] = {
    "home": _home,
    "docker overlay2": _docker,
    "git work tree": _git,
    "git objects": _git_objects,
    "Hugging Face hub": _hub,
    "a model": _models,
    "LMCache": _lmcache,
    "vLLM's file tier": _vllm_tier,
    "pip": _pip,
    "maildir": _maildir,
    "names like ours": _our_names,
    "only hex names": _hex_only,
    "deep": _deep,
    "FIFOs and sockets": _specials,
    "links that lead out": _links_out,
    "hard links": _hard_links,
    "other users' files": _others,
    "a database": _database,
    "logs": _logs,
    "a mirror": _mirror,
    "build caches": _builds,
}


def make(kind: str, root: Path) -> None:
    """Make such a directory, of a hundred days ago."""
    root.mkdir(parents=True, exist_ok=True)
    FOREIGN[kind](root)
    for path in [root, *sorted(root.rglob("*"), reverse=True)]:
        stamp = path.lstat().st_mtime - OLD_S
        os.utime(path, (stamp, stamp), follow_symlinks=False)
