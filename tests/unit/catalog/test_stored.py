"""Mirrors `vua.catalog.stored`: new storages get the commands of `vua`."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from typing import Any
from unittest import mock

from commands import CliTest, run, run_json
from conformance.sqlite_storage import SQLiteStorage
from vua.capacity.spaces import silent
from vua.catalog import opening
from vua.catalog.base import Catalog
from vua.catalog.stored import StorageCatalog
from vua.errors import ConfigError
from vua.storage.base import WRITTEN
from vua.storage.description import Description, read_description
from vua.store.tiered import whole_batch


class WithoutPins:
    """A storage that keeps none."""

    def __init__(self, storage: SQLiteStorage) -> None:
        self.storage = storage

    def __getattr__(self, name: str) -> Any:
        if "pins" in name:
            raise AttributeError(name)
        return getattr(self.storage, name)


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
        openers = mock.patch.dict(opening.openers)
        self.enterContext(openers)
        opening.register("sqlite", self.open)

    def open(self, where: str, *, create: bool) -> Catalog:
        self.assertFalse(create)
        return StorageCatalog(where, self.storages, self.describe)

    def describe(self, name: str) -> Description:
        return read_description(self.root / name)

    def copy(self, storage: SQLiteStorage, name: str, data: bytes) -> None:
        self.assertEqual([WRITTEN], list(storage.write(whole_batch(name, data)).statuses))

    def chunks(self) -> list[str]:
        """The chunks of the longer prompt, front to back."""
        found = {}
        for file in self.entries():
            found[run_json("inspect", file)[1][0]["tokens"][0]] = file.parent.name
        return [found[start] for start in sorted(found)]

    def count(self) -> int:
        return sum(len(list(one.list())) for one in self.storages.values())

    def test_pins_and_gc(self) -> None:
        """A pin holds a chunk and its prefix against both, until it is lifted."""
        _, second, _ = self.chunks()
        self.assertEqual(2, run_json("pin", self.URL, second)[1]["pinned"][0]["chunks"])
        self.assertEqual([2], [one["chunks"] for one in run_json("pin", self.URL)[1]["pinned"]])
        code, report = run_json("gc", self.URL, "--max-bytes", "0")
        self.assertEqual((1, 2, 2), (code, report["deleted"]["evicted"]["chunks"], self.count()))
        self.assertEqual(1, run("rm", self.URL, "--all")[0])
        self.assertEqual(0, run("pin", self.URL, second, "--remove")[0])
        self.assertEqual((0, 0), (run("gc", self.URL, "--max-bytes", "0")[0], self.count()))

    def test_gc_of_a_prompt_stored_out_of_order(self) -> None:
        """Leaves go first, in whatever order a writer's threads stored the chunks."""
        order = self.chunks()
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
        self.assertLessEqual(set(self.chunks()), told)

    def test_without_pins(self) -> None:
        """A storage that keeps no pins, or a cache that keeps no limits, says so."""
        name = next(one for one in self.storages if len(list(self.storages[one].list())) == 3)
        plain: Any = WithoutPins(self.storages[name])
        catalog = StorageCatalog("plain", {name: plain}, self.describe)
        with (
            catalog.namespaces(silent) as ((space,), _),
            self.assertRaisesRegex(ConfigError, "keeps no pins"),
        ):
            space.pin(self.chunks()[0])
        with self.assertRaisesRegex(ConfigError, "keeps no limits"):
            catalog.keep({"ttl_s": 1.0})
