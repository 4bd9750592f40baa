"""Times on the command line."""

from __future__ import annotations

import os
import unittest
from unittest import mock

import click

from commands import run
from helpers import DirectoryTest
from vua.cli.command import duration, duration_s, lifetime_s


class DurationTest(unittest.TestCase):
    def test_units(self) -> None:
        """Seconds, or a number with a unit; anything else is refused."""
        for text, seconds in (("90", 90), ("90s", 90), ("1.5h", 5400), ("2D", 172800)):
            self.assertEqual(seconds, duration_s(text))
        for text in ("", "d", "1y", "1 d x"):
            with self.subTest(text=text), self.assertRaises(click.BadParameter):
                duration_s(text)

    def test_text(self) -> None:
        """A number of seconds is shown in the largest unit in which it is whole."""
        for seconds, text in (
            (2592000.0, "30d"),
            (5400, "90m"),
            (86401, "86401s"),
            (0.25, "0.25s"),
        ):
            self.assertEqual(text, duration(seconds))
            self.assertEqual(seconds, duration_s(text))


class UnitTest(DirectoryTest):
    def test_lifetimes(self) -> None:
        """What deletes by age takes no number without a unit; the error names what is."""
        self.assertEqual([86400, 0, 30], [lifetime_s(text) for text in ("1d", "0", "30s")])
        for words in (["ttl", self.root, "30"], ["gc", self.root, "--ttl", "1e3"]):
            code, _, err = run(*words)
            self.assertEqual(2, code)
            self.assertIn(f"{words[-1]}s, {words[-1]}m, {words[-1]}h or {words[-1]}d", err)
        with mock.patch.dict(os.environ, VUA_PATH=str(self.root)):
            code, _, err = run("ttl", "30")
            self.assertEqual(2, code)
            self.assertIn("'30' has no unit: give 30s, 30m, 30h or 30d", err)
            self.assertEqual(0, run("ttl", "30d")[0])
