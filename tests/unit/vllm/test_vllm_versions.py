"""Mirrors `vua.vllm.support`: which releases of vLLM are taken, and what is said of others."""

from __future__ import annotations

import unittest
from importlib.util import find_spec
from unittest import mock

import pytest

from vua.connector.log import WarnOnce, logger
from vua.errors import ConfigError

pytestmark = pytest.mark.vllm

RANGES = r"works with 0\.28 to 0\.33\."


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class VersionsTest(unittest.TestCase):
    def check(self, version: str) -> None:
        from vua.vllm.support import check_version

        with mock.patch("vllm.__version__", version):
            check_version()

    def test_supported(self) -> None:
        """The whole range, its patch and pre-releases, and builds that have no number."""
        for version in ("0.28.0", "0.32.0+cpu", "0.33.1rc2.dev5+g1234", "0.34.0", "mine"):
            with self.subTest(version):
                self.check(version)

    def test_refused(self) -> None:
        """The text names what was found, what works, and what to do."""
        with self.assertRaisesRegex(ConfigError, rf"0\.27\.1.*{RANGES}.*Install"):
            self.check("0.27.1")

    def test_what_was_not_run(self) -> None:
        """A newer release says that VUA never ran with it; the others do not."""
        from vua.vllm.support import announce

        for version in ("0.34.0", "0.28.0", "0.30.2", "0.32.0+cpu", "0.33.0", "mine"):
            with (
                self.subTest(version),
                mock.patch("vllm.__version__", version),
                mock.patch("vua.vllm.support.warn_once", WarnOnce(logger())),
                self.assertLogs("vllm.vua", "INFO") as logged,
            ):
                announce(None)
                said = [line for line in logged.output if "never run with" in line]
                self.assertEqual(version == "0.34.0", bool(said))
