"""The conformance table for other implementations: VUA itself says what it says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from conformity import Entry, Judge, description_kind, digest, golden_entries
from helpers import ROOT, TESTS, DirectoryTest
from vua.errors import CorruptEntryError
from vua.store.entry_reader import verified

TABLE = json.loads((ROOT / "implementations" / "conformance" / "cases.json").read_text("utf-8"))
OTHER_KEY = " by another key"


def made(row: dict[str, Any]) -> bytes:
    """The bytes of a row, as README.md says."""
    data = (TESTS / row["file"]).read_bytes()
    length = row.get("length", len(data))
    data = bytearray(data[:length].ljust(length, b"\0"))
    for at, new in row["edits"]:
        data[at : at + len(new) // 2] = bytes.fromhex(new)
    return bytes(data)


def cases() -> Iterator[tuple[dict[str, Any], Entry, bytes]]:
    """Each row, the golden entry that is asked for, and the bytes under its name."""
    golden = {one.name: one for one in golden_entries()}
    for row in TABLE["files"]:
        entry = golden[row["asked"].removesuffix(OTHER_KEY)]
        if row["asked"].endswith(OTHER_KEY):
            entry = replace(entry, key=bytes(32))
        yield row, entry, made(row)


class ConformanceTest(DirectoryTest):
    """`implementations/conformance/cases.json`, which is as frozen as the golden files."""

    def test_table(self) -> None:
        """Its rows make the files that they were made of, and ask for what they say."""
        for row, entry, data in cases():
            self.assertEqual(row["sha256"], hashlib.sha256(data).hexdigest(), row["name"])
            self.assertTrue(row["name"] == "unchanged" or row["reason"], row["name"])
            asked = entry.described().items()
            self.assertLessEqual(asked, TABLE["entries"][row["asked"]].items(), row["name"])

    def test_files(self) -> None:
        """Each file is read where it must be, and is a miss where it must be."""
        judge = Judge(self.root)
        for row, entry, data in cases():
            with self.subTest(row["name"], entry=entry.name):
                said = judge.loaded(entry, data)
                if row["expected"] == "right":
                    self.assertEqual(digest(judge.loaded(entry, entry.data)), digest(said))
                self.assertEqual(row["expected"] != "right", said is None)

    def test_tools(self) -> None:
        """`vua verify` finds all damage."""
        for row, entry, data in cases():
            judged = "sound"
            with self.subTest(row["name"], entry=entry.name):
                try:
                    name = f"{entry.asked.name}/{entry.shard.name}"
                    verified(data, entry.identity.namespace, name)
                except CorruptEntryError:
                    judged = "damaged"
                except Exception as problem:  # noqa: BLE001 - ForeignEntryError
                    judged = type(problem).__name__
                if not entry.kind and row["expected"] == "damaged":
                    self.assertEqual("damaged", judged)
                elif row["expected"] == "right":
                    self.assertEqual("sound", judged)

    def test_descriptions(self) -> None:
        """So is each namespace.json."""
        for row in TABLE["descriptions"]:
            with self.subTest(row["name"]):
                said = description_kind(row["text"].encode(), row["directory"])
                self.assertEqual(row["expected"], said)
