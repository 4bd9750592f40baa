"""The settings of the connector, and the form of an engine's own settings."""

from __future__ import annotations

import enum
import json
import unittest
from dataclasses import fields, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from vua.connector.cache_spec import UncachedError
from vua.connector.config import ConnectorConfig
from vua.connector.setup import setting_form
from vua.errors import ConfigError
from vua.sglang.session import settings_of


def parse(**extra: object) -> ConnectorConfig:
    return ConnectorConfig.from_extra_config({"shared_storage_path": "/kv", **extra})


class ConnectorConfigTest(unittest.TestCase):
    def refused(self, extra: dict[str, object]) -> str:
        with self.assertRaises(ConfigError) as caught:
            ConnectorConfig.from_extra_config(extra)
        return str(caught.exception)

    def test_security(self) -> None:
        """Whose files are read, and the keys, arrive as they were given; nonsense is refused."""
        given = {"trusted_uids": [7], "group_read": True, "key_file": "/k", "encrypt": True}
        security = parse(security={**given, "tenant_keys": "/keys"}).security

        self.assertEqual(
            ((7,), True, "/k", True, "/keys"),
            (security.trusted_uids, security.group_read, security.key_file, security.encrypt,
             security.tenant_keys),
        )  # fmt: skip
        self.assertIsNone(parse(security={"trusted_uids": "any"}).security.uids)
        for wrong in ({"trusted_uids": 7}, {"trusted_uids": "all"}, {"trusted_uids": ["7"]},
                      {"trusted_uids": None},
                      {"encrypt": True}, {"key_file": 1}, {"group_read": 1}):  # fmt: skip
            with self.subTest(wrong):
                self.refused({"shared_storage_path": "/kv", "security": wrong})

    def test_few(self) -> None:
        """There are fifteen settings, groups included."""
        self.assertEqual(15, len(fields(ConnectorConfig)))

    def test_wrong_types(self) -> None:
        """A value of another type is refused by name, a bool for a number too."""
        for name, value in (
            ("chunk_tokens", "64"),
            ("chunk_tokens", 64.0),
            ("chunk_tokens", True),
            ("durable", 1),
            ("durable", "yes"),
            ("epoch", 3),
            ("load_policy", True),
            ("allow", "pins"),
            ("allow", ["pin"]),
            ("shared_storage_path", 5),
            ("shared_storage_path", None),
        ):
            with self.subTest(name=name, value=value):
                text = self.refused({"shared_storage_path": "/kv", name: value})

                self.assertIn(f"{name} must be", text)
                self.assertIn(repr(value[0] if isinstance(value, list) else value), text)

    def test_out_of_range(self) -> None:
        """Sizes, numbers of threads and times are positive."""
        for name, value in (
            ("chunk_tokens", 0),
            ("chunk_tokens", -64),
            ("load_policy", 0),
        ):
            with self.subTest(name=name, value=value):
                text = self.refused({"shared_storage_path": "/kv", name: value})

                self.assertIn(f"{name} must be positive", text)

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
            ("timeouts", {"lookup_s": "1"}, "timeouts.lookup_s must be float, found '1'"),
            ("timeouts", {"lookup_s": True}, "timeouts.lookup_s must be float, found True"),
            ("worker", {"load_threads": 0}, "worker.load_threads must be positive"),
            ("limits", 5, "limits must be a group of settings, found 5"),
            ("limits", {"max_bytes_per_salt": 1}, "no key 'limits.max_bytes_per_salt'"),
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


class Struct(SimpleNamespace):
    """As msgspec's, which name their fields."""

    __struct_fields__ = ("weight",)


class SettingFormTest(unittest.TestCase):
    def test_lasting_forms(self) -> None:
        """Sets, enums, classes, dtypes, paths and kinds with fields have a form that lasts."""
        colour = enum.Enum("colour", ["RED", "BLUE"])
        spec = make_dataclass("Spec", [("weight", object)])
        values = [
            {"b", "a"}, {"a"}, colour.RED, colour.BLUE, int, str, torch.float16, Path("a"),
            [1, 2.5], {1: "x"}, spec("fp8"), spec("int8"), spec([1]), Struct(weight="fp8"),
            Struct(weight=spec("fp8")), True, 1, float("nan"), float("inf"), None,
        ]  # fmt: skip
        seen = [json.dumps(setting_form(value, "new"), sort_keys=True) for value in values]
        self.assertEqual(len(values), len(set(seen)))

    def test_equal_values(self) -> None:
        """What an engine takes for equal has one form, at any depth."""
        for one, other in (
            ({"a", "b", "c"}, frozenset(("c", "b", "a"))),
            ([1.0, {"n": 2}], (1, {"n": 2.0})),
            ({1: "x"}, {"1": "x"}),
            (Path("a/b"), "a/b"),
        ):
            with self.subTest(one):
                self.assertEqual(setting_form([one], "new"), setting_form([other], "new"))

    def test_no_lasting_form(self) -> None:
        """What cannot be told apart is refused, with the setting's name and place."""
        itself: list[Any] = []
        itself.append(itself)
        for value in (object(), lambda: None, {1: 0, "1": 1}, {(1, 2): 0}, SimpleNamespace()):
            with self.subTest(value), self.assertRaisesRegex(UncachedError, r"new\[1\]"):
                setting_form([0, value], "new")
        with self.assertRaises(UncachedError):
            setting_form(itself, "new")
