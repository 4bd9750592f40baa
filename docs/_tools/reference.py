"""Writes those parts of the documentation that the code knows best: tables, and install lines.

    python docs/_tools/reference.py        # or `python3 dev.py docs`, which also builds the site

Each table replaces what stands between `<!-- generated: NAME -->` and `<!-- /generated -->` in a
page of docs/. A test compares the pages with the code.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from speed import MODELS, layout_of, token_nbytes
from vua import __version__
from vua.capacity.limits import Limits
from vua.cli import command as cli
from vua.connector import config as connector
from vua.connector.config import ConnectorConfig
from vua.connector.metrics import METRICS
from vua.core import VUAConfig
from vua.format.identity import IGNORED_CONFIG_KEYS, INTERLEAVED, NEOX
from vua.format.layout import ITEMSIZE

DOCS = Path(__file__).resolve().parent.parent
SOURCE = "."
"""What pip is given in all pages: a checkout. Change it to "vua" when an index has the package."""
INSTALL = {
    ".": "Linux, Python 3.10 to 3.13. VUA is not on a package index yet. Install it from a "
    "checkout, as below, or from a release's wheel:\n"
    f"`'./vua-{__version__}-....whl[vllm]'` in the place of `'.[vllm]'`.\n",
    "vua": "Linux, Python 3.10 to 3.13.\n",
}
INSTALLED = re.compile(
    r"(pip install )(?:'(?:\.|vua)(\[[\w,-]+\])'|(?:\.|vua)(?=[\s`;]|$))", re.MULTILINE
)
ONCE = frozenset({"--help", "--json", "--key-file", "--tenant-keys", "--encrypt"})
"""Options that commands.md explains once."""
OPEN, CLOSE = "<!-- generated: {} -->", "<!-- /generated -->"
REGION = re.compile(r"<!-- generated: ([\w-]+) -->\n(.*?)<!-- /generated -->", re.DOTALL)
UNITS = {
    "_per_day": "GiB per day",
    "_s": "seconds",
    "_bytes": "size",
    "_mib": "MiB",
    "_tokens": "tokens",
}
KINDS = {"bool": "true or false", "str": "text", "int": "number", "float": "number"}
SPECIAL = {
    "shared_storage_path": "path",
    "key_file": "path",
    "tenant_keys": "path",
    "load_policy": "text or number",
    "allow": "list",
    "trusted_uids": "list",
    "split_factor": "tokens",
    "max_bytes_per_salt": "size",
    "min_free_inodes": "number or share",
}
PROMPT_TOKENS = 8192
PREFILL = 5000


def descriptions(kind: type) -> dict[str, str]:
    """The docstring of each attribute of a class, as one line of Markdown."""
    (body,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(body, ast.ClassDef)
    found, name = {}, ""
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[name] = re.sub(r"\s+", " ", str(node.value.value)).replace("``", "`")
            name = ""
    return found


def unit(kind: type, name: str) -> str:
    """What a setting's values are: a unit, or a sort of value."""
    if name in SPECIAL:
        return SPECIAL[name]
    for end, found in UNITS.items():
        if name.endswith(end):
            return found
    return KINDS.get(str(kind.__annotations__[name]), "text")


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("|  |", "| |")


def entries(rows: list[tuple[str, str, str]]) -> str:
    """A list of Markdown: a name, more about it in brackets, and a text."""
    return "".join(f"- `{name}` ({more}). {text}\n" for name, more, text in rows)


def connector_settings() -> str:
    """Every setting of the engines' connector."""
    own, rows = descriptions(ConnectorConfig), []
    path = "shared_storage_path"
    rows.append((path, unit(ConnectorConfig, path), own[path]))
    for name, value in connector.defaults().items():
        group, _, inner = name.rpartition(".")
        kind = connector._GROUPS[group] if group else ConnectorConfig  # noqa: SLF001
        text = descriptions(kind)[inner]
        rows.append((name, f"{unit(kind, inner)}, `{json.dumps(value)}`", text))
    return entries(rows)


def library_settings() -> str:
    """Every setting of `VUAConfig`; those of its group `security` are the connector's."""
    own, rows = descriptions(VUAConfig), []
    for name in VUAConfig._FIELDS:  # noqa: SLF001
        shown = {"threads": "CPU cores, at most 4", "security": "`Security()`"}
        default = shown.get(name, f"`{getattr(VUAConfig, name)!r}`")
        sort = "group" if name == "security" else unit(VUAConfig, name)
        rows.append((name, f"{sort}, {default}", own[name]))
    return entries(rows)


def directory_limits() -> str:
    """What `bounds.json` may say."""
    options = {"max_bytes": "--max-bytes", "min_free_bytes": "--min-free", "ttl_s": "--ttl"}
    options["max_bytes_per_salt"] = "--max-per-salt"
    options["min_free_inodes"] = "--min-free-inodes"
    texts = descriptions(Limits)
    return entries([(n, f"{unit(Limits, n)}, `{options[n]}`", texts[n]) for n in texts])


def metrics() -> str:
    """Every metric."""
    rows = []
    for name, one in METRICS.items():
        values = ", ".join(f"`{value}`" for value in one.values)
        label = f", `{one.label}`" + (f": {values}" if values else "") if one.label else ""
        rows.append((name, f"{one.kind}{label}", one.documentation))
    return entries(rows)


def _help(text: object) -> str:
    return re.sub(r"\s+", " ", str(text or "")).replace("%%", "%")


def _value(one: click.Parameter) -> str:
    """What an option takes, or an argument is called."""
    if isinstance(one, click.Option) and one.is_flag:
        return ""
    return str(one.metavar or (one.name or "").upper())


def _usage(name: str, command: click.Command) -> str:
    """The usage line; the table has the options."""
    words = [_value(one) for one in command.params if isinstance(one, click.Argument)]
    return " ".join([f"vua {name}", *words, "[OPTIONS]"])


def _options(command: click.Command) -> Iterator[tuple[str, str]]:
    for one in command.params:
        shown = _value(one)
        if ONCE.intersection(one.opts) or (isinstance(one, click.Argument) and shown == "DIR"):
            continue
        if isinstance(one, click.Option):
            shown = f"{', '.join(one.opts)} {shown}".strip()
        text = _help(getattr(one, "help", None) or getattr(one, "text", ""))
        if isinstance(one.type, click.Choice):
            text += f" ({', '.join(str(choice) for choice in one.type.choices)})"
        yield shown, text.strip()


def commands() -> str:
    """Every command of `vua`, with its arguments, from its declaration."""
    context = click.Context(cli.vua)
    parts = []
    for name in cli.vua.list_commands(context):
        command = cli.vua.get_command(context, name)
        assert command is not None
        parts.append(f"## vua {name}\n\n{command.help} `{_usage(name, command)}`\n\n")
        if rows := list(_options(command)):
            width = max(len(shown) for shown, _ in rows)
            lines = [f"{shown:{width}}  {text}".rstrip() for shown, text in rows]
            parts.append("\n".join(["```text", *lines, "```\n\n"]))
    return "".join(parts)


def sizes() -> str:
    """What the K and V of models weigh, and which bandwidth beats computing them."""
    rows = []
    for name in MODELS:
        nbytes = token_nbytes(layout_of(name))
        row = [name, f"{nbytes / 1024:,.1f} KiB", f"{PROMPT_TOKENS * nbytes / 2**30:.2f} GiB"]
        rows.append([*row, f"{nbytes * PREFILL / 1e9:.2f} GB/s"])
    heads = ["model, bfloat16", "a token", f"{PROMPT_TOKENS:,} tokens"]
    return table([*heads, f"break-even at {PREFILL:,} tokens/s"], rows)


def dtypes() -> str:
    """Elements of K and V."""
    by_size: dict[int, list[str]] = {}
    for name, size in ITEMSIZE.items():
        by_size.setdefault(size, []).append(f"`{name}`")
    rows = [[str(size), ", ".join(names)] for size, names in sorted(by_size.items())]
    return table(["bytes", "dtypes"], rows)


def rope_orders() -> str:
    """Which models' K rows pair their elements in which way."""
    orders = {"neox": NEOX, "interleaved": INTERLEAVED}
    rows = [[f"`{order}`", ", ".join(f"`{one}`" for one in sorted(kinds))]
            for order, kinds in orders.items()]  # fmt: skip
    return table(["`rope`", "`model_type`"], rows)


def ignored_config() -> str:
    """Members of a config that its digest leaves out."""
    names = " ".join(sorted(IGNORED_CONFIG_KEYS))
    lines = textwrap.wrap(names, 120, break_long_words=False, break_on_hyphens=False)
    return "".join(f"  {line}\n" for line in ("```text", *lines, "```"))


def install() -> str:
    """What comes before the lines that install VUA."""
    return INSTALL[SOURCE]


TABLES: dict[str, Callable[[], str]] = {
    "install": install,
    "connector-settings": connector_settings,
    "library-settings": library_settings,
    "directory-limits": directory_limits,
    "metrics": metrics,
    "commands": commands,
    "sizes": sizes,
    "format-dtypes": dtypes,
    "format-rope": rope_orders,
    "format-ignored": ignored_config,
}


def filled(text: str) -> str:
    """A page with its tables and install lines as they should be now."""

    def made(found: re.Match[str]) -> str:
        name = found[1]
        return f"{OPEN.format(name)}\n{TABLES[name]()}{CLOSE}"

    def line(found: re.Match[str]) -> str:
        return f"{found[1]}'{SOURCE}{found[2]}'" if found[2] else f"{found[1]}{SOURCE}"

    return INSTALLED.sub(line, REGION.sub(made, text))


def pages() -> list[Path]:
    """The pages that hold something made here."""
    root = DOCS.parent
    found = [root / "README.md", *DOCS.glob("*.md"), *root.glob("examples/**/*.md")]
    made = re.compile(f"{REGION.pattern}|{INSTALLED.pattern}", re.DOTALL | re.MULTILINE)
    return [page for page in sorted(found) if made.search(page.read_text("utf-8"))]


def main() -> None:
    """Bring all pages up to date, and say which have changed."""
    for page in pages():
        text = page.read_text("utf-8")
        if (new := filled(text)) != text:
            page.write_text(new, "utf-8")
            print(f"docs: {page.name} is as the code says now", flush=True)


if __name__ == "__main__":
    main()
