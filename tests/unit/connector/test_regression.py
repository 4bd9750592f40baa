"""Lines through measurements with outliers."""

from __future__ import annotations

import random
import unittest

from vua.connector.regression import Regression


class LineTest(unittest.TestCase):
    def test_line(self) -> None:
        """Both numbers are found in spite of noise and of one outlier in five."""
        for seed in range(20):
            chance, line = random.Random(seed), Regression(40, proportional=True)
            for at in range(40):
                x = chance.uniform(1, 100)
                noise = 30.0 if at % 5 == 0 else chance.uniform(0.95, 1.05)
                line.add(x, (5 + 2 * x) * noise)

            self.assertAlmostEqual(105, line.at(50) or 0, delta=20)
            self.assertAlmostEqual(13, line.at(4) or 0, delta=12)

    def test_one_size(self) -> None:
        """Measurements of one size tell no slope, nor does a single one of another size."""
        line, flat = Regression(8, proportional=True), Regression(8, proportional=False)
        for y in (4.0, 5.0, 4.0, 4.0, 900.0, 4.0):
            line.add(10, y)
            flat.add(10, y)
        self.assertEqual((4.0, 8.0, 4.0), (line.at(10), line.at(20), flat.at(20)))

        line.add(100, 4000.0)

        self.assertEqual(8.0, line.at(20))

    def test_never_negative(self) -> None:
        """Larger is never predicted cheaper, and small never below nothing."""
        falling, steep = Regression(8, proportional=True), Regression(8, proportional=True)
        for x in (10.0, 20.0, 30.0, 40.0):
            falling.add(x, 100 - x)
            steep.add(x, x * x)

        self.assertEqual(falling.at(10), falling.at(1000))
        self.assertEqual(0.0, steep.at(0))

    def test_nothing(self) -> None:
        """Without measurements there is no answer, also after forgetting."""
        line = Regression(8, proportional=True)
        self.assertIsNone(line.at(1))
        line.add(1, 1)
        line.keep(0)
        self.assertIsNone(line.at(1))


if __name__ == "__main__":
    unittest.main()
