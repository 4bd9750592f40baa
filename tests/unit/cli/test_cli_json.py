"""`docs/cli.md` says what `--json` prints: no field is missing there, and none is too many."""

from __future__ import annotations

import json
import re
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from commands import TOKENS, CliTest, run_json
from helpers import flip

PAGE: Final = (Path(__file__).parents[3] / "docs" / "cli.md").read_text("utf-8")
WHOLE: Final = {"identity", "layout", "first_missing", "damaged", "others", "loads", "salts"}
WHOLE_TOO: Final = {"used_within", "sealed", "authentic", "temporary", "quarantined", "model"}
"""Fields that are described as one."""


def documented(verb: str) -> set[str]:
    """The fields in a verb's table."""
    for section in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        if verb in section.split("\n", 1)[0].split(", "):
            return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))
    raise AssertionError(verb)


def fields(value: object, at: str = "") -> Iterator[str]:
    """The fields of a report, as the page writes them."""
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for one in value:
            yield from fields(one, f"{at}[]")
    elif isinstance(value, dict) and at.rsplit(".", 1)[-1] not in WHOLE | WHOLE_TOO:
        for name, one in value.items():
            yield from fields(one, f"{at}.{'*' if at == 'deleted' else name}".lstrip("."))
    else:
        yield at


def below(inner: str, outer: str) -> bool:
    """Whether a field is another one, or in it (an empty list shows no field of its items)."""
    return inner == outer or inner.startswith((f"{outer}.", f"{outer}[]"))


class JsonTest(CliTest):
    def setUp(self) -> None:
        """Have a prompt and a trace beside the directory."""
        super().setUp()
        self.beside = self.root.with_name(f"{self.root.name}-beside")
        self.beside.mkdir()
        self.addCleanup(lambda: [one.unlink() for one in self.beside.iterdir()]
                        and self.beside.rmdir())  # fmt: skip
        (self.beside / "tokens").write_text(json.dumps(TOKENS.tolist() + [1] * 8))
        requests = [{"hash_ids": [1, 2], "input_length": 1024}] * 2
        (self.beside / "trace").write_text("\n".join(map(json.dumps, requests)))

    def commands(self) -> dict[str, list[list[object]]]:
        """Verbs by the section that describes them; together they show every field of it."""
        root, beside = self.root, self.beside
        short = {one.parent.name for one in self.entries(1)}
        chunk = next(name for one in self.entries() if (name := one.parent.name) not in short)
        return {
            "ls": [["ls", root, "-l"]],
            "inspect": [["inspect", self.entries()[0]]],
            "du": [["du", root]],
            "top": [["top", root, "--once", "--interval", "0.01"]],
            "doctor": [["doctor", root]],
            "explain": [["explain", root, "--tokens", beside / "tokens"]],
            "export": [["export", root, beside / "tar", "--all"], ["import", root, beside / "tar"]],
            "verify": [["verify", root]],
            "gc": [["gc", root]],
            "bench": [["bench", "replay", beside / "trace", "--simulated"]],
            "rm": [["pin", root, chunk], ["ttl", root], ["adopt", root], ["key", beside / "key"],
                   ["rm", root, chunk, "--pinned"]],
        }  # fmt: skip

    def test_every_verb(self) -> None:
        """What a verb prints is what the page says."""
        for verb, commands in self.commands().items():
            if verb == "verify":
                flip(self.entries()[0], 4200)
            seen: set[str] = set()
            for words in commands:
                _, report = run_json(*words)  # type: ignore[arg-type]
                seen |= set(fields(report))
            with self.subTest(verb):
                known = documented(verb)
                extra = {one for one in seen if not any(below(one, two) or below(two, one)
                                                        for two in known)}  # fmt: skip
                lacking = {one for one in known if not any(below(two, one) for two in seen)}
                self.assertEqual(set(), extra, "printed, and not described")
                self.assertEqual(set(), lacking, "described, and not printed")


if __name__ == "__main__":
    unittest.main()
