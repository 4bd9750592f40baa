"""A server that answers EIO when a directory or a file that was read is closed fails nothing."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from commands import run
from helpers import DirectoryTest, caches_of, kv_bits
from vua.core import VUA, VUAConfig
from vua.io import posix

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
