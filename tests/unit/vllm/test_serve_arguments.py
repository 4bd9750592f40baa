import json
import os
import unittest
from unittest.mock import patch

from vua.errors import ConfigError
from vua.vllm.serve import with_connector


def config_of(arguments: list[str]) -> dict:
    """The --kv-transfer-config that vLLM is given."""
    given = with_connector(arguments)
    return json.loads(given[given.index("--kv-transfer-config") + 1])


class TestWithConnector(unittest.TestCase):
    def setUp(self) -> None:
        kept = patch.dict(os.environ)
        kept.start()
        self.addCleanup(kept.stop)
        os.environ.pop("VUA_PATH", None)

    def test_defaults(self) -> None:
        """The connector, both roles and recomputation are set, other arguments stay."""
        arguments = with_connector(["serve", "m", "--vua-path=/kv", "--port", "1"])

        self.assertEqual(["serve", "m", "--port", "1"], arguments[:4])
        config = config_of(["serve", "m", "--vua-path", "/kv"])
        self.assertEqual("VUA", config["kv_connector"])
        self.assertEqual("kv_both", config["kv_role"])
        self.assertEqual("recompute", config["kv_load_failure_policy"])
        self.assertEqual({"shared_storage_path": "/kv"}, config["kv_connector_extra_config"])

    def test_offloading(self) -> None:
        """The option with which vLLM exchanges VUA for its own connector is refused beside VUA."""
        below = {"connectors": [{"kv_connector": "VUAStorageConnector_V1"}]}
        multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": below}
        other = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {}}
        for option in (["--kv-offloading-size", "4"], ["--kv_offloading_size=4"]):
            own = {"kv_connector": "VUAStorageConnector_V1"}
            for given in (["--kv-transfer-config", json.dumps(one)] for one in (own, multi)):
                with (
                    self.subTest(option=option, given=given),
                    self.assertRaisesRegex(ConfigError, "leave out --kv-offloading-size"),
                ):
                    with_connector(["serve", "m", *option, *given])
            chosen = with_connector(["serve", "m", *option, "--vua-path", "/kv"])
            self.assertEqual(option, chosen[2 : 2 + len(option)])  # of the tier's memory
            own = ["serve", "m", *option, "--kv-transfer-config", json.dumps(other)]
            self.assertEqual(own, with_connector(own))

    def test_user_wins(self) -> None:
        """What the user sets in --kv-transfer-config stays, the rest is filled in."""
        given = {
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"shared_storage_path": "/j", "chunk_tokens": 128},
        }
        for option in ("--kv-transfer-config", "--kv_transfer_config"):
            config = config_of(["serve", "m", option, json.dumps(given)])

            self.assertEqual(given, {key: config[key] for key in given})
            self.assertEqual("VUA", config["kv_connector"])

    def test_directory_from_environment(self) -> None:
        """VUA_PATH names the directory where nothing else does."""
        os.environ["VUA_PATH"] = "/env"

        config = config_of(["serve", "m"])
        self.assertEqual("/env", config["kv_connector_extra_config"]["shared_storage_path"])
        config = config_of(["serve", "m", "--vua-path", "/kv"])
        self.assertEqual("/kv", config["kv_connector_extra_config"]["shared_storage_path"])

    def test_other_connector(self) -> None:
        """Another connector is the user's choice and is left alone."""
        given = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}

        self.assertEqual(
            given, config_of(["serve", "m", "--kv-transfer-config", json.dumps(given)])
        )

    def test_other_commands(self) -> None:
        """Only serve is changed."""
        self.assertEqual(["bench", "serve"], with_connector(["bench", "serve"]))

    def test_refusals(self) -> None:
        """No directory, two directories, bad JSON and unknown settings are refused with words."""
        extra = {"kv_connector_extra_config": {"shared_storage_pth": "/kv"}}
        two = {"kv_connector_extra_config": {"shared_storage_path": "/a"}}
        for arguments, words in (
            (["serve", "m"], "no directory"),
            (["serve", "m", "--vua-path"], "expected one argument"),
            (["serve", "m", "--kv-transfer-config", "{"], "not JSON"),
            (["serve", "m", "--kv-transfer-config", "[]"], "JSON object"),
            (["serve", "m", "--kv-transfer-config.kv_role", "kv_both"], "one JSON object"),
            (["serve", "m", "--kv-transfer-config", json.dumps(extra)], "'shared_storage_path'"),
            (["serve", "m", "--vua-path", "/b", "--kv-transfer-config", json.dumps(two)], "two d"),
        ):
            with self.subTest(arguments), self.assertRaisesRegex(ConfigError, words):
                with_connector(arguments)
