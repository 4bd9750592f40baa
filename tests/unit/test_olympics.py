"""The corruption olympics' own parts: damage, verdicts, tables."""

from __future__ import annotations

import json
import unittest
from typing import Any

from olympics.cells import ACCIDENTS, CELLS, CONTROL_OF, CONTROLS, judged
from olympics.page import (
    FACTS,
    PAGE,
    REGIONS,
    TOTALS,
    made_of,
    source,
)

RESULTS = PAGE.parent / "measurements" / "olympics.json"


def life(*told: dict[str, Any], status: int | None = 0, log: str = "") -> dict[str, Any]:
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
