"""Every page can be read: its sentences are short."""

from __future__ import annotations

import re
import unittest
from pathlib import Path

from helpers import ROOT

MEAN_WORDS = 25
MOST_WORDS = 60
FEW_SENTENCES = 5
"""A page with fewer has no mean that says anything."""
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
    """How many words a sentence has."""
    return len(WORD.findall(sentence))


def pages() -> list[Path]:
    """The documentation: pages for people."""
    found = [ROOT / name for name in TOP if (ROOT / name).is_file()]
    return [*found, *sorted((ROOT / "docs").rglob("*.md"))]


class ProseTest(unittest.TestCase):
    def test_pages(self) -> None:
        """At most 25 words in the mean, and no sentence of more than 60."""
        self.assertLess(20, len(pages()))
        for page in pages():
            found = sentences(page.read_text("utf-8"))
            counts = [words(one) for one in found]
            with self.subTest(page=str(page.relative_to(ROOT))):
                longest = max(found, key=words, default="")
                self.assertLessEqual(words(longest), MOST_WORDS, longest)
                if len(counts) >= FEW_SENTENCES:
                    self.assertLessEqual(sum(counts) / len(counts), MEAN_WORDS)

    def test_counting(self) -> None:
        """Code and tables are set apart, and a long sentence is seen."""
        block = "```\nno. words. here\n```\n"
        text = f"# A heading of words\n\nOne two `a b c` four. Five six\nseven.\n\n{block}"
        self.assertEqual([4, 4, 3], [words(one) for one in sentences(text)])
        table = "| a | b |\n|---|---|\n| one two three | four five six. Seven eight nine |\n"
        self.assertEqual([3, 3, 3], [words(one) for one in sentences(table)])
        self.assertEqual([70], [words(one) for one in sentences("word " * 70)])


if __name__ == "__main__":
    unittest.main()
