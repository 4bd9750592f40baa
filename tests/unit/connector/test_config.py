"""The settings of the vLLM connector; no engine is needed to read them."""

from __future__ import annotations

import unittest
from dataclasses import fields
from operator import attrgetter
from typing import Any
from unittest import mock

from vua.capacity.limits import Limits
from vua.connector import config as settings
from vua.connector.config import OLD_NAMES, ConnectorConfig
from vua.errors import ConfigError
from vua.sglang.settings import settings_of


def parse(**extra: object) -> ConnectorConfig:
    """The settings with a directory and these."""
    return ConnectorConfig.from_extra_config({"shared_storage_path": "/kv", **extra})


class ConnectorConfigTest(unittest.TestCase):
    def refused(self, extra: dict[str, object]) -> str:
        """The message with which settings are refused."""
        with self.assertRaises(ConfigError) as caught:
            ConnectorConfig.from_extra_config(extra)
        return str(caught.exception)

    def test_defaults(self) -> None:
        """Only the directory must be given; everything else is safe as it is."""
        config = parse()

        self.assertEqual("/kv", config.shared_storage_path)
        self.assertEqual(64, config.chunk_tokens)
        self.assertEqual([False, False, ""], [config.durable, config.strict, config.epoch])

    def test_values_are_taken_over(self) -> None:
        """Each setting arrives as it was given; an int will do where a float is meant."""
        config = parse(chunk_tokens=256, epoch="b", durable=True, timeouts={"lookup_s": 2})

        self.assertEqual((256, "b", True), (config.chunk_tokens, config.epoch, config.durable))
        self.assertEqual(2, config.timeouts.lookup_s)

    def test_security(self) -> None:
        """Whose files are read, and the keys, arrive as they were given; nonsense is refused."""
        given = {"trusted_uids": [7], "group_read": True, "key_file": "/k", "encrypt": True}
        security = parse(security={**given, "tenant_keys": "/keys"}).security

        self.assertEqual(
            ([7], True, "/k", True, "/keys"),
            (security.trusted_uids, security.group_read, security.key_file, security.encrypt,
             security.tenant_keys),
        )  # fmt: skip
        self.assertIsNone(parse(security={"trusted_uids": "any"}).security.uids)
        for wrong in ({"trusted_uids": 7}, {"trusted_uids": "all"}, {"trusted_uids": ["7"]},
                      {"encrypt": True}, {"key_file": 1}, {"group_read": 1}):  # fmt: skip
            with self.subTest(wrong):
                self.refused({"shared_storage_path": "/kv", "security": wrong})

    def test_old_names(self) -> None:
        """Each name of an earlier version sets what it did, with one warning for all of them."""
        old: dict[str, Any] = {
            "path": "/old", "split_factor": 32, "max_bytes": "5G", "min_free_bytes": 7,
            "ttl_s": 60.0, "trusted_uids": [7], "group_read": True, "key_file": "/k",
            "tenant_keys": "/keys", "encrypt": True, "lookup_timeout_s": 3.0, "io_timeout_s": 4,
            "load_threads": 5, "max_pending_save_mib": 6, "load_margin": 2.5,
            "allow_inexact_continuation": True, "allow_pins": True, "allow_untested_vllm": True,
            "save_threads": 9, "direct_reads": False, "direct_writes": True, "load_in_step_mib": 8,
        }  # fmt: skip
        self.assertEqual(set(OLD_NAMES), set(old))
        kept = {name: value for name, value in old.items() if OLD_NAMES[name] is None}
        for name, value in old.items():
            extra = {name: value} | ({"key_file": "/k"} if name == "encrypt" else {})
            if name != "path":
                extra["shared_storage_path"] = "/kv"
            with self.subTest(name), self.assertLogs("vllm.vua", "WARNING") as log:
                settings.warn_once.cache_clear()
                config = ConnectorConfig.from_extra_config(extra)
                new = OLD_NAMES[name]
                self.assertEqual(1, len(log.output))
                if name in kept:
                    self.assertIn(f"{name} (no effect any more)", log.output[0])
                    self.assertEqual(parse(), config)
                elif new == "allow":
                    self.assertEqual((name.removeprefix("allow_"),), config.allow)
                else:
                    self.assertIn(f"{name} ({new})", log.output[0])
                    self.assertEqual(value, attrgetter(str(new))(config))

        with self.assertLogs("vllm.vua", "WARNING") as log:
            settings.warn_once.cache_clear()
            config = ConnectorConfig.from_extra_config(old)
            ConnectorConfig.from_extra_config(old)
        self.assertEqual(1, len(log.output))
        self.assertEqual(("inexact_continuation", "pins", "untested_vllm"), config.allow)
        self.assertEqual(2.5, config.load_margin)

    def test_old_and_new_names(self) -> None:
        """Old names go along with new ones, but not for the same setting."""
        mixed = parse(limits={"ttl_s": 5}, max_bytes="1G", allow=["pins"], allow_untested_vllm=True)
        self.assertEqual(Limits(ttl_s=5, max_bytes="1G"), mixed.limits)
        self.assertEqual(("pins", "untested_vllm"), mixed.allow)
        self.assertEqual((), parse(allow_pins=False).allow)
        self.assertEqual("always", parse(load_policy="always", load_margin=3.0).load_policy)
        text = self.refused(
            {"shared_storage_path": "/kv", "limits": {"max_bytes": 1}, "max_bytes": 2}
        )
        self.assertIn("'limits.max_bytes' twice (as 'max_bytes')", text)
        for wrong in ({"limits": 5}, {"limits": 5, "ttl_s": 6}, {"allow_pins": 1},
                      {"limits": {"max_bytes_per_salt": 1}}):  # fmt: skip
            self.refused({"shared_storage_path": "/kv", **wrong})

    def test_few(self) -> None:
        """There are fifteen settings, groups included."""
        self.assertEqual(15, len(fields(ConnectorConfig)))

    def test_unknown_key(self) -> None:
        """A key that does not exist is refused with the nearest one that does."""
        for wrong, near in (
            ("chunk_token", "chunk_tokens"),
            ("shared_path", "shared_storage_path"),
            ("fsync_durable", "durable"),
            ("Epoch", "epoch"),
            ("timeout", "timeouts"),
        ):
            with self.subTest(wrong):
                text = self.refused({"shared_storage_path": "/kv", wrong: 1})

                self.assertIn(f"no key {wrong!r}; the nearest is {near!r}", text)

    def test_key_given_twice(self) -> None:
        """A setting under its old and its new name at once is refused."""
        text = self.refused({"shared_storage_path": "/kv", "path": "/other"})

        self.assertIn("'shared_storage_path' twice", text)

    def test_wrong_types(self) -> None:
        """A value of another type is refused by name, a bool for a number too."""
        for name, value in (
            ("chunk_tokens", "64"),
            ("chunk_tokens", 64.0),
            ("chunk_tokens", True),
            ("durable", 1),
            ("durable", "yes"),
            ("epoch", 3),
            ("lookup_timeout_s", "1"),
            ("lookup_timeout_s", True),
            ("load_policy", True),
            ("allow", "pins"),
            ("allow", ["pin"]),
            ("shared_storage_path", 5),
            ("shared_storage_path", None),
        ):
            with self.subTest(name=name, value=value):
                text = self.refused({"shared_storage_path": "/kv", name: value})

                self.assertIn(f"{(OLD_NAMES.get(name) or name)} must be", text)
                self.assertIn(repr(value[0] if isinstance(value, list) else value), text)

    def test_out_of_range(self) -> None:
        """Sizes, numbers of threads and times are positive."""
        for name, value in (
            ("chunk_tokens", 0),
            ("chunk_tokens", -64),
            ("load_threads", 0),
            ("lookup_timeout_s", 0.0),
            ("load_policy", 0),
        ):
            with self.subTest(name=name, value=value):
                text = self.refused({"shared_storage_path": "/kv", name: value})

                self.assertIn(f"{OLD_NAMES.get(name) or name} must be positive", text)

    def test_groups(self) -> None:
        """A name that a group does not have is refused with the nearest, and so are bad values."""
        for group, wrong, text in (
            (
                "limits",
                {"max_byte": 1},
                "no key 'limits.max_byte'; the nearest is 'limits.max_bytes'",
            ),
            ("timeouts", {"io": 1}, "the nearest is 'timeouts.io_s'"),
            ("timeouts", {"io_s": 0}, "timeouts.io_s must be positive"),
            ("worker", {"load_threads": 1.5}, "worker.load_threads must be int"),
            ("limits", {"max_bytes": "much"}, "max_bytes: 'much' is not a size"),
        ):
            with self.subTest(group=group, wrong=wrong):
                self.assertIn(text, self.refused({"shared_storage_path": "/kv", group: wrong}))

    def test_directory_from_the_environment(self) -> None:
        """VUA_PATH names the directory when the settings do not."""
        with mock.patch.dict("os.environ", {"VUA_PATH": "/from/environment"}):
            self.assertEqual(
                "/from/environment", ConnectorConfig.from_extra_config({}).shared_storage_path
            )
            self.assertEqual("/kv", parse().shared_storage_path)

    def test_no_directory(self) -> None:
        """Without a directory the message says where to name one, in the engine's own words."""
        with mock.patch.dict("os.environ", {"VUA_PATH": ""}):
            text = self.refused({})

            with self.assertRaises(ConfigError) as caught:
                settings_of({"interface_v1": 1})

        for mine, other, said in (
            ("vua-vllm serve", "sglang", text),
            ("vua args sglang", "vllm", str(caught.exception)),
        ):
            self.assertIn("shared_storage_path", said)
            self.assertIn("VUA_PATH", said)
            self.assertIn(mine, said)
            self.assertNotIn(other, said)
