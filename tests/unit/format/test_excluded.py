"""Mirrors `vua.format.excluded`."""

from __future__ import annotations

import unittest
from itertools import chain

from vua.format.excluded import NOT_COMPUTED, tables_of


class ExcludedTest(unittest.TestCase):
    def test_every_name_has_a_reason(self) -> None:
        """Each word in an engine's tables is explained, and each explanation is used."""
        for package in ("vua.vllm", "vua.sglang"):
            with self.subTest(package):
                tables = tables_of(package)
                of_fields = tables["fields"].values() if "fields" in tables else ()
                used = {*tables["variables"], *tables.get("arguments", ()), *chain(*of_fields)}
                self.assertEqual(tables["reasons"].keys(), used)
                self.assertLessEqual({*NOT_COMPUTED}, used)


if __name__ == "__main__":
    unittest.main()
