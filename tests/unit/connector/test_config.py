"""The settings of the vLLM connector; no engine is needed to read them."""

from __future__ import annotations

import unittest
from unittest import mock

from vua.connector.config import ConnectorConfig
from vua.errors import ConfigError


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
        config = parse(chunk_tokens=256, epoch="b", durable=True, lookup_timeout_s=2)

        self.assertEqual((256, "b", True), (config.chunk_tokens, config.epoch, config.durable))
        self.assertEqual(2, config.lookup_timeout_s)

    def test_security(self) -> None:
        """Whose files are read, and the keys, arrive as they were given; nonsense is refused."""
        given = {"trusted_uids": [7], "group_read": True, "key_file": "/k", "encrypt": True}
        security = parse(**given, tenant_keys="/keys").security

        self.assertEqual(
            ([7], True, "/k", True, "/keys"),
            (security.trusted_uids, security.group_read, security.key_file, security.encrypt,
             security.tenant_keys),
        )  # fmt: skip
        self.assertIsNone(parse(trusted_uids="any").security.uids)
        for wrong in ({"trusted_uids": 7}, {"trusted_uids": "all"}, {"trusted_uids": ["7"]},
                      {"encrypt": True}, {"key_file": 1}, {"group_read": 1}):  # fmt: skip
            with self.subTest(wrong):
                self.refused({"shared_storage_path": "/kv", **wrong})

    def test_old_names(self) -> None:
        """The names of VUA's first version mean the same settings."""
        config = ConnectorConfig.from_extra_config({"path": "/kv", "split_factor": 32})

        self.assertEqual(("/kv", 32), (config.shared_storage_path, config.chunk_tokens))

    def test_unknown_key(self) -> None:
        """A key that does not exist is refused with the nearest one that does."""
        for wrong, near in (
            ("chunk_token", "chunk_tokens"),
            ("shared_path", "shared_storage_path"),
            ("fsync_durable", "durable"),
            ("Epoch", "epoch"),
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
            ("shared_storage_path", 5),
            ("shared_storage_path", None),
        ):
            with self.subTest(name=name, value=value):
                text = self.refused({"shared_storage_path": "/kv", name: value})

                self.assertIn(f"{name} must be", text)
                self.assertIn(repr(value), text)

    def test_out_of_range(self) -> None:
        """Sizes, numbers of threads and times are positive."""
        for name, value in (
            ("chunk_tokens", 0),
            ("chunk_tokens", -64),
            ("load_threads", 0),
            ("lookup_timeout_s", 0.0),
            ("max_pending_save_mib", -1),
            ("save_threads", 0),
        ):
            with self.subTest(name=name, value=value):
                text = self.refused({"shared_storage_path": "/kv", name: value})

                self.assertIn(f"{name} must be positive", text)

    def test_directory_from_the_environment(self) -> None:
        """VUA_PATH names the directory when the settings do not."""
        with mock.patch.dict("os.environ", {"VUA_PATH": "/from/environment"}):
            self.assertEqual(
                "/from/environment", ConnectorConfig.from_extra_config({}).shared_storage_path
            )
            self.assertEqual("/kv", parse().shared_storage_path)

    def test_no_directory(self) -> None:
        """Without a directory the message says where to name one."""
        with mock.patch.dict("os.environ", {"VUA_PATH": ""}):
            text = self.refused({})

        self.assertIn("shared_storage_path", text)
        self.assertIn("VUA_PATH", text)
