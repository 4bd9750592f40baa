"""Mirrors `vua.catalog.stored`: new storages get the commands of `vua`."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from unittest import mock

from commands import TOKENS, CliTest, run, run_json
from conformance.sqlite_storage import SQLiteStorage
from helpers import keys_of
from vua import catalog as places
from vua.catalog.base import Catalog
from vua.catalog.stored import StorageCatalog
from vua.storage.base import WRITTEN
from vua.storage.description import Description, read_description
from vua.store.tiered import whole_batch

KEYS = [key.name for key in keys_of(TOKENS.tolist(), 4)]


class StoredTest(CliTest):
    """The entries of a directory, in a database for each namespace."""

    URL = "sqlite://here"

    def setUp(self) -> None:
        super().setUp()
        self.spaces = [path for path in sorted(self.root.iterdir()) if len(path.name) == 64]
        self.storages: dict[str, SQLiteStorage] = {}
        for space in self.spaces:
            storage = SQLiteStorage(self.root / f"{space.name}.db")
            self.addCleanup(storage.close)
            self.storages[space.name] = storage
            for file in sorted(space.rglob("*.safetensors")):
                self.copy(storage, f"{file.parent.name}/{file.stem}", file.read_bytes())
        openers = mock.patch.dict(places.openers)
        self.enterContext(openers)
        places.register("sqlite", self.open)

    def open(self, where: str, *, create: bool) -> Catalog:
        self.assertFalse(create)
        return StorageCatalog(where, self.storages, self.describe)

    def describe(self, name: str) -> Description:
        return read_description(self.root / name)

    def copy(self, storage: SQLiteStorage, name: str, data: bytes) -> None:
        self.assertEqual([WRITTEN], list(storage.write(whole_batch(name, data)).statuses))

    def test_gc_of_a_prompt_stored_out_of_order(self) -> None:
        """Leaves go first, in whatever order a writer's threads stored the chunks."""
        order = KEYS
        with contextlib.ExitStack() as stack:
            for space in self.spaces:
                database = sqlite3.connect(self.root / f"{space.name}.db")
                stack.enter_context(contextlib.closing(database))
                for name, used_s in zip(order, (50, 10, 100), strict=True):
                    query = "UPDATE entries SET used_s = ? WHERE substr(name, 1, 64) = ?"
                    database.execute(query, (used_s, name))
                database.commit()
        total = run_json("du", self.URL)[1]["nbytes"]
        self.assertEqual(0, run("gc", self.URL, "--max-bytes", f"{total // 2}B")[0])
        kept = {entry.name[:64] for one in self.storages.values() for entry in one.list()}
        self.assertEqual(order[:1], [name for name in order if name in kept])

    def test_events(self) -> None:
        """Routers are told what is stored."""
        out = run("events", self.URL)[1]
        told = {json.loads(line)["block_hashes"][0] for line in out.splitlines()}
        self.assertLessEqual(set(KEYS), told)

    def test_what_it_lacks(self) -> None:
        """A storage keeps no pins and no limits, and says so; all of it can be deleted."""
        for words, expected in (
            (("pin", self.URL, KEYS[1]), "keeps no pins"),
            (("gc", self.URL, "--max-bytes", "1G", "--set"), "keeps no limits"),
        ):
            code, _, err = run(*words)
            self.assertEqual(2, code)
            self.assertIn(expected, err)
        self.assertEqual(0, run("rm", self.URL, "--all")[0])
        self.assertEqual(0, sum(len(list(one.list())) for one in self.storages.values()))
