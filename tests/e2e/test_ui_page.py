"""The page of `vua ui` in a real browser: what is shown, by mouse and keys, light, dark, narrow."""

from __future__ import annotations

import io
import unittest
from pathlib import Path

import numpy as np
import pytest

from browser import CHROMIUM, Page, browser
from commands import CliTest
from forest import plant
from helpers import ROOT
from ui import served

HOSTILE = "<img src=x onerror=document.title='taken'>"
UNLIKE = 40
"""Mean difference of two pictures, of 255, from which they show something else."""


def thumbnail(png: bytes) -> np.ndarray:
    """A picture's brightness, in few large pixels."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("L").resize((24, 24)), dtype=np.float64)


@pytest.mark.thorough
@unittest.skipIf(CHROMIUM is None, "no Chromium is installed")
class PageTest(CliTest):
    def ready(self, tab: Page, url: str) -> None:
        """Open the page and wait for the tree."""
        tab.open(url)
        tab.until("document.querySelector('#tree').children.length > 0")

    def test_page(self) -> None:
        """Names are text, keys walk the tree, a prompt is explained, a verification runs."""
        self.put(HOSTILE, 1)
        plant(self.root, 300, seed=5)
        with served(self.root) as page, browser() as tab:
            tab.size(1100, 800)
            self.ready(tab, page.url)
            self.assertEqual("", tab.run("location.hash"))
            self.assertIn(HOSTILE, tab.run("document.querySelector('#namespaces').textContent"))
            self.assertEqual("VUA", tab.run("document.title"))
            tab.run("document.querySelector('#tree').firstChild.focus()")
            tab.key("ArrowDown")
            self.assertEqual("2", tab.run("document.activeElement.ariaLevel"))
            tab.key("Enter")
            tab.until("document.querySelectorAll('#path button').length > 1")
            tab.until("document.activeElement.dataset.at === '0'")
            tab.key("Backspace")
            tab.until("document.querySelectorAll('#path button').length < 3")
            tab.run(
                "document.querySelector('#tokens').value = '500 501 502 503 504 505';"
                "document.querySelector('#explain button').click()"
            )
            tab.until("document.querySelector('#answers').textContent.includes('a hit')")
            self.assertTrue(tab.run("document.querySelector('#textual').hidden"))
            tab.run("document.querySelector('#verify').click()")
            tab.until("document.querySelector('#verified').textContent.includes('read')")
            self.assertEqual([], tab.logged)

    def test_look(self) -> None:
        """Light, dark and narrow; it looks about as in the documentation."""
        plant(self.root, 3000, seed=7)
        with served(self.root) as page, browser() as tab:
            for dark, name in ((False, "light"), (True, "dark")):
                tab.size(1100, 900, dark=dark)
                self.ready(tab, page.url)
                shown = tab.screenshot()
                at = Path(ROOT, "docs", "images", f"ui-{name}.png")
                known, other = thumbnail(at.read_bytes()), thumbnail(shown)
                self.assertLess(np.abs(known - other).mean(), UNLIKE, name)
                self.assertGreater(np.abs(255 - known - other).mean(), UNLIKE, name)
            was = tab.run("document.documentElement.className")
            tab.run("document.querySelector('#theme').click()")
            self.assertNotEqual(was, tab.run("document.documentElement.className"))
            tab.size(400, 800)
            self.assertLessEqual(tab.run("document.documentElement.scrollWidth"), 400)

    def test_without_the_link(self) -> None:
        """Who has no token is told what to do, and sees nothing."""
        with served(self.root) as page, browser() as tab:
            tab.open(page.url.partition("#")[0])
            tab.until("document.querySelector('#problem').textContent.includes('vua ui')")
            self.assertTrue(tab.run("document.querySelector('main').hidden"))


if __name__ == "__main__":
    unittest.main()
