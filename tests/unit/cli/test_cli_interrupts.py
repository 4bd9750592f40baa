"""Mirrors `vua.cli.command.undoing`: Ctrl-C ends every command quietly, whatever it is doing."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from unittest import mock

import pytest

from commands import COMMANDS, TOKENS, CliTest, filled_in
from helpers import caches_of, until
from vua.core import VUA, VUAConfig

QUIET = """
    import os, signal, sys
    from vua.cli import main
    counts, stop, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    sys.argv = ["vua", *sys.argv[4:]]
    own, seen = os.getpid(), 0
    def count(event, _):
        global seen
        if os.getpid() != own:
            return
        seen += 1
        if seen == stop:
            os.killpg(0, signal.SIGINT)
    if mode == "large":
        import vua.capacity.spaces
        vua.capacity.spaces._LARGE = 0
    sys.addaudithook(count)
    status = main()
    with open(counts, "w") as file:
        file.write(str(seen))
    sys.exit(status)
"""
"""Runs a command. At one of its audit events (imports, files, processes) the group gets SIGINT, as
from a terminal. Without, it writes how many there were."""


class InterruptTest(CliTest):
    """A directory, a bucket, and all that commands work on."""

    def setUp(self) -> None:
        super().setUp()
        self.files_ = Path(tempfile.mkdtemp(prefix="vua-test-"))
        self.addCleanup(shutil.rmtree, self.files_, ignore_errors=True)
        self.bucket = f"file://{self.files_}/bucket"
        self.ids = self.files_ / "ids.json"
        self.ids.write_text('{"prompt": [1]}')

    def fill_bucket(self) -> None:
        """Store in the bucket what the directory has."""
        pytest.importorskip("obstore")
        with VUA(VUAConfig(split_factor=4, model="llama"), self.bucket) as vua:
            vua.put(TOKENS, caches_of(layers=3, heads=2, tokens=12, dim=8))

    def run_until(self, given: list[str], mode: str, stop: int) -> tuple[int, str, int]:
        """Run a command, interrupted at an event (0: never); return status, stderr and events."""
        counts = self.files_ / "counts"
        (self.files_ / "new.tar").unlink(missing_ok=True)
        words = [sys.executable, "-c", textwrap.dedent(QUIET), counts, str(stop), mode, *given]
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        ) as running:  # fmt: skip
            _, err = running.communicate(timeout=120)
        events = int(counts.read_text()) if counts.exists() else 0
        counts.unlink(missing_ok=True)
        return running.returncode, err, events

    def check(self, words: list[str], mode: str, chance: random.Random) -> None:
        """Interrupt a command at some moment of its life."""
        code, err, events = self.run_until(words, mode, 0)
        self.assertIn(code, (0, 1, 2), err)
        self.assertGreater(events, 20)
        stop = chance.randint(1, events - 1)
        status, err, seen = self.run_until(words, mode, stop)
        while 0 < seen < stop:  # there were fewer than before
            stop = chance.randint(1, seen)
            status, err, seen = self.run_until(words, mode, stop)
        self.assertEqual(-signal.SIGINT, status, f"event {stop} of {events}: {err}")
        self.assertLessEqual(err.count("\n"), 1, f"event {stop} of {events}: {err}")
        self.assertNotIn("Traceback", err)

    @pytest.mark.thorough
    def test_every_command(self) -> None:
        """All commands on a directory and a bucket, those of several processes, and errors."""
        self.fill_bucket()
        chance = random.Random(2)
        for command in [["--help"], ["nonsense"], ["ui", f"{self.files_}/none"], *COMMANDS]:
            for place in (str(self.root), self.bucket)[: 1 + ("PLACE" in command)]:
                mode = "large" if command[0] in ("ls", "verify") and place != self.bucket else ""
                words = filled_in(command, place, self.files_)
                with self.subTest(words):
                    self.check(words, mode, chance)

    def started(self, *words: object) -> subprocess.Popen[str]:
        """Start a command that lasts, in a group of its own."""
        running = subprocess.Popen(
            [sys.executable, "-m", "vua", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.addCleanup(running.wait)
        self.addCleanup(running.kill)
        return running

    def end(self, running: subprocess.Popen[str]) -> None:
        os.killpg(running.pid, signal.SIGINT)
        _, err = running.communicate(timeout=120)
        self.assertEqual((-signal.SIGINT, ""), (running.returncode, err))
        until(lambda: not group(running.pid))

    @pytest.mark.thorough
    def test_lasting(self) -> None:
        """Commands that last until they are interrupted; none of their processes stays."""
        self.fill_bucket()
        for words in (
            ["top", self.root, "--interval", "0.01"], ["events", self.root, "--follow"],
            ["ui", self.root], ["ui", self.bucket],
            ["events", self.bucket, "--follow", "--interval", "0.1"],
        ):  # fmt: skip
            with self.subTest(words):
                running = self.started(*words)
                assert running.stdout is not None
                self.assertTrue(running.stdout.readline())
                self.end(running)

    @pytest.mark.thorough
    def test_waiting(self) -> None:
        """Commands that wait for a server which never answers."""
        for words in (["warm", self.ids, "--server", "http://{}"],
                      ["ls", "s3://bucket/kv"], ["du", "s3://bucket/kv"]):  # fmt: skip
            with self.subTest(words), socket.create_server(("127.0.0.1", 0)) as silent:
                place = f"127.0.0.1:{silent.getsockname()[1]}"
                bucket = {
                    "AWS_ENDPOINT_URL": f"http://{place}", "AWS_ALLOW_HTTP": "true",
                    "AWS_REGION": "r", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
                }  # fmt: skip
                with mock.patch.dict(os.environ, bucket):
                    running = self.started(*(str(word).format(place) for word in words))
                silent.settimeout(120)
                line, _ = silent.accept()
                with line:
                    self.end(running)

    def test_ignored(self) -> None:
        """Where SIGINT is ignored, as by a shell's background jobs, it stays so."""
        script = (
            "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN);"
            "from vua.cli import main; sys.argv = ['vua', 'ls', sys.argv[1]];"
            "sys.addaudithook(lambda event, _:"
            " event == 'os.kill' or os.kill(os.getpid(), signal.SIGINT));"
            "sys.exit(main())"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, self.root], capture_output=True, text=True, check=False
        )
        self.assertEqual((0, ""), (done.returncode, done.stderr))


def group(number: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(of_group) == number and state != "Z":
            found.append(int(stat.parent.name))
    return found
