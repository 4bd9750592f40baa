"""What the site needs beside the pages: a first page, and links that work there, too.

MkDocs calls these functions (`hooks` in mkdocs.yml). The README is the first page. The page
Evidence names all pages that the navigation does not. A link to a file that is in the repository,
but not a page, becomes the file's name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent.parent
WIDE = {
    "comparison.md": re.compile(r"<!-- at a glance -->\n(.*?)<!-- /at a glance -->\n", re.DOTALL)
}
"""Pages with a wide table, and where that is: they have no bars at their sides."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the README as the first page, and a page that names those outside the navigation."""
    text = (ROOT / "README.md").read_text("utf-8").replace("(docs/", "(").replace('"docs/', '"')
    files.append(File.generated(config, "index.md", content=text))
    docs, named = ROOT / "docs", str(config.nav)
    more = [page for page in sorted(docs.glob("*.md")) if f"'{page.name}'" not in named]
    text = "# Evidence\n\nWhat was measured, promised and decided, and how VUA works inside.\n\n"
    text += "".join(map(_item, more)) + "\n## Decisions\n\n"
    text += "".join(map(_item, sorted(docs.glob("decisions/*.md"))))
    files.append(File.generated(config, "evidence.md", content=text))
    return files


def _item(page: Path) -> str:
    """An item of a list: a link to a page by its title."""
    title = page.read_text("utf-8").partition("\n")[0].lstrip("# ")
    return f"- [{title}]({page.relative_to(ROOT / 'docs').as_posix()})\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leaves only links to pages, and to other sites."""
    here = posixpath.dirname(page.file.src_uri)
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["navigation", "toc"]
        markdown = WIDE[page.file.src_uri].sub(
            r'<div class="wide" markdown>\n\n\1\n</div>\n', markdown
        )

    def link(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        there = posixpath.normpath(posixpath.join(here, target))
        if files.get_file_from_path(there) is not None:
            return found[0]
        if there == "decisions":
            return f"[{text}]({posixpath.relpath('evidence.md', here or '.')}#decisions)"
        inside = there if page.file.src_uri == "index.md" else posixpath.join("docs", there)
        if not (ROOT / posixpath.normpath(inside)).exists():
            return found[0]  # so that the strict build refuses it
        return text

    return LINK.sub(link, markdown)
