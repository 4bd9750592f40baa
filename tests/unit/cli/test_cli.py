"""Mirrors `vua.cli`: what an operator sees of a directory and does, and what engines are given."""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
import torch

from commands import TOKENS, CliTest, run, run_json, verbs
from helpers import caches_of, flip, read_only, swap
from vua.capacity.lru import touch
from vua.cli import command as cli
from vua.cli import output as text
from vua.cli.command import EXAMPLES, duration_s, lifetime_s
from vua.connector.config import ConnectorConfig
from vua.core import VUA, VUAConfig
from vua.format.identity import Identity, named_by
from vua.vllm.serve import with_connector


class TestLs(CliTest):
    """`vua ls`."""

    def test_engine(self) -> None:
        """Each namespace says whose it is; what is no engine's name is shown as unknown."""
        config: dict[str, Any] = {"model_type": "llama"}
        fields: dict[str, dict[str, Any]] = {
            "vllm": named_by("vllm", config),
            "sglang": named_by("sglang", config),
            "transformers": {"vua_stored_by": "transformers 5.19.0"},
            "llama-cpp-python": {"vua_stored_by": "llama-cpp-python 0.3.16"},
            "lmcache": {"vua_stored_by": "lmcache"},
            "twice": {"vua_stored_by": "\x1b[2J"},
            "number": {"vua.engine": [7]},
            "nested": {"vua.engine": [{"vllm": 1}]},
        }
        cache = caches_of(layers=1, heads=1, tokens=4, dim=8)
        for name, more in fields.items():
            identity = Identity.of_config(
                config | more, kv_dtype="F32", chunk_tokens=4, name=f"of-{name}"
            )
            with VUA(VUAConfig(split_factor=4), self.root, identity=identity) as vua:
                vua.put(TOKENS[:4], cache)
        expected = {name: name if name in [*fields][:5] else None for name in fields}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as tokens:
            json.dump(TOKENS[:4].tolist(), tokens)
            tokens.flush()
            for verb in (["ls"], ["explain", "--tokens", tokens.name]):
                with self.subTest(verb[0]):
                    _, out, _ = run(*verb, self.root)
                    _, report = run_json(*verb, self.root)
                    found = {one["identity"]["name"]: one["engine"] for one in report["namespaces"]}
                    self.assertEqual(expected, {name: found[f"of-{name}"] for name in fields})
                    self.assertEqual(5, len(re.findall(r" of-([\w-]+) +\1\b", out)))
                    self.assertNotIn("\x1b", out)

    def test_model(self) -> None:
        """Namespaces are chosen by a part of their model's name, or by their own."""
        name = self.entries()[0].parents[2].name
        for wanted in ("LLA", name[:8]):
            _, report = run_json("ls", self.root, "--model", wanted)
            self.assertEqual(["llama"], [n["identity"]["name"] for n in report["namespaces"]])
        self.assertEqual([], run_json("ls", self.root, "--model", "mistral")[1]["namespaces"])


class TestVerify(CliTest):
    """`vua verify`."""

    def test_damage(self) -> None:
        """Every kind of damage is reported with its file and reason, and nothing is changed."""
        self.put("damaged", 2)
        first, second, third = self.entries()
        flip(first, 4200)
        swap(second, third)
        elsewhere = self.entries(1)[0]
        elsewhere.rename(elsewhere.with_name("l0-3.h0-1.safetensors"))
        wrong = self.entries(2)[0]
        wrong.rename(wrong.with_name("l0-1.h0-1.safetensors"))
        os.mkfifo(wrong.with_name("l0-2.h0-1.safetensors"))
        wrong.with_name("l0-2.h0-2.safetensors").symlink_to(first)
        before = {path: path.lstat().st_mtime_ns for path in self.root.rglob("*")}
        code, report = run_json("verify", self.root)
        problems = {
            (Path(p["path"]).name, p["outcome"]): p["reason"]
            for one in report["namespaces"]
            for p in one["problems"]
        }

        self.assertEqual((1, False), (code, report["sound"]))
        self.assertIn("checksums do not match", problems["l0-3.h0-2.safetensors", "corrupt"])
        self.assertIn("says chunk", problems["l0-3.h0-2.safetensors", "foreign"])
        self.assertIn("says shard", problems["l0-3.h0-1.safetensors", "foreign"])
        self.assertIn("says shard", problems["l0-1.h0-1.safetensors", "foreign"])
        self.assertIn("not a regular file", problems["l0-2.h0-1.safetensors", "error"])
        self.assertIn("not a regular file", problems["l0-2.h0-2.safetensors", "error"])
        counts = {
            k: sum(n[k] for n in report["namespaces"]) for k in ("sound", "corrupt", "foreign")
        }
        self.assertEqual({"sound": 1, "corrupt": 1, "foreign": 4}, counts)
        code, out, _ = run("verify", self.root)
        self.assertEqual(1, code)
        self.assertIn(f"corrupt: {first}: ", out)
        self.assertEqual(before, {path: path.lstat().st_mtime_ns for path in self.root.rglob("*")})

    def test_goes_on(self) -> None:
        """A file with further names is sound; what cannot be read does not end the look."""
        self.put("mistral", 2)
        linked = self.entries()[0]
        os.link(linked, self.root.parent / f"{self.root.name}-link")
        self.addCleanup(os.unlink, self.root.parent / f"{self.root.name}-link")
        damaged = self.entries()[2]
        flip(damaged, 4200)
        pipe, loop = self.entries(2)
        for path in (pipe, loop):
            path.unlink()
        os.mkfifo(pipe)
        loop.symlink_to(loop)
        (linked.parents[2] / "loop").symlink_to(linked.parents[2])
        code, report = run_json("verify", self.root)
        by_chunks = {sum(one[k] for k in ("sound", "corrupt", "foreign", "error")): one
                     for one in report["namespaces"]}  # fmt: skip

        self.assertEqual((1, [1, 2, 3]), (code, sorted(by_chunks)))
        self.assertEqual([1, 0, 2], [by_chunks[n]["sound"] for n in (1, 2, 3)])
        two, three = by_chunks[2]["problems"], by_chunks[3]["problems"]
        self.assertEqual(["corrupt"], [one["outcome"] for one in three])
        self.assertEqual(["not a regular file"] * 2, [one["reason"] for one in two])
        self.assertEqual(0, run("verify", "--repair", self.root)[0])
        self.assertTrue(linked.exists())  # somebody else's name for the same bytes
        self.assertEqual([False] * 3, [os.path.lexists(p) for p in (damaged, pipe, loop)])

    def test_namespace_that_cannot_be_opened(self) -> None:
        """It is reported, and the next one is looked at."""
        closed = self.entries()[0].parents[2]
        with read_only(self.root):
            if os.getuid() == 0:
                os.seteuid(0)
            closed.chmod(0)
            if os.getuid() == 0:
                os.seteuid(65534)
            code, report = run_json("verify", self.root)

        self.assertEqual(1, code)
        counts = {one["namespace"]: one for one in report["namespaces"]}
        problem = counts.pop(closed.name)["problems"][0]
        self.assertEqual((".", "error", "Permission denied"), tuple(problem.values()))
        self.assertEqual([1], [one["sound"] for one in counts.values()])

    def test_every_byte(self) -> None:
        """No flipped bit of a file escapes."""
        path = self.entries(1)[0]
        sound = path.read_bytes()
        for at in [*range(0, len(sound), 113), *range(300, 700, 7), len(sound) - 1]:
            flip(path, at, 1 << at % 8)
            self.assertEqual(1, run("verify", self.root)[0], at)
            path.write_bytes(sound)
        self.assertEqual(0, run("verify", self.root)[0])

    def test_large_file(self) -> None:
        """Files much larger than the buffer are checked to the last byte."""
        with VUA(VUAConfig(split_factor=256, model="large"), self.root) as vua:
            cache = caches_of(layers=4, heads=3, tokens=256, dim=512)
            vua.put(torch.arange(256), cache)
        large = max(self.files(), key=lambda path: path.stat().st_size)
        self.assertGreater(large.stat().st_size, 12 << 20)
        self.assertEqual(0, run("verify", self.root)[0])
        flip(large, large.stat().st_size - 1)
        code, out, _ = run("verify", self.root)

        self.assertEqual(1, code)
        self.assertIn("1 of 24 checksums do not match, the first is that of V, head 2, layers", out)

    def test_description(self) -> None:
        """A description that is damaged or missing is reported."""
        description = self.entries()[0].parents[2] / "namespace.json"
        sound = description.read_bytes()
        description.write_bytes(sound[:-20])
        code, out, _ = run("verify", self.root)
        self.assertEqual(1, code)
        self.assertIn(f"corrupt: {description}: it does not describe", out)
        description.unlink()
        code, out, _ = run("verify", self.root)
        self.assertEqual(1, code)
        self.assertIn(f"error: {description}: missing", out)
        description.write_bytes(sound.replace(b'"layers": 3', b'"layers": 4'))
        code, report = run_json("verify", self.root)

        self.assertEqual(1, code)
        self.assertEqual(0, max(one["foreign"] for one in report["namespaces"]))
        (problem,) = (one for each in report["namespaces"] for one in each["problems"])
        self.assertEqual(("namespace.json", "corrupt"), (problem["path"], problem["outcome"]))

    def test_leftovers(self) -> None:
        """Temporary files, quarantined ones and strangers are reported, and are no damage."""
        path = self.entries()[0]
        path.with_name(".tmp-host-1").write_bytes(b"half")
        (path.parents[2] / ".tmp-x").write_bytes(b"")
        quarantine = path.parents[2] / "quarantine"
        quarantine.mkdir()
        (quarantine / "kept").write_bytes(b"damaged")
        (path.parents[2] / "notes.txt").write_text("mine")
        path.with_name("l0-3.h0-2.bak").write_text("mine")
        (self.root / "README").write_text("mine")
        code, out, _ = run("verify", self.root)

        self.assertEqual(0, code)
        for words in ("2 temporary files, 4 B", "1 damaged file kept in quarantine, 7 B",
                      "notes.txt", "l0-3.h0-2.bak", "README"):  # fmt: skip
            self.assertIn(words, out)
        _, report = run_json("verify", self.root)
        one = next(n for n in report["namespaces"] if n["temporary"])
        self.assertEqual(
            (2, 1, 2), tuple(len(one[k]) for k in ("temporary", "quarantined", "stray"))
        )
        self.assertEqual(["README"], report["stray"])

    def test_live(self) -> None:
        """While others put and delete, what vanishes is no damage."""
        stop = threading.Event()

        def disturb() -> None:
            while not stop.is_set():
                self.put("llama", 3)
                for path in self.root.glob("*/??/*"):
                    shutil.rmtree(path, ignore_errors=True)

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            codes = {run("verify", self.root)[0] for _ in range(60)}
            codes |= {run("ls", "-l", self.root)[0] for _ in range(60)}
        finally:
            stop.set()
            thread.join()

        self.assertEqual({0}, codes)


class TestSample(CliTest):
    """A part is read of what is too much to read it all."""

    def test_sample(self) -> None:
        """One fan-out directory at least, all of its files, and damage in it is found."""
        _, whole = run_json("verify", self.root)
        code, part = run_json("verify", self.root, "--sample", "1%")
        for one, all_of_it in zip(part["namespaces"], whole["namespaces"], strict=True):
            self.assertEqual(min(1, all_of_it["sound"]), one["sound"])
        self.assertEqual((0, 0.01, 1.0), (code, part["share"], whole["share"]))
        for path in self.entries():
            flip(path, 4200)
        self.assertEqual(1, run("verify", self.root, "--sample", "1%")[0])
        self.assertIn("a random 1.0% of the chunks", run("verify", self.root, "--sample", "1%")[1])
        self.assertEqual(
            whole["namespaces"][0]["nbytes"],
            run_json("verify", self.root, "--sample", "100%")[1]["namespaces"][0]["nbytes"],
        )
        for words in ("0%", "101%", "x%", "10"):
            code, _, err = run("verify", self.root, "--sample", words)
            self.assertEqual(2, code)
            self.assertIn("is not a share; give a percentage like 10%", err)

    def test_sort(self) -> None:
        """The largest namespace comes first, or the one that was written last."""
        self.put("late", 1)
        names = {
            sort: [
                one["identity"]["model"]
                for one in run_json("ls", self.root, "--sort", sort)[1]["namespaces"]
            ]
            for sort in ("name", "size", "newest")
        }
        self.assertEqual(sorted(names["name"]), sorted(names["size"]))
        self.assertEqual("llama", names["size"][0])
        self.assertEqual("late", names["newest"][0])


class TestCommand(CliTest):
    """The command itself."""

    def test_help(self) -> None:
        """`vua help` says what `--help` does, of all commands or of one."""
        self.assertEqual(run("--help"), run("help"))
        for words in (["gc"], ["gc", "--quick"], ["ls", "a", "b"]):
            self.assertEqual(run(words[0], "--help"), run("help", *words))
        self.assertEqual(run("--help"), run("help", "help"))

    def test_examples(self) -> None:
        """Each command's help ends with lines that it takes."""
        self.assertEqual(verbs(), EXAMPLES.keys())
        for name, lines in EXAMPLES.items():
            shown = run(name, "--help")[1]
            for line in lines:
                with self.subTest(line):
                    self.assertIn(f"\n  {line}\n", shown)
                    self.assertLessEqual(len(line), 78)
                    words = shlex.split(line[line.index("vua ") :].rstrip(')"'))
                    with cli.vua.make_context("vua", words[1:]) as context:
                        found, command, more = cli.vua.resolve_command(context, words[1:])
                        assert command is not None
                        command.make_context(found, more, parent=context)

    def loaded(self, *words: str) -> set[str]:
        """The modules that a command imports in a process of its own."""
        script = (
            "import sys; from vua.cli import main; main(sys.argv[1:]); print(); print(*sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, *words], capture_output=True, text=True, check=True
        )
        return set(done.stdout.splitlines()[-1].split())

    def test_light(self) -> None:
        """The command needs no torch and no engine; `ls` of a directory no numpy, and help less."""
        heavy = {
            "torch", "safetensors", "vllm", "transformers", "obstore", "ssl", "multiprocessing",
            "http.client", "rich", "difflib", "numpy", "sqlite3", "shutil", "vua.native",
            "vua.storage.local", "vua.store.store",
        }  # fmt: skip
        loaded = self.loaded("ls", str(self.root))
        self.assertIn("vua.catalog.contents", loaded)
        self.assertEqual(set(), heavy & loaded)
        heavy |= {"json", "logging", "vua.storage.location", "vua.catalog.contents"}
        for words in (["--help"], ["help"]):
            self.assertEqual(set(), (heavy - {"shutil"}) & self.loaded(*words))

    def test_closed_pipe(self) -> None:
        """When nobody reads on, it stops without a word."""
        command = f"{sys.executable} -m vua ls -l {self.root} | true"
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=300, check=True
        )

        self.assertEqual("", done.stderr)

    def test_doctests(self) -> None:
        """The examples in the docstrings are true."""
        self.assertEqual(0, doctest.testmod(text).failed)


class DurationTest(unittest.TestCase):
    def test_units(self) -> None:
        """Seconds, or a number with a unit; anything else is refused."""
        for said, seconds in (("90", 90), ("90s", 90), ("1.5h", 5400), ("2D", 172800)):
            self.assertEqual(seconds, duration_s(said))
        for said in ("", "d", "1y", "1 d x", "-1s", "nan"):
            with self.subTest(text=said), self.assertRaises(click.BadParameter):
                duration_s(said)

    def test_lifetimes(self) -> None:
        """What deletes by age takes no number without a unit."""
        self.assertEqual([86400, 0, 30], [lifetime_s(said) for said in ("1d", "0", "30s")])
        with self.assertRaisesRegex(click.BadParameter, "30s, 30m, 30h or 30d"):
            lifetime_s("30")


class TestTop(CliTest):
    """`vua top`."""

    def test_what_goes_on(self) -> None:
        """Chunks that are stored, used and deleted while it looks are counted, by namespace."""
        with mock.patch("time.sleep", side_effect=self.traffic):
            code, report = run_json("top", self.root, "--once")
        rows = {row["model"]: row for row in report["namespaces"]}
        seconds = report["seconds"]

        self.assertEqual(0, code)
        self.assertEqual(5, report["chunks"])
        counts = {
            model: [round(row[k] * seconds) for k in ("new_per_s", "used_per_s", "gone_per_s")]
            for model, row in rows.items()
        }
        self.assertEqual({"llama": [0, 2, 1], "qwen": [2, 1, 0]}, counts)
        self.assertEqual({"60": 3, "3600": 3, "86400": 3}, rows["qwen"]["used_within"])
        self.assertEqual({"-": 1}, rows["qwen"]["salts"])

    def test_last_use_long_ago(self) -> None:
        """How long ago chunks were used counts from now, not from the newest of them."""
        for path in self.files():
            os.utime(path.parent, (0, time.time() - 40 * 86400))
        report = run_json("top", self.root, "--once", "--interval", "0.01")[1]
        nowhere = {"60": 0, "3600": 0, "86400": 0}
        self.assertEqual([nowhere] * 2, [row["used_within"] for row in report["namespaces"]])

    def traffic(self, _: float) -> None:
        """Use and lose chunks of one model, store some of the other."""
        entries = self.entries()
        namespace = entries[0].parents[2]
        order = sorted(entries, key=lambda path: -path.parent.stat().st_mtime_ns)
        fd = os.open(namespace, os.O_RDONLY)
        touch(fd, [path.parent.name for path in order[:2]])
        os.close(fd)
        order[2].unlink()
        order[2].parent.rmdir()
        with VUA(VUAConfig(split_factor=4, model="qwen"), self.root) as vua:
            cache = caches_of(layers=3, heads=2, tokens=12, dim=8, dtype=torch.bfloat16)
            vua.put(TOKENS[:12], cache)


class TestRepair(CliTest):
    """`vua verify --repair`."""

    def test_damage_goes(self) -> None:
        """What is damaged is taken out of sight, the rest is not touched; the next save heals."""
        entries = self.entries()
        sound = {path: path.read_bytes() for path in entries}
        flip(entries[0], 4100)
        entries[1].unlink()
        entries[1].symlink_to("/etc/passwd")
        self.assertEqual(1, run("verify", self.root)[0])
        self.assertTrue(entries[0].exists())
        code, report = run_json("verify", self.root, "--repair")
        (one,) = [row for row in report["namespaces"] if row["model"] == "llama"]
        self.assertEqual((0, 2, 2), (code, one["removed"], len(one["problems"])))
        self.assertEqual([False, False, True], [os.path.lexists(path) for path in entries])
        self.assertEqual(sound[entries[2]], entries[2].read_bytes())
        self.assertEqual(0, run("verify", self.root)[0])
        self.put("llama", 3)
        healed = [path.read_bytes()[4096:] == sound[path][4096:] for path in entries]
        self.assertEqual([True] * 3, healed)

    def test_what_stays(self) -> None:
        """What cannot be mended so is told, and is still damage."""
        namespace = self.entries()[0].parents[2]
        (namespace / "namespace.json").write_text("{")
        code, out, _ = run("verify", self.root, "--repair")
        self.assertEqual(1, code)
        self.assertIn("next save writes it anew", out)


LARGE = """
    import sys
    from vua.capacity import spaces
    from vua.cli import main
    spaces._LARGE = 0
    sys.exit(main(sys.argv[1:]))
"""


class TestSpread(CliTest):
    """A large namespace is looked at by several processes."""

    @pytest.mark.thorough
    def test_same_answers(self) -> None:
        """They say what one process says, damage included."""
        flip(self.entries()[0], 4100)
        for command in (["du", "--exact"], ["ls", "--long"], ["verify"], ["gc", "--quick"], ["gc"]):
            arguments = [command[0], str(self.root), *command[1:]]
            code, alone = run_json(*arguments)
            script = [sys.executable, "-c", textwrap.dedent(LARGE), *arguments, "--json"]
            done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=300)
            self.assertEqual((code, ""), (done.returncode, done.stderr))
            self.assertEqual(self.steady(alone), self.steady(json.loads(done.stdout)))

    @staticmethod
    def steady(report: dict[str, object]) -> dict[str, object]:
        """What does not change from one look to the next."""
        return {name: report[name] for name in report if name not in ("seconds", "free_nbytes")}


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
