"""The documentation as a site."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pytest

from browser import CHROMIUM, browser
from helpers import ROOT

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
