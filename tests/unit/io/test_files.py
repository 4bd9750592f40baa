"""Mirrors `vua.io.files`: modes that hold under any umask, and where `chmod` is refused."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

import vua
from commands import run
from helpers import SOON_S, TESTS, DirectoryTest, caches_of, kv_bits
from vua.core import VUA, VUAConfig
from vua.io import posix

SOURCE = Path(vua.__file__).parent
MAKERS = re.compile(
    r"\.(mkdir|makedirs|[fl]?chmod|mkdtemp|mkstemp|write_text|write_bytes|mknod|mkfifo)\(|O_CREAT"
    r"""|\.touch\(\)|open\((?!fd|os\.open|make_file).*['"][wax]b?\+?['"]"""
)
"""Calls that make a file or a directory, or change a mode."""
CYCLE = """
    import os, sys, torch
    from unittest import mock
    root, how, out = sys.argv[1], sys.argv[2], os.path.join(os.path.dirname(sys.argv[1]), "out")
    if how == "refused":
        refused = PermissionError(1, "Operation not permitted")
        os.chmod = os.fchmod = os.lchmod = mock.Mock(side_effect=refused)
        os.umask(0o022)
    else:
        os.umask(0o777)
    from commands import run
    from helpers import caches_of, until
    from vua.core import VUA, VUAConfig
    from vua.format.keys import token_ids
    def put(vua, number):
        tokens = torch.arange(64) + 1000 * number
        return vua.put(tokens, caches_of(layers=1, heads=1, tokens=64, dim=8))
    def found(vua, number):
        return vua.get_closest(torch.arange(64) + 1000 * number).num_tokens
    settings = {"split_factor": 4, "model": "m", "max_bytes": 200_000, "min_free_bytes": 0}
    with VUA(VUAConfig(**settings), root) as vua:
        for number in range(20):
            assert put(vua, number) == 16, number
        assert found(vua, 19) == 64
        counts = vua.namespace().capacity.counts
        assert counts["chunks_evicted"] and not counts["chunks_refused"], counts
    name = VUA(VUAConfig(split_factor=4, model="m"), root).namespace().keys(
        token_ids(torch.arange(64) + 19000)
    )[15].name
    for words in (
        ["pin", root, name], ["pin", root], ["pin", root, name, "--remove"],
        ["ttl", root, "1h"], ["ls", root], ["du", root], ["verify", root], ["events", root],
        ["export", root, out, "--all"], ["gc", root, "--max-bytes", "100K", "--min-free", "0"],
        ["import", root, out], ["key", os.path.join(os.path.dirname(root), "key")],
        ["gc", root, "--set", "--max-bytes", "1G"], ["doctor", root],
    ):
        code, said, failed = run(*words)
        assert code == 0 or words[0] == "doctor", (words, code, said, failed)
        assert "Traceback" not in failed, failed
        assert "probe failed" not in said, said
    with VUA(VUAConfig(split_factor=4, model="m"), root) as vua:
        assert found(vua, 19) == 64
        assert put(vua, 30) == 16
    for above, folders, files in os.walk(root):
        for name in folders + files:
            mode = os.lstat(os.path.join(above, name)).st_mode & 0o777
            assert mode & 0o600 == 0o600, (above, name, oct(mode))
            assert how == "refused" or mode in (0o700, 0o600), (above, name, oct(mode))
    print("done")
"""


class TestModes(DirectoryTest):
    """Everything that is made."""

    def test_no_other_maker(self) -> None:
        """No file and no directory is made, and no mode changed, outside of `vua.io.files`."""
        found = [
            str(path.relative_to(SOURCE))
            for path in SOURCE.rglob("*.py")
            if "testing" not in path.parts and MAKERS.search(path.read_text("utf-8"))
        ]
        self.assertEqual(["io/files.py"], found)

    def cycle(self, how: str) -> None:
        """Run all that writes, as one for whom modes hold, in a process of its own."""
        place = self.root / "place"
        place.mkdir(mode=0o700)
        code = f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{textwrap.dedent(CYCLE)}"
        drop = [
            "setpriv",
            "--bounding-set",
            "-dac_override,-dac_read_search",
        ]  # modes hold for root
        done = subprocess.run(
            [*drop * (os.geteuid() == 0), sys.executable, "-c", code, str(place / "kv"), how],
            capture_output=True,
            text=True,
            timeout=4 * SOON_S,
            check=False,
            env=os.environ | {"HOME": str(place), "XDG_CACHE_HOME": str(place / "cache")},
        )
        self.assertEqual("done", done.stdout[-5:].strip(), done.stdout + done.stderr)

    @pytest.mark.thorough
    def test_umask(self) -> None:
        """Under a umask that takes all rights a cache is written, read, evicted from and kept."""
        self.cycle("umask")

    @pytest.mark.thorough
    def test_no_chmod(self) -> None:
        """So it is where every `chmod` is refused."""
        self.cycle("refused")


TOKENS = torch.arange(16)
CACHE = caches_of(layers=2, heads=2, tokens=16, dim=16)


class TestClosing(DirectoryTest):
    """Every `os.close` below the cache's directory of what was not written fails."""

    @contextmanager
    def failing(self) -> Iterator[list[str]]:
        real, closed = os.close, list[str]()

        def close(fd: int) -> None:
            named = str(Path(f"/proc/self/fd/{fd}").readlink())
            written = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            real(fd)
            if named.startswith(str(self.root)) and not written:
                closed.append(named)
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        without_c = {name: call for name, call in posix.calls.items() if name != "close_cached"}
        with mock.patch.object(os, "close", close), mock.patch.object(posix, "calls", without_c):
            yield closed

    def test_library(self) -> None:
        """A first put, reads, a full directory, damage."""
        config = VUAConfig(split_factor=4, model="m", max_bytes=1 << 20)
        with self.failing() as closed:
            for seed in range(3):
                with VUA(config, self.root) as vua:
                    self.assertEqual(4, vua.put(TOKENS + seed, CACHE))
                    got = vua.get_closest(TOKENS + seed)
                self.assertEqual(kv_bits(CACHE, 16), kv_bits(got.data))
            (path, *_) = self.root.glob("*/*/*/*.safetensors")
            path.write_bytes(path.read_bytes()[:-1] + b"?")
            with VUA(config, self.root) as vua:
                for seed in range(3):
                    vua.get_closest(TOKENS + seed)
                    vua.put(TOKENS + seed, CACHE)
                    self.assertEqual(16, vua.get_closest(TOKENS + seed).num_tokens)
        self.assertTrue(closed)

    def test_commands(self) -> None:
        """Tools, too."""
        with VUA(VUAConfig(split_factor=4, model="m"), self.root) as vua:
            vua.put(TOKENS, CACHE)
        with self.failing() as closed:
            for words in (["ls"], ["du"], ["verify"], ["gc"], ["gc", "--max-bytes", "0"]):
                with self.subTest(words):
                    code, _, err = run(words[0], self.root, *words[1:])
                    self.assertEqual((0, ""), (code, err))
        self.assertTrue(closed)
        self.assertEqual([], list(self.root.glob("*/*/*/*.safetensors")))
