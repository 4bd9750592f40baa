"""Thousands of hostile gets under an audit hook: nothing that is stored is ever executed.

``python -m scorecard.audited DIRECTORY --gets N --seed S`` prints a JSON object: ``gets``,
``attacks`` (how many kinds), ``hits`` (gets that found the sound file), ``wrong`` (gets that gave
other values: must be 0), ``events`` (forbidden audit events, with their first argument: must be
empty) and ``seconds_longest``. A process of its own, because a hook stays for good.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

from scorecard.attacks import PLANTS, clear, hostile_bytes, mutated
from vua.core import VUA, VUAConfig
from vua.security.settings import Security

FORBIDDEN: Final = (
    *("exec", "compile", "import", "code.", "marshal.", "pickle.", "cpython.run_"),
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "subprocess.", "pty."),
    *("socket.", "ctypes.dlopen", "ctypes.dlsym", "urllib.", "http.", "ftplib.", "smtplib."),
    *("webbrowser.", "sqlite3.", "syslog."),
)
"""Audit events, or what they begin with, that reading a cache never causes."""


class Watch:
    """Notes forbidden events from :meth:`arm` on, and files opened outside of a directory."""

    def __init__(self, root: Path) -> None:
        """Install the hook, for the rest of the process's life."""
        self.events: list[str] = []
        self._armed = False
        self._root = str(root)
        sys.addaudithook(self._see)

    def arm(self) -> None:
        self._armed = True

    def disarm(self) -> None:
        self._armed = False

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._armed:
            return
        first = str(arguments[0])[:200] if arguments else ""
        outside = (
            event == "open"
            and isinstance(arguments[0], str)
            and os.path.isabs(arguments[0])  # noqa: PTH117 - others are relative to a descriptor
            and not arguments[0].startswith(self._root)
        )
        if outside or event.startswith(FORBIDDEN):
            self.events.append(f"{event} {first}")


def hostile_gets(root: Path, gets: int, seed: int, security: Security) -> dict[str, Any]:
    """Attack one stored chunk in ``gets`` ways and get it after each; see the module."""
    random_source = random.Random(seed)
    tokens, shape = torch.arange(8), (1, 2, 8, 16)
    torch.manual_seed(seed)
    caches = [[torch.randn(shape), torch.randn(shape)] for _ in range(2)]
    report: dict[str, Any] = {"gets": gets, "hits": 0, "wrong": 0, "seconds_longest": 0.0}
    with VUA(VUAConfig(split_factor=8, threads=1, security=security), root / "cache") as vua:
        vua.put(tokens, caches)
        [path] = (root / "cache").rglob("*.safetensors")
        sound, victim = path.read_bytes(), root / "cache" / "victim"
        victim.write_bytes(sound)
        attacks: list[Any] = [*hostile_bytes(sound).values(), *PLANTS.values()]
        report["attacks"] = len(attacks)
        watch = Watch(root)

        def get() -> int:
            found = vua.get_closest(tokens)
            same = not found or all(
                torch.equal(ours, theirs)
                for pair, stored in zip(found.data, caches, strict=True)
                for ours, theirs in zip(pair, stored, strict=True)
            )
            report["wrong"] += not same
            return found.num_tokens

        def attack(number: int) -> None:
            clear(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            chosen = attacks[number] if number < len(attacks) else mutated(sound, random_source)
            if callable(chosen):
                chosen(path, victim)
            else:
                path.write_bytes(chosen)

        for number in (0, len(attacks)):  # what is imported once is imported before it counts
            attack(number)
            get()
        for number in range(gets):
            attack(number)
            began_s = time.perf_counter()
            watch.arm()
            report["hits"] += get() > 0
            watch.disarm()
            elapsed_s = time.perf_counter() - began_s
            report["seconds_longest"] = max(report["seconds_longest"], elapsed_s)
        report["victim_unchanged"] = victim.read_bytes() == sound
    return report | {"events": watch.events[:20]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scorecard.audited", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gets", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key-file")
    parser.add_argument("--encrypt", action="store_true")
    given = parser.parse_args()
    logging.getLogger("vua").setLevel(logging.ERROR)
    security = Security(key_file=given.key_file, encrypt=given.encrypt)
    report = hostile_gets(given.directory, given.gets, given.seed, security)
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
