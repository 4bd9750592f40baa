from __future__ import annotations

import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from commands import run
from vua.connector.config import ConnectorConfig
from vua.vllm.serve import with_connector

ODD = "/mnt/a b[1]*?~ \\n'\"$HOME`id`;&|<>(){}/é"
SHELLS = ("bash", "sh")
ANY_USER = 65534


def split(shell: str, printed: str) -> list[str]:
    """What a program gets whose arguments are `$(vua args ...)`."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(printed)
        file.flush()
        show = f'for one in $(cat {file.name}); do printf "%s\\0" "$one"; done'
        made = subprocess.run([shell, "-c", show], capture_output=True, check=True, cwd="/")
    return made.stdout.decode().split("\0")[:-1]


def values(words: list[str], option: str) -> dict[str, Any]:
    """The JSON object that an option is given."""
    found: dict[str, Any] = json.loads(words[words.index(option) + 1])
    return found


class ArgsTest(unittest.TestCase):
    def words(self, *asked: str) -> list[str]:
        """The words that are printed, as every shell splits them; they are those of --json."""
        code, printed, _ = run("args", *asked)
        self.assertEqual(0, code)
        _, text, _ = run("args", *asked, "--json")
        words: list[str] = json.loads(text)["arguments"]
        for shell in SHELLS:
            self.assertEqual(words, split(shell, printed), shell)
        return words

    def test_vllm(self) -> None:
        """The connector's settings hold the path, however it is written."""
        for path in ("/mnt/kv", ODD, "s3://bucket/pre fix"):
            words = self.words("vllm", path)
            given = values(words, "--kv-transfer-config")
            by_wrapper = with_connector(["serve", "--vua-path", path])[1:]
            self.assertEqual(values(by_wrapper, "--kv-transfer-config"), given)
            config = ConnectorConfig.from_extra_config(given["kv_connector_extra_config"])
            self.assertEqual(path, config.shared_storage_path)
            self.assertEqual("recompute", given["kv_load_failure_policy"])

    def test_sglang(self) -> None:
        """VUA takes the extra configuration; the page is a chunk."""
        words = self.words("sglang", ODD)
        extra = values(words, "--hicache-storage-backend-extra-config")
        for name in ("backend_name", "module_path", "class_name", "interface_v1"):
            self.assertTrue(extra.pop(name))
        self.assertTrue(extra.pop("hicache_storage_pass_prefix_keys"))
        self.assertEqual(ODD, ConnectorConfig.from_extra_config(extra).shared_storage_path)
        self.assertEqual("64", words[words.index("--page-size") + 1])
        self.assertIn("--enable-hierarchical-cache", words)
        self.assertNotIn("True", words)

    def test_lmcache(self) -> None:
        """The user's word is not given for him."""
        code, _, problem = run("args", "lmcache", "/mnt/kv")
        self.assertEqual(2, code)
        self.assertIn("--plain-engines", problem)
        given = values(self.words("lmcache", ODD, "--plain-engines"), "--l2-adapter")
        self.assertEqual({"path": ODD, "plain_engines": True}, given["adapter_params"])

    def test_docker(self) -> None:
        """It runs as the directory's owner, who can write to the state's directory."""
        with tempfile.TemporaryDirectory(prefix="kv") as name, mock.patch.dict(os.environ):
            os.environ["HOME"] = f"{name}/home"
            owner = Path(name).stat()
            words = self.words("docker", name)
            state = Path(name, "home", ".cache", "vua-docker")
            self.assertIn(f"{state}:/state", words)
            self.assertEqual((owner.st_uid, 0o40700), (state.stat().st_uid, state.stat().st_mode))
            self.assertIn(f"{name}:/kv", words)
            self.assertEqual(f"{owner.st_uid}:{owner.st_gid}", words[words.index("--user") + 1])
            missing, odd = f"{name}/no", Path(name, "a b")
            odd.mkdir()
            for path, said in ((missing, f"mkdir -p -m 700 {missing}"), (str(odd), "spaces")):
                code, _, problem = run("args", "docker", path)
                self.assertEqual(2, code)
                self.assertIn(said, problem)
            os.environ.pop("HOME")
            with mock.patch("pwd.getpwuid", side_effect=KeyError):
                code, _, problem = run("args", "docker", name)
            self.assertEqual(2, code)
            self.assertIn("set HOME", problem)

    def test_relative(self) -> None:
        """An engine may start elsewhere: the path is absolute."""
        given = values(self.words("vllm", "kv"), "--kv-transfer-config")
        path = given["kv_connector_extra_config"]["shared_storage_path"]
        self.assertEqual(str(Path("kv").absolute()), path)
