"""Times on the command line."""

from __future__ import annotations

import unittest

import click

from vua.cli.command import duration, duration_s


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


if __name__ == "__main__":
    unittest.main()
