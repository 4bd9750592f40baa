"""The files of a model's directory that are neither weights nor ``config.json``, by content.

Promises that an edit of a file that counts gives another digest, at the same path too. Read when an
engine starts: an edit between the engine's own reading and this one goes unseen.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from vua.errors import ConfigError

__all__ = ["code_digest", "processor_digest", "quantization_digest"]

_MOST_BYTES: Final = 64 << 20

# JSON files that no processor of images, sounds or videos reads for more than tokens, which are in
# the key; config.json counts as the engine resolved it. Any other one counts.
_NO_PROCESSORS: Final = frozenset(
    "added_tokens.json adapter_config.json config.json generation_config.json special_tokens_map.json "  # noqa: E501, SIM905
    "tokenizer.json tokenizer_config.json vocab.json".split()
)


def code_digest(folder: Path) -> str:
    """Return 64 hex digits that stand for a directory's Python files, at any depth.

    Raises:
        ConfigError: there are none, or one is too large.
        OSError: one cannot be read.
    """
    found = [path for path in folder.rglob("*.py") if path.is_file()]
    if not found:
        raise ConfigError(f"the model brings code of its own, but {folder} holds no Python files")
    return _digest(folder, found)


def processor_digest(folder: Path) -> str:
    """Return 64 hex digits that stand for the files that a processor is made from.

    Raises OSError, and ConfigError for a file too large.
    """
    files = (path for path in folder.glob("*.json") if path.is_file())
    names = (path for path in files if not path.name.startswith("."))
    return _digest(
        folder,
        [
            path
            for path in names
            if path.name not in _NO_PROCESSORS and not path.name.endswith(".index.json")
        ],
    )


def quantization_digest(folder: Path) -> str:
    """Return 64 hex digits that stand for the files that say how weights are quantised.

    Engines look into these where ``config.json`` does not say it. Raises OSError, and ConfigError
    for a file too large.
    """
    return _digest(folder, [path for path in folder.glob("*quant*.json") if path.is_file()])


def _digest(folder: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256(b"vua.files.v1\n")
    for path in sorted(files):
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes; expected a small file")
        for part in (os.fsencode(path.relative_to(folder)), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
