"""The corruption olympics' own parts: damage, verdicts, tables."""

from __future__ import annotations

import json
import unittest

from olympics.cells import ACCIDENTS, CELLS, CONTROL_OF, CONTROLS
from olympics.page import (
    FACTS,
    PAGE,
    REGIONS,
    TOTALS,
    made_of,
    source,
)

RESULTS = PAGE.parent / "measurements" / "olympics.json"


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
