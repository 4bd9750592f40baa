"""The corruption olympics' own parts: damage, verdicts, tables."""

from __future__ import annotations

import json
import os
import unittest
from pathlib import Path
from typing import Any

from helpers import DirectoryTest
from olympics.cells import ACCIDENTS, CELLS, CONTROL_OF, CONTROLS, Found, judged, worse
from olympics.damage import DAMAGES, FLIP_EVERY_NBYTES, files_of, payloads
from olympics.page import (
    FACTS,
    PAGE,
    REGIONS,
    TOTALS,
    cell,
    cells_of,
    controlled,
    happened,
    made_of,
    source,
)

RESULTS = PAGE.parent / "measurements" / "olympics.json"


class TestDamage(DirectoryTest):
    """What happens to files."""

    def setUp(self) -> None:
        """Three files with K and V, and a small one."""
        super().setUp()
        for name, size in (("a", 40000), ("b", 40000), ("c", 20000), ("index.json", 100)):
            (self.root / name).write_bytes(os.urandom(size))

    def contents(self) -> dict[Path, bytes]:
        """Of all files."""
        return {path: path.read_bytes() for path in files_of(self.root)}

    def test_flip(self) -> None:
        """One bit in each 32 KiB, the same for the same seed; twice is as if not at all."""
        before = self.contents()
        self.assertEqual(3, DAMAGES["flip"](self.root, 7))
        after = self.contents()
        for path in payloads(self.root):
            bits = [one ^ other for one, other in zip(before[path], after[path], strict=True)]
            expected = -(-(len(bits) * 3 // 4 - 64) // FLIP_EVERY_NBYTES)
            self.assertEqual([0x40] * expected, [one for one in bits if one])
        DAMAGES["flip"](self.root, 7)
        self.assertEqual(before, self.contents())

    def test_others(self) -> None:
        """Files of one size change places; files get shorter; all is gone."""
        before = self.contents()
        a, b = self.root / "a", self.root / "b"
        self.assertEqual(2, DAMAGES["swap"](self.root, 1))
        self.assertEqual((before[b], before[a]), (a.read_bytes(), b.read_bytes()))
        self.assertEqual(3, DAMAGES["cut"](self.root, 1))
        self.assertTrue(all(size < 30000 for size in files_of(self.root).values()))
        DAMAGES["remove"](self.root, 1)
        self.assertFalse(self.root.exists())


def life(*told: dict[str, Any], status: int | None = 0, log: str = "") -> dict[str, Any]:
    """What a driver answers."""
    return {"told": [{"made": True}, *told], "status": status, "log": log}


class TestVerdicts(unittest.TestCase):
    """What a cell says of what was seen."""

    def test_each(self) -> None:
        """Right, miss, wrong, crash and hang."""
        good = {"tokens": [1, 2], "cached": 64, "seconds": 0.5}
        closed = {"closed": True}
        for expected, lived in (
            ("right", life(good, closed)),
            ("miss", life({**good, "cached": 0}, closed)),
            ("wrong", life({**good, "tokens": [1, 3]}, closed)),
            ("wrong", life({**good, "tokens": [1, 3]}, status=-9)),
            ("crash", life({"problem": "OSError"}, status=0)),
            ("crash", life(status=-6, log="aborted\n")),
            ("hang", life(status=None)),
        ):
            with self.subTest(expected, lived=lived):
                self.assertEqual(expected, judged(lived, [[1, 2]]).outcome)
        self.assertIn("aborted", judged(life(status=-6, log="aborted\n"), [[1]]).detail)

    def test_both_lives(self) -> None:
        """What went wrong while it stored counts, unless what was found is worse."""
        crash, wrong, right, miss = map(Found, ("crash", "wrong", "right", "miss"))
        self.assertEqual("right", worse(miss, right).outcome)
        self.assertEqual("crash", worse(crash, miss).outcome)
        self.assertEqual("wrong", worse(crash, wrong).outcome)


class TestPage(unittest.TestCase):
    """The published tables."""

    def test_the_page(self) -> None:
        """The page shows what the file of results and the facts hold."""
        report = json.loads(RESULTS.read_text())
        for name, made in made_of(report).items():
            shown = REGIONS[name].search(PAGE.read_text())
            assert shown is not None
            said = f"{name}: `python3 dev.py olympics --page` writes it"
            self.assertTrue(f"{shown[1]}{made}{shown[2]}" == shown[0], said)
        for name in report["subjects"]:
            run = {one["accident"] for one in report["cells"] if one["subject"] == name}
            self.assertTrue(run, name)
            self.assertLessEqual(run, set(CELLS), name)
        self.assertEqual(set(CONTROLS), {"nothing", *CONTROL_OF.values()})

    def test_facts(self) -> None:
        """Each store has a word for each question, and each word that claims something a source."""
        facts = json.loads(FACTS.read_text("utf-8"))
        asked = {one for one, row in facts["rows"].items() if isinstance(row, str)}
        self.assertLessEqual(asked, {*ACCIDENTS, *TOTALS})
        for name, column in facts["columns"].items():
            self.assertTrue(column["version"] and column["date"].startswith("2026-"), name)
            for question in facts["rows"].keys() - asked:
                fact = facts["rows"][question][name]
                with self.subTest(question, store=name):
                    if isinstance(fact, str):
                        self.assertIn(fact, ("no", "?", "\u2013", "Apache-2.0"))
                    else:
                        self.assertRegex(
                            source(facts, fact[1]), r"^(https://\S+|[\w./-]*(#[\w-]+)?)$"
                        )

    def test_happened(self) -> None:
        """A word about an accident is the olympics', and so is the count of them."""
        base = {"subject": "A", "seed": 1, "afterwards": "", "tries": []}
        found = {"restart": "right", "flipped bit": "wrong", "other TP": "cannot be run"}
        made = [base | {"accident": one, "outcome": what} for one, what in found.items()]
        cells = cells_of({"cells": made})
        self.assertEqual("[right](#accident-restart)", happened(cells, "restart", "A"))
        self.assertEqual("[**wrong**](#accident-flipped-bit)", happened(cells, "flipped bit", "A"))
        made.append(base | {"accident": "truncated", "outcome": "miss"})
        cells = cells_of({"cells": made})
        for accident, subject in (("other TP", "A"), ("restart", "B"), (next(iter(TOTALS)), "B")):
            self.assertEqual("not run", happened(cells, accident, subject))
        self.assertEqual(
            ["[2 of 3]", "[1 of 3]"],
            [happened(cells, one, "A").partition("(")[0] for one in TOTALS],
        )

    def test_controls(self) -> None:
        """A cell says so where the same without the accident was not right either."""
        base = {"subject": "A", "seed": 1, "afterwards": "", "tries": []}
        made = [base | {"accident": "other dtype", "outcome": "miss"}]
        for outcome, expected in (("right", "miss"), ("crash", "miss (control: **crash**)")):
            control = base | {"accident": "the other dtype", "outcome": outcome}
            cells = cells_of({"cells": [*made, control]})
            self.assertEqual(expected, controlled(cells, "other dtype", "A"))

    def test_cells(self) -> None:
        """Bad outcomes stand out; of a miss it is said whether it stays one."""
        base = {"afterwards": "", "tries": ["wrong", "wrong"]}
        for expected, one in (
            ("**wrong**", {"outcome": "wrong"}),
            ("**wrong** (once of two)", {"outcome": "wrong", "tries": ["crash", "wrong"]}),
            ("miss", {"outcome": "miss", "afterwards": "right", "tries": ["miss"]}),
            ("miss, stays", {"outcome": "miss", "afterwards": "miss", "tries": ["miss"]}),
            ("not run", {"outcome": "cannot be run", "tries": []}),
        ):
            self.assertEqual(expected, cell([base | one]))
        self.assertEqual("not yet run", cell([]))


if __name__ == "__main__":
    unittest.main()
