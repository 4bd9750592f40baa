"""Times on the command line."""

from __future__ import annotations

import argparse
import unittest

from vua.cli.arguments import duration_s


class DurationTest(unittest.TestCase):
    def test_units(self) -> None:
        """Seconds, or a number with a unit; anything else is refused."""
        for text, seconds in (("90", 90), ("90s", 90), ("1.5h", 5400), ("2D", 172800)):
            self.assertEqual(seconds, duration_s(text))
        for text in ("", "d", "1y", "1 d x"):
            with self.subTest(text=text), self.assertRaises(argparse.ArgumentTypeError):
                duration_s(text)


if __name__ == "__main__":
    unittest.main()
