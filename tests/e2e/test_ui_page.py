"""Pages in a real browser: that of `vua ui`, and the documentation as a site."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np
import pytest

from browser import CHROMIUM, Page, browser
from commands import CliTest, served
from directory import fill
from helpers import ROOT, flip

HOSTILE = "<img src=x onerror=document.title='taken'>"
SIZES = ((1280, 800), (390, 844))
UNLIKE = 40
"""Mean difference of two pictures, of 255, from which they show something else."""
LINE = "document.querySelector('#line').textContent"


def thumbnail(png: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("L").resize((24, 24)), dtype=np.float64)


@pytest.mark.thorough
@unittest.skipIf(CHROMIUM is None, "no Chromium is installed")
class PageTest(CliTest):
    def ready(self, tab: Page, url: str, line: str = "Healthy") -> None:
        """Open the page and wait until its first line begins so."""
        tab.open(url)
        tab.until(f"{LINE}.startsWith('{line}')")

    def check_fits(self, tab: Page, *shown: str) -> None:
        """Nothing is beside the window, and these elements are in it without scrolling."""
        width, height = tab.run("[innerWidth, innerHeight]")
        self.assertLessEqual(tab.run("document.documentElement.scrollWidth"), width)
        for one in shown:
            found = f"document.querySelector('{one}')"
            self.assertLessEqual(tab.run(f"{found}.getBoundingClientRect().bottom"), height, one)
            self.assertGreater(tab.run(f"{found}.getBoundingClientRect().height"), 0, one)

    def test_page(self) -> None:
        """Names are text; the line, the models and commands are there, and nothing is logged."""
        self.put(HOSTILE, 1)
        with served(self.root) as page, browser() as tab:
            tab.size(*SIZES[0])
            self.ready(tab, page.url)
            self.assertEqual("", tab.run("location.hash"))
            self.assertIn(HOSTILE, tab.run("document.querySelector('#namespaces').textContent"))
            self.assertEqual("VUA", tab.run("document.title"))
            todo = tab.run("document.querySelector('#todo').textContent")
            self.assertIn(f"vua gc {self.root} --max-bytes ", todo)
            self.check_fits(tab, "#line", "#full", "#namespaces", "#todo code")
            self.assertEqual([], tab.logged)

    def test_damaged(self) -> None:
        """A damaged file is named at first sight, on a narrow window too."""
        damaged = self.entries()[0]
        flip(damaged, damaged.stat().st_size - 1)
        with served(self.root) as page, browser() as tab:
            for size in SIZES:
                tab.size(*size)
                self.ready(tab, page.url, "Not healthy (damaged files)")
                self.assertIn(damaged.parent.name[:12], tab.run("document.body.innerText"))
                self.assertIn("--repair", tab.run("document.querySelector('#todo').innerText"))
                self.check_fits(tab, "#line", "#wrong")

    def test_nothing_stored(self) -> None:
        """An empty directory says how to fill it; a foreign one, why no engine starts there."""
        for name, word in (("empty", "vua-vllm serve MODEL"), ("foreign", "notes.txt")):
            place = self.root.parent / f"{self.root.name}-{name}"
            place.mkdir(mode=0o700)
            self.addCleanup(shutil.rmtree, place)
            if name == "foreign":
                (place / "notes.txt").write_text("a")
            with served(place) as page, browser() as tab:
                tab.size(*SIZES[1])
                self.ready(tab, page.url, "Healthy" if name == "empty" else "Not healthy (owner)")
                text = tab.run("document.body.innerText")
                self.assertIn(word, text)
                self.assertEqual(name == "empty", "serve" in text)
                self.check_fits(tab, "#line", "#todo")

    def test_look(self) -> None:
        """Light, dark and narrow; it looks about as in the documentation."""
        for model in ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B"):
            self.put(model, 3)
        with served(self.root) as page, browser() as tab:
            for dark, name in ((False, "light"), (True, "dark")):
                tab.size(*SIZES[0], dark=dark)
                self.ready(tab, page.url)
                shown = tab.screenshot()
                at = Path(ROOT, "docs", "images", f"ui-{name}.png")
                known, other = thumbnail(at.read_bytes()), thumbnail(shown)
                self.assertLess(np.abs(known - other).mean(), UNLIKE, name)
                self.assertGreater(np.abs(255 - known - other).mean(), UNLIKE, name)
            tab.size(*SIZES[1])
            self.check_fits(tab, "#line", "#full", "#namespaces")

    def test_many_chunks(self) -> None:
        """Of 100,000 chunks a sample is counted, and named so; of their files a part is read."""
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=memory) as place:
            root = Path(place)
            fill(root, 100_000)
            with served(root) as page, browser() as tab:
                tab.size(*SIZES[0])
                self.ready(tab, page.url)
                chunks = tab.run("document.querySelector('#namespaces td.number').textContent")
                summary = tab.run("document.querySelector('#summary').textContent")
                passed = tab.run("document.querySelector('#passed').textContent")
        self.assertRegex(chunks, r"^about \d+,\d00$")
        self.assertLess(abs(int(chunks[6:].replace(",", "")) - 100_000), 2000)
        self.assertIn(f"{chunks} chunks in 1 namespace, ", summary)
        self.assertIn("a random part of all, read", passed)

    def test_without_the_link(self) -> None:
        """Who has no token is told what to do, and sees nothing."""
        with served(self.root) as page, browser() as tab:
            self.ready(tab, page.url.partition("#")[0], "open the link that `vua ui` has printed")
            self.assertTrue(tab.run("document.querySelector('#known').hidden"))


OTHER_HOSTS = re.compile(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="?https?://[^">]+')
CANONICAL = 'rel="canonical"'
TIMEOUT_S = 600


@pytest.mark.thorough
@unittest.skipUnless(importlib.util.find_spec("mkdocs"), "mkdocs-material is not installed")
class SiteTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        """Build it once."""
        cls.site = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(cls.site)]
        cls.done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
            env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        )  # fmt: skip

    def test_strict(self) -> None:
        """It is built without a warning: every link leads somewhere. No page needs a network."""
        self.assertEqual(0, self.done.returncode, self.done.stderr)
        pages = sorted(self.site.rglob("*.html"))
        self.assertLess(20, len(pages))
        for page in pages:
            found = [one for one in OTHER_HOSTS.findall(page.read_text()) if CANONICAL not in one]
            self.assertEqual([], found, page)

    @unittest.skipIf(CHROMIUM is None, "no Chromium is installed")
    def test_search_from_a_file(self) -> None:
        """Search finds a page when the site is opened from a disk, and leads there."""
        with browser() as tab:
            tab.open((self.site / "troubleshooting.html").as_uri())
            tab.run(
                "document.querySelector('#__search').click();"
                "const field = document.querySelector('.md-search__input');"
                "field.focus(); field.value = 'lookupcache';"
                "field.dispatchEvent(new Event('input', {bubbles: true}));"
                "field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}))"
            )
            found = tab.until("document.querySelector('.md-search-result__link')?.href")
            self.assertRegex(found, r"^file:.*\.html")
