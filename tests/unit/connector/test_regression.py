"""What loads and prefills are predicted to take."""

from __future__ import annotations

import random
import unittest

from vua.connector.load_policy import Regression


class LineTest(unittest.TestCase):
    def test_line(self) -> None:
        """Both numbers are found in spite of noise and of one outlier in five."""
        for seed in range(20):
            chance, line = random.Random(seed), Regression()
            for at in range(40):
                x = chance.uniform(1, 100)
                noise = 30.0 if at % 5 == 0 else chance.uniform(0.95, 1.05)
                line.add(x, (5 + 2 * x) * noise)

            self.assertAlmostEqual(105, line.at(50) or 0, delta=20)
            self.assertAlmostEqual(13, line.at(4) or 0, delta=12)

    def test_one_size(self) -> None:
        """Measurements of one size tell no slope, nor does a single one of another size."""
        line = Regression()
        for x, y in enumerate((4.0, 4.0, 4.0, 4.0, 5.0, 5.0, 900.0)):
            line.add(10 + x / 10, y)
        self.assertEqual((4.0, 4.0), (line.at(10), line.at(200)))

        line.add(100, 4000.0)

        self.assertEqual(4.0, line.at(200))

    def test_never_negative(self) -> None:
        """Larger is never predicted cheaper, and small never below nothing."""
        falling, steep = Regression(), Regression()
        for x in (10.0, 20.0, 30.0, 40.0):
            falling.add(x, 100 - x)
            steep.add(x, x * x)

        self.assertEqual(falling.at(10), falling.at(1000))
        self.assertEqual(0.0, steep.at(0))

    def test_outliers_and_change(self) -> None:
        """Two slow ones in a row are outliers; a third one is a change."""
        line = Regression()
        self.assertIsNone(line.at(1000))
        for _ in range(20):
            line.add(1000, 0.1)
        for _ in range(3):
            line.add(1000, 5.0)
            line.add(1000, 5.0)
            self.assertEqual(0.1, line.at(1000))
            line.add(1000, 0.1)
        for _ in range(3):
            line.add(1000, 5.0)
        self.assertEqual(5.0, line.at(1000))

        for _ in range(3):
            line.add(1000, 0.2)
        self.assertEqual(0.2, line.at(1000))
