"""Mirrors `vua.store.place`."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from helpers import DirectoryTest, caches_of, read_only
from vua.core import VUA, VUAConfig
from vua.errors import ConfigError, NotWritableError
from vua.security.settings import Security
from vua.storage.mark import MARK
from vua.store.place import prepare


class TestPrepare(DirectoryTest):
    """A directory, tried."""

    def test_missing(self) -> None:
        """It is made where it alone is missing; a mistyped path is not."""
        made = prepare(self.root / "kv", Security())
        self.assertEqual((True, f"{self.root}/kv (made now, empty)"), (made.made, str(made)))
        self.assertEqual([MARK], [path.name for path in (self.root / "kv").iterdir()])
        self.assertEqual(f"{self.root}/kv (empty)", str(prepare(self.root / "kv", Security())))
        with self.assertRaisesRegex(ConfigError, f"{self.root}/mnt is missing too"):
            prepare(self.root / "mnt" / "kv", Security())
        self.assertFalse((self.root / "mnt").exists())

    def test_stored(self) -> None:
        """What is stored is told, and a relative path as an absolute one."""
        with VUA(VUAConfig(split_factor=4), self.root) as vua:
            vua.put(torch.arange(12), caches_of(layers=1, heads=1, tokens=12, dim=8))
        before = Path.cwd()
        os.chdir(self.root.parent)
        try:
            text = str(prepare(self.root.name, Security()))
        finally:
            os.chdir(before)

        self.assertRegex(text, rf"^{self.root} \(0.01 MiB stored in 3 chunks\)$")

    def test_refused(self) -> None:
        """A file, a directory of everybody's, and one that cannot be written to."""
        (self.root / "file").write_text("x")
        with self.assertRaisesRegex(ConfigError, "expected a directory, found a file"):
            prepare(self.root / "file", Security())
        with self.assertRaisesRegex(ConfigError, "above it is a file"):
            prepare(self.root / "file" / "kv", Security())
        shared = self.root / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        with self.assertRaisesRegex(ConfigError, f"has mode 777.*such as {shared}/vua"):
            prepare(shared, Security())
        prepare(shared / "vua", Security())
        self.root.chmod(0o755)
        kept = self.root / "kept"
        prepare(kept, Security())
        with read_only(self.root):
            with self.assertRaisesRegex(NotWritableError, "may not write here"):
                prepare(kept, Security(trusted_uids="any"))
            prepare(kept, Security(trusted_uids="any"), writes=False)
