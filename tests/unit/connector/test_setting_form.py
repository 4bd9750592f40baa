"""Mirrors `vua.connector.setup.setting_form`."""

from __future__ import annotations

import enum
import json
import unittest
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vua.connector.cache_spec import UncachedError
from vua.connector.setup import setting_form


class Struct(SimpleNamespace):
    """As msgspec's, which name their fields."""

    __struct_fields__ = ("weight",)


class SettingFormTest(unittest.TestCase):
    def test_lasting_forms(self) -> None:
        """Sets, enums, classes, dtypes, paths and kinds with fields have a form that lasts."""
        colour = enum.Enum("colour", ["RED", "BLUE"])
        spec = make_dataclass("Spec", [("weight", object)])
        values = [
            {"b", "a"}, {"a"}, colour.RED, colour.BLUE, int, str, torch.float16, Path("a"),
            [1, 2.5], {1: "x"}, spec("fp8"), spec("int8"), spec([1]), Struct(weight="fp8"),
            Struct(weight=spec("fp8")), True, 1, float("nan"), float("inf"), None,
        ]  # fmt: skip
        seen = [json.dumps(setting_form(value, "new"), sort_keys=True) for value in values]
        self.assertEqual(len(values), len(set(seen)))

    def test_equal_values(self) -> None:
        """What an engine takes for equal has one form, at any depth."""
        for one, other in (
            ({"a", "b", "c"}, frozenset(("c", "b", "a"))),
            ([1.0, {"n": 2}], (1, {"n": 2.0})),
            ({1: "x"}, {"1": "x"}),
            (Path("a/b"), "a/b"),
        ):
            with self.subTest(one):
                self.assertEqual(setting_form([one], "new"), setting_form([other], "new"))

    def test_no_lasting_form(self) -> None:
        """What cannot be told apart is refused, with the setting's name and place."""
        itself: list[Any] = []
        itself.append(itself)
        for value in (object(), lambda: None, {1: 0, "1": 1}, {(1, 2): 0}, SimpleNamespace()):
            with self.subTest(value), self.assertRaisesRegex(UncachedError, r"new\[1\]"):
                setting_form([0, value], "new")
        with self.assertRaises(UncachedError):
            setting_form(itself, "new")


if __name__ == "__main__":
    unittest.main()
