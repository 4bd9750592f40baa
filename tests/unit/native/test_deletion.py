"""`vua_delete`: what it deletes, what it leaves to Python, and what comes while it works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

import vua
from helpers import DirectoryTest, has_native
from vua.native import entries

CHUNK = "ab" * 32
FOLDER, ASIDE = f"ab/{CHUNK}", "trash-" + 12 * "0"
NAMES = ("l0-2.h0-4.safetensors", "l2-4.h0-4.safetensors")
KNOWN = b"".join(name.encode() + b"\0" for name in NAMES)
OLD_NS = 10**18
SOURCE = str(Path(vua.__file__).parents[1])
MOST_FILES = 16

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* The real call, once something was added to what is moved. */
int renameat(int from, const char *old, int to, const char *new)
{
    int (*real)(int, const char *, int, const char *) = dlsym(RTLD_NEXT, "renameat");
    const char *add = getenv("ADD");
    if (add != NULL) {
        struct timespec times[2];
        struct stat status;
        stat(getenv("FOLDER"), &status);
        if (*add != '\0')
            close(open(add, O_CREAT | O_WRONLY, 0600));
        times[0] = times[1] = status.st_mtim; /* only the new file shows, or a child's mtime */
        times[1].tv_nsec += *add == '\0';
        utimensat(AT_FDCWD, getenv("FOLDER"), times, 0);
    }
    return real(from, old, to, new);
}
"""
RACE = """
import os, sys
import numpy as np
from vua.capacity.removal import delete_aside, evict_chunk, ordinary_chunk
from vua.capacity.spaces import Space
from vua.native.entries import ChunkNames, delete_chunks

folder, added, root, first, second = sys.argv[1:]
space = Space("n", os.open(root, os.O_RDONLY))
print(evict_chunk(space, first))
os.environ |= {"FOLDER": folder, "ADD": added}
columns = ChunkNames.of([second]), np.array([10**18])
gone = delete_chunks(space.fd, *columns, 1 << 62, 1 << 20, ordinary_chunk())
print(gone.settled, gone.is_unusual)
print(delete_aside(space, second, gone.aside, 10**18))
"""


@unittest.skipUnless(has_native(), "native code is not built: python3 dev.py build")
class TestDeletion(DirectoryTest):
    """A chunk of two entries, last used in 2001."""

    def setUp(self) -> None:
        super().setUp()
        self.folder = self.make(CHUNK)
        self.fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        self.addCleanup(os.close, self.fd)

    def make(self, chunk: str) -> Path:
        folder = self.root / chunk[:2] / chunk
        folder.mkdir(parents=True)
        for name in NAMES:
            (folder / name).write_bytes(b"1234567")
        self.use(folder)
        return folder

    def use(self, folder: Path) -> None:
        os.utime(folder, ns=(OLD_NS, OLD_NS))

    def delete(
        self, *chunks: str, mtime_ns: int = OLD_NS, seen_ns: int = 1 << 62, most: int = 1 << 20
    ) -> tuple[list[bool], int, str]:
        """Try to delete chunks; return which were, the bytes, and what of the next one."""
        names = entries.ChunkNames.of(chunks or [CHUNK])
        mtimes_ns = np.full(len(names), mtime_ns)
        ordinary = entries.OrdinaryChunk(KNOWN, ASIDE)
        deleted, nbytes, next_one = list[bool](), 0, ""
        while len(deleted) < len(names) and nbytes < most and not next_one:
            left = slice(len(deleted), None)  # a call ends early where it takes long
            found = entries.delete_chunks(
                *(self.fd, names[left], mtimes_ns[left], seen_ns, most - nbytes, ordinary)
            )
            self.assertEqual(found.settled, len(found.deleted))
            deleted, nbytes = deleted + found.deleted.tolist(), nbytes + found.nbytes
            next_one = "aside" if found.aside else "unusual" if found.is_unusual else ""
        return deleted, nbytes, next_one

    def stored(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*"))

    def test_deleted(self) -> None:
        """All of it goes; a file that has another name, too, frees nothing."""
        (self.root / "other").hardlink_to(self.folder / NAMES[0])
        self.assertEqual(([True], 7, ""), self.delete())
        self.assertEqual(["ab", "other"], self.stored())

    def test_changed(self) -> None:
        """What was used, or got a child, stays as it is; what is gone is passed over."""
        before, ctime_ns = self.stored(), self.folder.stat().st_ctime_ns
        for mtime_ns, seen_ns in (
            (OLD_NS + 1, 1 << 62), (OLD_NS, ctime_ns), (OLD_NS, ctime_ns - 1)
        ):  # fmt: skip
            found = self.delete(mtime_ns=mtime_ns, seen_ns=seen_ns)
            self.assertEqual(([], 0, "unusual"), found)
        self.assertEqual(before, self.stored())
        self.assertEqual(([True], 14, ""), self.delete(seen_ns=ctime_ns + 1))
        self.make("cd" * 32)
        self.assertEqual(([False, True], 14, ""), self.delete(CHUNK, "cd" * 32))

    def test_several(self) -> None:
        """They go in order, as many as are needed, up to one that is unusual."""
        chunks = [f"{number:02x}" * 32 for number in range(5)]
        for chunk in chunks:
            folder = self.make(chunk)
        (folder / "other").touch()
        self.use(folder)
        self.assertEqual(([True, True], 28, ""), self.delete(*chunks, most=15))
        self.assertEqual(([False, False, True, True], 28, "unusual"), self.delete(*chunks))
        self.assertEqual(3, len(list(folder.iterdir())))

    def test_unusual(self) -> None:
        """Anything but entries, and what cannot be moved, is Python's to judge."""
        added = self.folder / f"pin-{CHUNK}"

        def many() -> None:
            for number in range(MOST_FILES):
                (self.folder / f"{number}").touch()

        def linked() -> None:
            (self.folder / NAMES[0]).unlink()
            (self.folder / NAMES[0]).symlink_to(NAMES[1])

        def nested() -> None:
            (self.folder / NAMES[0]).unlink()
            (self.folder / NAMES[0]).mkdir()

        def blocked() -> None:
            (self.root / f"{ASIDE}0000" / "full").mkdir(parents=True)

        def link() -> None:
            self.folder.rename(self.root / "real")
            self.folder.symlink_to(self.root / "real")

        for make in (added.touch, many, linked, nested, blocked, link):
            with self.subTest(make):
                make()
                if not self.folder.is_symlink():
                    self.use(self.folder)
                before = self.stored()
                self.assertEqual(([], 0, "unusual"), self.delete())
                self.assertEqual(before, self.stored())
            for path in self.root.iterdir():
                shutil.rmtree(path)
            self.make(CHUNK)

    def test_too_many(self) -> None:
        """More files than there is space for are unusual, although all names are known."""
        names = [f"{number}-{number + 1}.0-4.safetensors" for number in range(MOST_FILES + 1)]
        known = b"".join(name.encode() + b"\0" for name in names)
        chunk, found = "cd" * 32, []
        for files in (MOST_FILES + 1, MOST_FILES):
            folder = self.make(chunk)
            for name in NAMES:
                (folder / name).unlink()
            for name in names[:files]:
                (folder / name).touch()
            self.use(folder)
            with mock.patch(f"{__name__}.KNOWN", known):
                found.append(self.delete(chunk)[0])
            shutil.rmtree(folder, ignore_errors=True)
        self.assertEqual([[], [True]], found)

    @unittest.skipUnless(shutil.which("cc"), "needs a C compiler")
    def test_while_moved(self) -> None:
        """A pin or a child that comes after the chunk was listed brings it back."""
        source = self.root / "shim.c"
        source.write_text(SHIM)
        shim = self.root / "shim.so"
        subprocess.run(["cc", "-shared", "-fPIC", source, "-o", shim, "-ldl"], check=True)
        for added in (f"pin-{CHUNK}", ""):
            with self.subTest(added):
                folder, first = self.root / "space" / FOLDER, "cd" * 32
                for chunk in (first, CHUNK):
                    shutil.copytree(self.folder, folder.parents[1] / chunk[:2] / chunk)
                    self.use(folder.parents[1] / chunk[:2] / chunk)
                done = subprocess.run(
                    [sys.executable, "-c", RACE, folder, folder / added if added else "",
                     folder.parents[1], first, CHUNK],
                    env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": SOURCE},
                    check=True, capture_output=True, text=True,
                )  # fmt: skip
                self.assertEqual(["14", "0", "True", "None"], done.stdout.split())
                self.assertTrue(folder.exists())
                stays = sorted([*NAMES, *([added] if added else [])])
                self.assertEqual(stays, sorted(path.name for path in folder.iterdir()))
                shutil.rmtree(folder.parents[1])
