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

from helpers import ROOT

OTHER_HOSTS = re.compile(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="?https?://[^">]+')
CANONICAL = 'rel="canonical"'
TIMEOUT_S = 600


@unittest.skipUnless(importlib.util.find_spec("mkdocs"), "mkdocs-material is not installed")
class SiteTest(unittest.TestCase):
    @pytest.mark.thorough
    def test_strict(self) -> None:
        """It is built without a warning: every link leads somewhere. No page needs a network."""
        with tempfile.TemporaryDirectory() as name:
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", name]
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
                env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
            )  # fmt: skip
            self.assertEqual(0, done.returncode, done.stderr)
            pages = sorted(Path(name).rglob("*.html"))
            self.assertLess(20, len(pages))
            for page in pages:
                found = [
                    one for one in OTHER_HOSTS.findall(page.read_text()) if CANONICAL not in one
                ]
                self.assertEqual([], found, page)
