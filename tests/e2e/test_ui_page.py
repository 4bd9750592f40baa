"""The page of `vua ui` in a real browser: what is shown, light, dark, narrow."""

from __future__ import annotations

import io
import shutil
import unittest
from pathlib import Path

import numpy as np
import pytest

from browser import CHROMIUM, Page, browser
from commands import CliTest, run
from forest import plant
from helpers import ROOT, until
from ui import served

HOSTILE = "<img src=x onerror=document.title='taken'>"
UNLIKE = 40
"""Mean difference of two pictures, of 255, from which they show something else."""


def thumbnail(png: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("L").resize((24, 24)), dtype=np.float64)


def read_spaces(root: Path) -> list[tuple[str, list[str]]]:
    """The namespaces, and the names of their chunks."""
    return [(one.parent.name, sorted(chunk.name for chunk in one.parent.glob("??/*")))
            for one in root.glob("*/namespace.json")]  # fmt: skip


@pytest.mark.thorough
@unittest.skipIf(CHROMIUM is None, "no Chromium is installed")
class PageTest(CliTest):
    def ready(self, tab: Page, url: str) -> None:
        """Open the page and wait for the first look."""
        tab.open(url)
        tab.until("document.querySelector('#lastuse').textContent.includes('hour')")

    def test_page(self) -> None:
        """Names are text, a prompt is explained, a verification runs."""
        self.put(HOSTILE, 1)
        plant(self.root, 300, seed=5)
        with served(self.root) as page, browser() as tab:
            tab.size(1100, 800)
            self.ready(tab, page.url)
            self.assertEqual("", tab.run("location.hash"))
            self.assertIn(HOSTILE, tab.run("document.querySelector('#namespaces').textContent"))
            self.assertEqual("VUA", tab.run("document.title"))
            tab.run(
                "document.querySelector('#tokens').value = '500 501 502 503 504 505';"
                "document.querySelector('#explain button').click()"
            )
            tab.until("document.querySelector('#answers').textContent.includes('a hit')")
            self.assertTrue(tab.run("document.querySelector('#textual').hidden"))
            tab.run("document.querySelector('#verify').click()")
            tab.until("document.querySelector('#verified').textContent.includes('read')")
            self.assertEqual([], tab.logged)

    def test_two_questions(self) -> None:
        """What is in it, and what to do: in words, with commands to copy."""
        plant(self.root, 300, seed=5)
        (space,) = (one for one in read_spaces(self.root) if len(one[1]) > 100)
        name, chunks = space
        run("pin", self.root, chunks[0])
        with served(self.root) as page, browser() as tab:
            tab.size(1400, 900)
            self.ready(tab, page.url)
            buttons = "[...document.querySelectorAll('#namespaces button')]"
            tab.run(f"{buttons}.find((one) => one.textContent === '{name[:12]}').click()")
            tab.until("!document.querySelector('#pinned').hidden")
            self.assertIn(chunks[0][:12], tab.run("document.querySelector('#pins').textContent"))
            todo = tab.run("document.querySelector('#todo').textContent")
            self.assertIn(f"vua rm {self.root} {name[:12]} --dry-run", todo)
            tab.run(
                "document.querySelector('#tokens').value = 'a text';"
                "document.querySelector('#explain button').click()"
            )
            answers = "document.querySelector('#answers').textContent"
            tab.until(f"{answers}.includes('--tokenizer MODELDIR')")
            was = page.json("overview")["now_s"]
            tab.until("document.querySelector('#facts').textContent.length > 0")
            until(lambda: page.json("overview")["now_s"] > was + 2.5)  # the page has asked again
            self.assertIn("expected a JSON list", tab.run(answers))
            refused = [one for one in tab.logged if "400" not in one]  # the text above
            self.assertEqual([], refused)

    def test_nothing_stored(self) -> None:
        """An empty directory says how to fill it; a foreign one, why no engine starts there."""
        for name, word in (("empty", "vua-vllm serve MODEL"), ("foreign", "notes.txt")):
            place = self.root.parent / f"{self.root.name}-{name}"
            place.mkdir(mode=0o700)
            self.addCleanup(shutil.rmtree, place)
            if name == "foreign":
                (place / "notes.txt").write_text("a")
            with served(place) as page, browser() as tab:
                tab.size(400, 800)
                tab.open(page.url)
                tab.until(f"document.querySelector('#nothing').innerText.includes('{word}')")
                self.assertEqual(
                    name == "foreign", tab.run("document.querySelector('#begin').hidden")
                )
                self.assertLessEqual(tab.run("document.documentElement.scrollWidth"), 400)

    def test_look(self) -> None:
        """Light, dark and narrow; it looks about as in the documentation."""
        plant(self.root, 3000, seed=7)
        with served(self.root) as page, browser() as tab:
            for dark, name in ((False, "light"), (True, "dark")):
                tab.size(1100, 1250, dark=dark)
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
