"""Prompts: token ids, from a file or by a tokenizer; and `vua key`, which makes key files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vua.cli.command import argument, command
from vua.cli.output import Report
from vua.errors import ConfigError, InputError
from vua.format.keys import KeyChain, token_ids
from vua.security.keyring import SUFFIX, NoKeyError, read_key, tenant_of, write_key
from vua.store.namespace import Namespace

if TYPE_CHECKING:
    from vua.security.seal import Seal  # needs an optional package


def _text(file: str) -> str:
    """Return the content of a file, or of stdin for ``-``. Raises InputError, OSError."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_bytes().decode()
    except UnicodeDecodeError as problem:
        msg = f"{file}: expected UTF-8 text, found other bytes: {problem}"
        raise InputError(msg) from problem


def read_ids(file: str) -> bytes:
    """Return the token ids in a file (``-``: stdin) as little-endian u32 bytes.

    The file holds a JSON list of integers, or integers separated by white space. Raises InputError
    for anything else, OSError if it cannot be read.
    """
    return parse_ids(_text(file), file)


def parse_ids(text: str, source: str) -> bytes:
    """As `read_ids`, for a text; ``source`` names it in errors. Raises InputError."""
    words: list[Any]
    try:
        words = json.loads(text) if text.lstrip().startswith("[") else list(map(int, text.split()))
    except (ValueError, RecursionError) as problem:
        msg = f"{source}: expected a JSON list of token ids or integers between spaces: {problem}"
        raise InputError(msg) from problem
    for place, word in enumerate(words):
        if isinstance(word, bool) or not isinstance(word, int):
            msg = f"{source}: item {place} is {word!r:.40}, expected an integer token id"
            raise InputError(msg)
    return token_ids(words)


def prompt_ids(file: str, model: str | None) -> bytes:
    """Return the token ids of a text by ``tokenizer.json`` in the directory ``model``.

    The text is used unchanged: with the special tokens that the tokenizer adds, and without a chat
    template. Raises ConfigError without a tokenizer, InputError, OSError.
    """
    tokenize = tokenizer(model)
    return tokenize(_text(file))


def model_directory(model: str) -> Path:
    """Return the directory of a model: as given, or that of a name in the hub's cache.

    Raises ConfigError where there is neither.
    """
    if Path(model).is_dir():
        return Path(model)
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    place = cache / f"models--{model.replace('/', '--')}"
    revisions = sorted(place.glob("snapshots/*"))
    with suppress(OSError):
        main = place / "snapshots" / (place / "refs" / "main").read_text("ascii").strip()
        revisions = [main] if main.is_dir() else revisions
    if len(revisions) == 1:
        return revisions[0]
    found = f"{len(revisions)} revisions of it are" if revisions else "it is not"
    raise ConfigError(
        f"{model}: not a directory, and {found} in the hub's cache ({cache}); give the model's "
        "directory, for example what `hf download` prints"
    )


def tokenizer(model: str | None) -> Callable[[str], bytes]:
    """Return a function from a text to token ids (as `read_ids`). Raises ConfigError."""
    if model is None:
        msg = "a prompt needs its tokenizer: give --model MODELDIR, or the token ids with --tokens"
        raise ConfigError(msg)
    path = model_directory(model) / "tokenizer.json"
    if not path.is_file():
        msg = f"{path}: no such file; give the model's directory, or the token ids with --tokens"
        raise ConfigError(msg)
    try:
        tokenizers = import_module("tokenizers")
    except ImportError as problem:
        msg = "the package tokenizers is not installed; install it, or give --tokens"
        raise ConfigError(msg) from problem
    try:
        made = tokenizers.Tokenizer.from_file(str(path))
    except Exception as problem:  # the library raises plain Exception
        msg = f"{path}: not a tokenizer that the package tokenizers reads: {problem}"
        raise ConfigError(msg) from problem
    return lambda text: token_ids(list(made.encode(text).ids))


def prompt_keys(namespace: Namespace, ids: bytes, salt: str) -> tuple[KeyChain, Seal | None]:
    """Return a prompt's chunk keys as engines with its keys name them, and their seal, if any.

    Raises NoKeyError if the salt's key is unavailable: then nothing of it is cached.
    """
    extras = {0: [("salt", salt.encode())]} if salt else None
    try:
        keys = namespace.keys(ids, extras, salt.encode())
        seal = namespace.keyring.seal(keys.tenant)
    except NoKeyError as problem:
        if salt and isinstance(problem.__cause__, FileNotFoundError):
            msg = "no key for this salt; `vua key DIR --salt S`"
            raise NoKeyError(msg) from problem
        raise
    return keys, seal


# -- vua key --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Key(Report):
    """A key file."""

    file: str
    made: bool
    """Whether it was made now."""

    def describe(self) -> object:
        return {"file": self.file, "made": self.made}

    def show(self) -> None:
        print(f"{self.file}: {'made' if self.made else 'there already'}")


@command("key", "make a key file, or check an existing one", takes_directory=False)
@argument("path", "file for the key; with --salt a directory", metavar="PATH")
@click.option("--salt", metavar="S", help="make the key of this cache salt in PATH")
def key(path: str, *, salt: str | None = None) -> Key:
    """Make the key file, or check the existing one.

    Raises ConfigError for an existing unusable key, OSError.
    """
    file = Path(path)
    if salt is not None:
        if not salt:
            msg = "--salt is empty: requests without a salt use key_file"
            raise ConfigError(msg)
        file.mkdir(mode=0o700, exist_ok=True)
        file /= tenant_of(salt.encode()) + SUFFIX
    try:
        write_key(file)
        made = True
    except FileExistsError:
        read_key(file)
        made = False
    return Key(str(file), made)
