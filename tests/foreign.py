"""Directories of others that look a little like a cache, and a digest that sees any change."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
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


def _write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")


NAMES = {
    "home": ".bashrc photos/a.jpg .ssh/id_ed25519 trash-2023/photos/b.jpg .tmp-work/draft.odt "
    "trash-notes.txt .cache/x quarantine/list",
    "docker overlay2": " ".join(
        f"{one * 64}/diff/etc/passwd {one * 64}/link {one * 64}/lower" for one in "abc"
    ),
    "git work tree": ".git/HEAD .git/objects/ab/cdef0123 .git/refs/heads/main src/a.c "
    + " ".join(f".git/objects/{digit * 2}/{digit * 62}" for digit in "0123"),
    "git objects": "pack/pack-1.idx info/a "
    + " ".join(f"{digit * 2}/{digit * 62}" for digit in "0123"),
    "Hugging Face hub": f"models--a--b/blobs/{HEX64} models--a--b/refs/main",
    "a model": f"config.json model.safetensors l0-2.h0-2.safetensors {HEX64}/a.bin",
    "LMCache": f"vllm@model@1@0@{HEX64}.pt {HEX64}.pt metadata.json",
    "vLLM's file tier": f"{HEX64}/000/00/{HEX16}.bin {HEX64}/fff/ff/{HEX16}.bin",
    "pip": f"http-v2/0/1/2/3/4/0123 selfcheck/{'a' * 56} wheels/ab/cd/ef/{HEX64}/x.whl",
    "maildir": "cur/1:2,S new/1 tmp/1.host .Trash/cur/2 dovecot.index",
    "names like ours": f"trash-{HEX16}/photos/a.jpg .tmp-{HEX16} {HEX64}/namespace.json "
    f"{HEX64}/trash-{HEX16}/a.jpg {HEX64}/.tmp-{HEX16} {HEX64}/ttl/{HEX64} {HEX64}/quarantine/a "
    f"{HEX64}/01/{HEX64}/notes.txt {HEX64}/01/{HEX64}/.tmp-mine {HEX64}/01/{HEX64}/after-noon "
    f"trash-{'f' * 16}/ab/letter.txt",
    "only hex names": f"{'a' * 64} {'e' * 64}/01/{HEX64}/{HEX64}",
    "deep": f"trash-{HEX16}/{'ab/' * 200}letter.txt",
    "FIFOs and sockets": "",
    "links that lead out": f"../outside/letter.txt ../outside/01/{HEX64}/l0-1.h0-1.safetensors",
    "hard links": "letter.txt",
    "other users' files": f"trash-{HEX16}/a .tmp-{HEX16} b",
    "a database": "PG_VERSION base/1/1259 pg_wal/000000010000000000000001 vua.json",
    "logs": "bounds.json syslog syslog.1 .upkeep/search .upkeep/history",
    "a mirror": "index.html " + " ".join(f"{n:02x}/{n:02x}{'0' * 62}" for n in range(5)),
    "build caches": f"bazel/cas/ab/{'ab' * 32} ccache/0/1/abc {HEX64}/stdout",
}
"""The files in each."""


def _docker(root: Path) -> None:
    for digit in "abc":
        (root / (digit * 64) / "work").mkdir()
    (root / "l").mkdir()
    (root / "l" / "SHORT").symlink_to(f"../{'a' * 64}/diff")


def _hub(root: Path) -> None:
    snapshot = root / "models--a--b" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{HEX64}")


def _hex_only(root: Path) -> None:
    (root / HEX64).mkdir()
    (root / ("f" * 64) / "ab").mkdir(parents=True)


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
    (root / f"trash-{HEX16}").symlink_to(outside)
    (root / HEX64).symlink_to(outside)
    (root / f".tmp-{HEX16}").symlink_to(outside / "letter.txt")
    (root / "bounds.jsonl").symlink_to(outside / "letter.txt")


def _hard_links(root: Path) -> None:
    os.link(root / "letter.txt", root / f".tmp-{HEX16}")
    (root / f"trash-{HEX16}").mkdir()
    os.link(root / "letter.txt", root / f"trash-{HEX16}" / "letter.txt")


def _others(root: Path) -> None:
    if os.geteuid() == 0:
        for path in (root / f"trash-{HEX16}", root / f"trash-{HEX16}" / "a", root / "b"):
            os.chown(path, 4242, 4242)


MORE = {
    "docker overlay2": _docker,
    "Hugging Face hub": _hub,
    "only hex names": _hex_only,
    "FIFOs and sockets": _specials,
    "links that lead out": _links_out,
    "hard links": _hard_links,
    "other users' files": _others,
}


def make(kind: str, root: Path) -> None:
    """Make such a directory, of a hundred days ago."""
    root.mkdir(parents=True, exist_ok=True)
    _write(root, *NAMES[kind].split())
    if kind in MORE:
        MORE[kind](root)
    for path in [root, *sorted(root.rglob("*"), reverse=True)]:
        stamp = path.lstat().st_mtime - OLD_S
        os.utime(path, (stamp, stamp), follow_symlinks=False)
