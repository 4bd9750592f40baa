"""Every page can be read once: no sentence is very long, and few have a turn that is read twice."""

from __future__ import annotations

import ast
import re
import unittest
from pathlib import Path

from helpers import ROOT

MOST_WORDS = 60
TURNS = (
    r"(?:^|[.:;] )(?:Of|That of|Those of) [a-z]",  # the subject comes late
    r"\b[Ww]hoever\b|\b[Ww]hatever\b|(?:^|[.:;] )(?:Who|What) (?!is\b)[a-z]+s\b",  # a clause
    r"\b(?:[Nn]o|[Ss]ome|[Aa]ny)body\b",  # name the user, process or engine
    r"\bto be had\b|\bas it has to be\b",
    r"\b[Tt]here (?:is|are) (?:no|none)\b",  # "has no", "without"
    r"\b[Ll]ikewise\b|\ball the same\b|\bas ever\b",
    r"\bbehind\b",  # after, later, a slower tier
    r"\b(?:travels?|goes on|go on|stands in|stand in)\b",
    r"\bis no [a-z]+\b",  # "is not a"
    r"\b(?:is|are|was|were) (?:let|told|said|spared)\b",
)
"""Turns of phrase that a tired reader reads twice, with what to write in their place."""
MOST_TURNS = 25
"""In all pages: a few are right where they are."""
MOST_SPACES_OF_A_NAME = 3
MOST_TURNS_OF_SOURCE = 95
"""In docstrings and messages, where "there is none" is often the shortest."""
MOST_LINES = {"performance.md": 350}
"""Of pages that numbers make longer each time something is measured."""
MOST_WORDS_OF_README, MOST_WORDS_OF_PAGES = 900, 29_500
"""Of docs/ without its decisions and what programs write. To add a page, shorten others."""
MADE = re.compile(r"<!-- ([a-z]+).*? -->.*?<!-- /\1 -->", re.DOTALL)
"""What a program writes into a page."""
MOST_DECISIONS = 30
MOST_WORDS_OF_A_DECISION = 400
TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

BLOCK = re.compile(r"^```.*?^```|<!--.*?-->|<script.*?</script>", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")
END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*]*[A-Z0-9`]|\*+\w|vLLM)")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|etc|approx)\.")
WORD = re.compile(r"[A-Za-z][\w'-]*")


def paragraphs(text: str) -> list[str]:
    """Paragraphs, list items, headings and cells of tables, each as one line."""
    found: list[str] = []
    fresh = True
    for line in BLOCK.sub("", text).splitlines():
        bare = line.strip()
        if bare.startswith("|"):
            found += bare.strip("|").split("|")
            fresh = True
        elif not bare:
            fresh = True
        elif fresh or re.match(r"([-*+>#]|\d+\.) ", bare) or bare.startswith("#"):
            found.append(bare.lstrip("#->*+ "))
            fresh = bare.startswith("#")
        else:
            found[-1] += " " + bare
    return found


def sentences(text: str) -> list[str]:
    """The sentences of a page; code counts as one word."""
    found = []
    for one in paragraphs(LINK.sub(r"\1", text)):
        plain = ABBREVIATION.sub(r"\1", CODE.sub("Code", one))
        found += [each for each in END.split(plain) if len(WORD.findall(each)) > 2]
    return found


def words(sentence: str) -> int:
    return len(WORD.findall(sentence))


def pages() -> list[Path]:
    found = [ROOT / name for name in TOP if (ROOT / name).is_file()]
    return [*found, *sorted((ROOT / "docs").rglob("*.md"))]


def turns() -> list[str]:
    """The lines of the pages, but for the decisions and the history, that have such a turn."""
    skipped = {"CHANGELOG.md"}
    chosen = [
        page for page in pages() if page.name not in skipped and "decisions" not in page.parts
    ]
    return [f"{page.relative_to(ROOT)}:{number}: {line.strip()}"
            for page in chosen
            for number, line in enumerate(page.read_text("utf-8").splitlines(), 1)
            if any(re.search(turn, line) for turn in TURNS)]  # fmt: skip


def turns_of_source() -> list[str]:
    """The lines of docstrings and messages in the source that have such a turn."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else None
            if not isinstance(text, str) or text.count(" ") <= MOST_SPACES_OF_A_NAME:
                continue
            found += [f"{path.relative_to(ROOT)}:{node.lineno}: {line.strip()}"
                      for line in text.splitlines()
                      if any(re.search(turn, line) for turn in TURNS)]  # fmt: skip
    return found


class ProseTest(unittest.TestCase):
    def test_pages(self) -> None:
        """No sentence has more than 60 words."""
        self.assertLess(20, len(pages()))
        for page in pages():
            found = sentences(page.read_text("utf-8"))
            with self.subTest(page=str(page.relative_to(ROOT))):
                longest = max(found, key=words, default="")
                self.assertLessEqual(words(longest), MOST_WORDS, longest)

    def test_lines(self) -> None:
        """A page of measurements has one table for each, not a diary."""
        for name, most in MOST_LINES.items():
            lines = (ROOT / "docs" / name).read_text("utf-8").splitlines()
            self.assertLessEqual(len(lines), most, name)

    def test_length(self) -> None:
        """The README, and all pages together, do not grow."""

        def length(*chosen: Path) -> int:
            texts = [MADE.sub("", page.read_text("utf-8")) for page in chosen]
            return sum(len(re.findall(r"\S*\w\S*", text)) for text in texts)

        docs = [page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts]
        self.assertLessEqual(length(ROOT / "README.md"), MOST_WORDS_OF_README)
        self.assertLessEqual(length(*docs), MOST_WORDS_OF_PAGES)

    def test_decisions(self) -> None:
        """Few records, each short: one subject, one record; tables are in performance.md."""
        records = sorted((ROOT / "docs" / "decisions").glob("*.md"))
        self.assertLessEqual(len(records), MOST_DECISIONS, "merge two that have one subject")
        for path in records:
            words_ = path.read_text("utf-8").split()
            self.assertLessEqual(len(words_), MOST_WORDS_OF_A_DECISION, path.name)
            self.assertEqual(["#", path.name[:4]], words_[:2], path.name)

    def test_decisions_exist(self) -> None:
        """A record that a comment or a page names is there; the history may name others."""
        records = {path.name for path in (ROOT / "docs" / "decisions").glob("*.md")}
        numbers = {name[:4] for name in records}
        named = re.compile(r"decisions/(\d{4})(-[a-z\d-]+\.md)?")
        found = 0
        for folder in ("src", "tests", "benchmarks", "docs", "examples"):
            for path in (ROOT / folder).rglob("*"):
                if path.suffix not in (".py", ".md", ".c", ".h", ".js", ".html"):
                    continue
                for number, rest in named.findall(path.read_text("utf-8")):
                    found += 1
                    there = number in numbers and (not rest or number + rest in records)
                    self.assertTrue(there, f"{path.relative_to(ROOT)}: decisions/{number}{rest}")
        self.assertLess(20, found)

    def test_turns(self) -> None:
        """Few sentences have to be read twice."""
        found = turns()
        self.assertLessEqual(len(found), MOST_TURNS, "\n".join(["too many:", *found]))

    def test_source(self) -> None:
        """Few docstrings and messages have to be read twice."""
        found = turns_of_source()
        self.assertLessEqual(len(found), MOST_TURNS_OF_SOURCE, "\n".join(["too many:", *found]))

    def test_counting(self) -> None:
        """Code and tables are set apart, and a long sentence is seen."""
        block = "```\nno. words. here\n```\n"
        text = f"# A heading of words\n\nOne two `a b c` four. Five six\nseven.\n\n{block}"
        self.assertEqual([4, 4, 3], [words(one) for one in sentences(text)])
        table = "| a | b |\n|---|---|\n| one two three | four five six. Seven eight nine |\n"
        self.assertEqual([3, 3, 3], [words(one) for one in sentences(table)])
        self.assertEqual([70], [words(one) for one in sentences("word " * 70)])
