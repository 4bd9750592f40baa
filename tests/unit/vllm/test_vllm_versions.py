"""Mirrors `vua.vllm.support`: which releases of vLLM are taken, and what is said of others."""

from __future__ import annotations

import unittest
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import pytest

from vua.errors import ConfigError

pytestmark = pytest.mark.vllm

RANGES = r"works with 0\.28 to 0\.33, on NVIDIA GPUs from 0\.24 on\."


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class VersionsTest(unittest.TestCase):
    def check(self, version: str, device: str = "cpu", *, allow_untested: bool = False) -> None:
        """Check as if vLLM were of this version."""
        from vua.vllm.support import check_version

        platform = SimpleNamespace(is_cuda=lambda: device == "cuda", device_type=device)
        with (
            mock.patch("vllm.__version__", version),
            mock.patch("vllm.platforms.current_platform", platform),
        ):
            check_version(allow_untested=allow_untested)

    def test_supported(self) -> None:
        """The whole range, its patch and pre-releases, and builds that have no number."""
        for version in ("0.28.0", "0.32.0+cpu", "0.33.1rc2.dev5+g1234", "0.33.9", "mine"):
            for device in ("cpu", "cuda"):
                with self.subTest(version, device=device):
                    self.check(version, device)

    def test_older_ones_on_gpus(self) -> None:
        """From 0.24 on, and nowhere else: their pages on other devices have other forms."""
        for version in ("0.24.0", "0.25.1", "0.26.0rc1", "0.27.1"):
            with self.subTest(version):
                self.check(version, "cuda")
                for device in ("cpu", "xpu"):
                    with self.assertRaisesRegex(ConfigError, rf"{version}.*\({device}\).*{RANGES}"):
                        self.check(version, device, allow_untested=True)

    def test_refused(self) -> None:
        """The text names what was found, what works, and what to do."""
        for device in ("cpu", "cuda"):
            for version, advice in (("0.23.1", "Install"), ("0.34.0", "untested_vllm")):
                with (
                    self.subTest(version, device=device),
                    self.assertRaisesRegex(ConfigError, rf"{version}.*{RANGES}.*{advice}"),
                ):
                    self.check(version, device)
            self.check("0.34.0", device, allow_untested=True)
            with self.assertRaises(ConfigError):
                self.check("0.23.1", device, allow_untested=True)

    def test_what_was_not_run(self) -> None:
        """An accepted release that VUA was never run with says so; the others say nothing."""
        from vua.vllm.support import caveat

        for version, text in (
            ("0.24.0", r"0\.24\.0.*not run; by its API only \(run: 0\.28 to 0\.33\)"),
            ("0.27.1", "not run; by its API only"),
            ("0.34.0", "not run; not even its API is known"),
        ):
            with self.subTest(version), mock.patch("vllm.__version__", version):
                self.assertRegex(caveat() or "", text)
        for version in ("0.28.0", "0.30.2", "0.32.0+cpu", "0.33.0", "mine"):
            with self.subTest(version), mock.patch("vllm.__version__", version):
                self.assertIsNone(caveat())

    def test_form_of_pages(self) -> None:
        """K and V share a row since 0.26."""
        from vua.vllm.support import packs_k_and_v

        for version, packed in (("0.25.1", False), ("0.26.0", True), ("mine", True)):
            with self.subTest(version), mock.patch("vllm.__version__", version):
                self.assertIs(packed, packs_k_and_v())


if __name__ == "__main__":
    unittest.main()
