"""Mirrors `vua.vllm.support`: which door an engine takes, and what it is given for that."""

from __future__ import annotations

import copy
import importlib
import os
import unittest
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from engine_configs import ConfigTest, Given, on
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from model_classes import ROWS
from vua.connector.log import WarnOnce, logger
from vua.errors import ConfigError
from vua.vllm import CONNECTOR, register
from vua.vllm.support import announce, arrange, check_version, door_of, why_tier
from vua.vllm.tier import VUATier  # the class that the configuration names

pytestmark = pytest.mark.vllm

GIB = 1 << 30


@contextmanager
def memory(free: int = 100 * GIB, machine: int = 1000 * GIB) -> Iterator[None]:
    """Let the machine have so much memory, of which /dev/shm has so much free."""
    usage = mock.patch("shutil.disk_usage", return_value=SimpleNamespace(free=free))
    with usage, mock.patch("vua.vllm.support.machine_memory_nbytes", return_value=machine):
        yield


@contextmanager
def both(*changes: Given) -> Iterator[None]:
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield


class DoorsTest(ConfigTest):
    @classmethod
    def setUpClass(cls) -> None:
        for name in ("vua.vllm.kv_connector_v1", "vua.vllm.offloading"):
            importlib.import_module(name)  # on the platform that this is
        super().setUpClass()

    def door(self, *changes: Given, platform: str = "cuda", **variables: str) -> tuple[str, str]:
        """The door of the engine with these changes, and why."""
        with ExitStack() as stack:
            stack.enter_context(on(platform))
            stack.enter_context(memory())
            stack.enter_context(mock.patch.dict(os.environ, variables))
            for change in changes:
                stack.enter_context(change)
            return door_of(self.made)

    def of_class(self, name: str) -> Given:
        """The model's class says this of itself."""
        return mock.patch.object(type(self.made.model_config), name, new=True)

    def odd(self) -> dict[str, Given]:
        """What the connector would refuse, or was not measured with, by what is said of it."""
        text = self.made.model_config.hf_text_config
        kinds = ["full_attention", "sliding_attention"]
        several = both(
            self.given("parallel_config", pipeline_parallel_size=2),
            mock.patch.object(text, "layer_types", kinds, create=True),
        )
        return {
            "vLLM 9.1.0 is new": mock.patch("vllm.__version__", "9.1.0"),
            "context parallelism": self.given("parallel_config", decode_context_parallel_size=2),
            "sleep mode": self.given("model_config", enable_sleep_mode=True),
            "layers with states": self.of_class("is_hybrid"),
            "a draft's layers": self.given("", speculative_config=SimpleNamespace(method="mtp")),
            "an indexer": mock.patch.object(text, "index_topk", 8, create=True),
            "compressed latents": mock.patch.object(text, "compress_ratios", [4], create=True),
            "heads that differ": mock.patch.object(text, "swa_head_dim", 64, create=True),
            "attention within chunks": self.given("model_config", attention_chunk_size=64),
            "a cache of fp8": self.given("cache_config", cache_dtype="fp8"),
            "pipeline parallelism with several kinds of layers": several,
        }

    def test_rule(self) -> None:
        """Dense and windows go through the connector, the rest through the tier."""
        self.assertEqual("connector", self.door()[0])
        window = mock.patch.object(
            self.made.model_config.hf_text_config, "layer_types", ["sliding_attention"], create=True
        )
        self.assertEqual("connector", self.door(window)[0])
        for why, change in self.odd().items():
            with self.subTest(why):
                self.assertEqual(("tier", why), self.door(change))
                if "is new" not in why:
                    self.assertEqual(("tier", why), self.door(self.odd()[why], platform="cpu"))
        refuses = [*self.odd()][1:7]
        for why, change in self.odd().items():  # and the connector refuses it, or was not measured
            with self.subTest(why), on("cuda"), change:
                self.assertEqual(why if why in refuses else "", why_tier(self.made, alone=True))
        self.assertLessEqual({one.why_tier for one in ROWS}, {"", *self.odd()})  # docs/models.md
        for device in ("rocm", "xpu"):
            self.assertEqual(("tier", "this device"), self.door(platform=device))

    def test_gemma4(self) -> None:
        """Heads that differ, by transformers' own configuration."""
        from transformers import Gemma4TextConfig

        gemma = self.given("model_config", hf_text_config=Gemma4TextConfig())
        self.assertEqual(("tier", "heads that differ"), self.door(gemma))

    def test_no_tier(self) -> None:
        """Where vLLM's offloading cannot be, the connector takes all, and it is said."""
        states, without = (
            "layers with states",
            self.given("cache_config", enable_prefix_caching=False),
        )
        door, why = self.door(self.odd()[states], without)
        self.assertEqual("connector", door)
        self.assertIn("needs --enable-prefix-caching", why)
        new = self.odd()["vLLM 9.1.0 is new"]
        said = "vLLM 9.1.0 is new, but a tier on CPUs needs vLLM 0.33 or older"
        self.assertEqual(("connector", said), self.door(new, platform="cpu"))
        sleep = self.odd()["sleep mode"]
        door, why = self.door(sleep, memory(free=64 << 20))
        self.assertEqual("connector", door)
        self.assertIn("57 MiB of /dev/shm are too little", why)
        nodes = self.given("parallel_config", nnodes=2)
        self.assertEqual("connector", self.door(self.odd()["sleep mode"], nodes)[0])

    def test_named(self) -> None:
        """VUA_DOOR names it; one that cannot be is refused, in words."""
        sleep = self.odd()["sleep mode"]
        self.assertEqual("connector", self.door(sleep, VUA_DOOR="connector")[0])
        self.assertEqual("tier", self.door(VUA_DOOR="tier")[0])
        offloads = {"kv_offloading_size": 4.0}
        for platform, door, values, words in (
            ("cuda", "window", {}, "must be one of connector, tier, beside, found 'window'"),
            ("cuda", "connector", offloads, "leave out --kv-offloading-size"),
        ):
            with self.subTest(door), self.assertRaisesRegex(ConfigError, words):
                changes = self.given("cache_config", **values) if values else ExitStack()
                self.door(changes, platform=platform, VUA_DOOR=door)

    def arranged(self, transfer: Any = None, platform: str = "cuda", **values: Any) -> Any:
        """The configuration with VUA_PATH, as the engine gets it."""
        made = copy.copy(self.made)
        made.kv_transfer_config, made.cache_config = transfer, copy.copy(made.cache_config)
        for name, value in values.items():
            setattr(made.cache_config, name, value)
        path = {"VUA_PATH": str(self.root / "kv")}
        with on(platform), memory(), mock.patch.dict(os.environ, path):
            arrange(made)
        return made

    def test_tier(self) -> None:
        """It gets the directory, the user's settings, and the memory that he or the machine has."""
        for values, size in (
            ({"cache_dtype": "fp8"}, 32 * GIB),
            ({"kv_offloading_size": 2.5}, 5 * GIB // 2),
        ):
            own = {"limits": {"max_bytes": "1G"}}
            given = KVTransferConfig("VUA", kv_role="kv_consumer", kv_connector_extra_config=own)
            made = self.arranged(given, **values)
            self.assertIsNone(made.cache_config.kv_offloading_size)
            found = made.kv_transfer_config
            self.assertEqual("VUAOffloadingConnector", found.kv_connector)
            self.assertEqual("kv_consumer", found.kv_role)
            extra = found.kv_connector_extra_config
            self.assertEqual(size, extra["cpu_bytes_to_use"])
            (tier,) = extra["secondary_tiers"]
            named = {"type": VUATier.__name__, "module_path": VUATier.__module__}
            self.assertEqual(named | own | {"path": str(self.root / "kv")}, tier)
            self.assertEqual(own, given.kv_connector_extra_config)

    def test_connector(self) -> None:
        """It gets the directory; a damaged file costs no request."""
        found = self.arranged().kv_transfer_config
        self.assertEqual("VUAStorageConnector_V1", found.kv_connector)
        self.assertEqual("recompute", found.kv_load_failure_policy)
        path = {"shared_storage_path": str(self.root / "kv")}
        self.assertEqual(path, found.kv_connector_extra_config)

    def test_names(self) -> None:
        """A user's configuration, or a MultiConnector's, needs no module path."""
        register()
        own, tier = "VUAStorageConnector_V1", "VUAOffloadingConnector"
        for name, expected in (("VUA", own), (own, own), (tier, tier)):
            given = KVTransferConfig(name, kv_role="kv_both")
            self.assertEqual(expected, KVConnectorFactory.get_connector_class(given).__name__)

    def test_beside_offloading(self) -> None:
        """An engine whose own offloading would take the place of the VUA that it names is refused.

        Named VUA it is not, see `test_tier`.
        """
        register()
        below = {"connectors": [{"kv_connector": CONNECTOR}]}
        for name, extra in ((CONNECTOR, {}), ("MultiConnector", below)):
            made: Any = SimpleNamespace(cache_config=SimpleNamespace(kv_offloading_size=4.0))
            made.kv_transfer_config = SimpleNamespace(
                kv_connector=name, kv_connector_extra_config=extra
            )
            words = self.assertRaisesRegex(ConfigError, "leave out --kv-offloading-size")
            with self.subTest(name), words:
                VllmConfig.__post_init__(made)

    def test_no_error_ends_a_start(self) -> None:
        """Whatever raises is one line; the user's own offloading stays."""
        names = ("prepare", "check_starts", "door_of", "KVConnectorFactory.get_connector_class")
        for name in names:
            broken = mock.patch(f"vua.vllm.support.{name}", side_effect=RuntimeError(name))
            with self.subTest(name), broken, self.assertLogs("vllm.vua", "WARNING") as logged:
                made = self.arranged(kv_offloading_size=2.0)
            self.assertIsNone(made.kv_transfer_config)
            self.assertEqual(2.0, made.cache_config.kv_offloading_size)
            self.assertEqual(1, len(logged.output))
            self.assertIn(f"served without VUA: RuntimeError('{name}')", logged.output[0])


class VersionsTest(unittest.TestCase):
    def test_versions(self) -> None:
        """An older one is refused, with what works; of a newer one it is said that none ran it."""
        for version, refused, new in (
            ("0.31.2", True, False),
            ("0.32.0+cpu", False, False),
            ("0.33.1rc2.dev5+g1234", False, False),
            ("0.34.0", False, True),
            ("mine", False, False),
        ):
            with (
                self.subTest(version),
                mock.patch("vllm.__version__", version),
                mock.patch("vua.vllm.support.warn_once", WarnOnce(logger())),
                self.assertLogs("vllm.vua", "INFO") as logged,
            ):
                words = rf"{version} is not supported.* works with 0\.32 to 0\.33\. Install"
                refuses = self.assertRaisesRegex(ConfigError, words)
                with refuses if refused else ExitStack():
                    check_version()
                announce(None)
            self.assertEqual(new, any("never run with" in line for line in logged.output))
