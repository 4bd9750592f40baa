"""The conformance table for other implementations: VUA itself says what it says."""

from __future__ import annotations

import json
from pathlib import Path

import make_conformance
from conformity import Judge, digest
from helpers import DirectoryTest
from vua.errors import ConfigError, CorruptEntryError
from vua.storage.description import parse_description
from vua.store.entry_reader import verified

TABLE = json.loads(make_conformance.TABLE.read_text("utf-8"))
FOLDER = Path(make_conformance.__file__).parent


def made(row: dict[str, object]) -> bytes:
    """The bytes of a row, as README.md says."""
    data = (FOLDER / str(row["file"])).read_bytes()
    length = row.get("length", len(data))
    assert isinstance(length, int)
    data = bytearray(data[:length].ljust(length, b"\0"))
    edits = row["edits"]
    assert isinstance(edits, list)
    for at, new in edits:
        data[at : at + len(new) // 2] = bytes.fromhex(new)
    return bytes(data)


class ConformanceTest(DirectoryTest):
    """`implementations/conformance/cases.json`."""

    def test_made(self) -> None:
        """It is as it would be made now, and its rows make the files that it was made of."""
        self.assertEqual(make_conformance.text(), make_conformance.TABLE.read_text("utf-8"))
        cases = make_conformance.cases()
        self.assertEqual(len(cases), len(TABLE["files"]))
        for case, row in zip(cases, TABLE["files"], strict=True):
            self.assertEqual(case.data, made(row), row["name"])
            self.assertTrue(row["expected"] == "right" or row["reason"], row["name"])

    def test_files(self) -> None:
        """Each file is read where it must be, and is a miss where it must be."""
        judge = Judge(self.root)
        right = {one.name: one for one in make_conformance.golden_entries()}
        for case in make_conformance.cases():
            with self.subTest(case.name, entry=case.entry.name):
                said = judge.loaded(case.entry, case.data)
                if case.kind == "right":
                    entry = right[case.entry.name]
                    self.assertEqual(digest(judge.loaded(entry, entry.data)), digest(said))
                self.assertEqual(case.kind != "right", said is None)

    def test_tools(self) -> None:
        """`vua verify` finds all damage."""
        for case in make_conformance.cases():
            entry, judged = case.entry, "sound"
            with self.subTest(case.name, entry=entry.name):
                try:
                    name = f"{entry.asked.name}/{entry.shard.name}"
                    verified(case.data, entry.identity.namespace, name)
                except CorruptEntryError:
                    judged = "damaged"
                except Exception as problem:  # noqa: BLE001 - ForeignEntryError
                    judged = type(problem).__name__
                if not entry.kind and case.kind == "damaged":
                    self.assertEqual("damaged", judged)
                elif case.kind == "right":
                    self.assertEqual("sound", judged)

    def test_descriptions(self) -> None:
        """So is each namespace.json."""
        for row in TABLE["descriptions"]:
            with self.subTest(row["name"]):
                try:
                    identity, _ = parse_description(row["text"].encode())
                    said = "right" if identity.namespace == row["directory"] else "foreign"
                except ConfigError:
                    said = "damaged"
                self.assertEqual(row["expected"], said)
