"""Which files of a directory hold a model's weights, and what is known without reading them.

The rule is that of vLLM's default loader and of transformers, for directories that hold a model in
one format. Safetensors files come first: those that the index names, if there is one. Else torch's
files count, without what trainers leave beside them, else GGUF. An engine that knows better gives
its own list.

`code_digest`, `processor_digest` and `quantization_digest` cover the other files that change what a
model computes. They are read when an engine starts: an edit between the engine's own reading and
this one goes unseen.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from vua.errors import ConfigError

__all__ = [
    "blob_of",
    "checkpoint_files",
    "code_digest",
    "link_changed_s",
    "processor_digest",
    "quantization_digest",
]

_INDEX: Final = "model.safetensors.index.json"
_MAX_INDEX_NBYTES: Final = 1 << 28
_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Only files with the first of these suffixes that occurs; never two of them together."""
_OF_TRAINING: Final = frozenset(
    ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
)
"""Files that vLLM's loader skips (`filter_files_not_needed_for_inference`)."""
_GGUF_PART: Final = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf")
_BLOB: Final = re.compile("[0-9a-f]{64}")


def checkpoint_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the weight files at ``path``, a directory of a model or adapter, or one file.

    Hidden files and subdirectories are skipped, as engines do. An adapter's ``adapter_config.json``
    is included.

    Raises:
        ConfigError: there are none.
        OSError: the directory cannot be read.
    """
    root = Path(path).absolute()
    listed = sorted(root.iterdir()) if root.is_dir() else [root]
    seen = [file for file in listed if not file.name.startswith(".") and file.is_file()]
    seen = [file for file in seen if file.name not in _OF_TRAINING]
    found: list[Path] = []
    for suffix in _SUFFIXES:
        found = found or [file for file in seen if file.suffix == suffix]
    if not found:
        raise ConfigError(
            f"no weights ({', '.join(_SUFFIXES)}) at {root}, so caches cannot be told apart; pass "
            "the local directory or file that the engine loads"
        )
    if not root.is_dir():
        return _gguf_parts(root)
    if found[0].suffix == ".safetensors":
        found = _indexed(root, found)
    return found + [file for file in seen if file.name == "adapter_config.json"]


def _indexed(root: Path, found: list[Path]) -> list[Path]:
    """Return the files that the index names; all of them if it names missing ones or is invalid."""
    try:
        with (root / _INDEX).open("rb") as stream:
            named = set(json.loads(stream.read(_MAX_INDEX_NBYTES))["weight_map"].values())
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return found
    chosen = [file for file in found if file.name in named]
    return chosen if {file.name for file in chosen} == named else found


def _gguf_parts(file: Path) -> list[Path]:
    """Return the file with its other parts, and the files that vLLM takes image weights from."""
    if file.suffix != ".gguf":
        return [file]
    parts = _GGUF_PART.fullmatch(file.name)
    beside = sorted(file.parent.glob("*.gguf"))
    of_one = [
        other for other in beside
        if (match := _GGUF_PART.fullmatch(other.name)) and parts and match[1] == parts[1]
    ]  # fmt: skip
    return (of_one or [file]) + [other for other in beside if other.name.startswith("mmproj")]


def blob_of(file: Path) -> str | None:
    """Return the SHA-256 that names a file of the Hugging Face hub's cache; None for any other.

    Such a file lies at ``models--*/blobs/<64 hex digits>``, mostly reached by a link. Files that
    are not weights have 40 digits there: git's SHA-1, which covers more than their content.
    """
    blob = Path(os.path.realpath(file))
    layout = blob.parent.name == "blobs" and blob.parent.parent.name.startswith("models--")
    return blob.name if layout and _BLOB.fullmatch(blob.name) else None


def link_changed_s(file: Path) -> float:
    """Return when a link on the way to a file was last made; 0.0 without links."""
    links = [part for part in (file, *file.parents) if part.is_symlink()]
    return max((link.lstat().st_ctime for link in links), default=0.0)


_MOST_BYTES: Final = 64 << 20

# JSON files that no processor of images, sounds or videos reads for more than tokens, which are in
# the key; config.json counts as the engine resolved it. Any other one counts.
_NO_PROCESSORS: Final = frozenset(
    "added_tokens.json adapter_config.json config.json generation_config.json special_tokens_map.json "  # noqa: E501, SIM905
    "tokenizer.json tokenizer_config.json vocab.json".split()
)


def code_digest(folder: Path) -> str:
    """Return 64 hex digits that identify a directory's Python files, at any depth.

    Raises:
        ConfigError: there are none, or one is too large.
        OSError: one cannot be read.
    """
    found = [path for path in folder.rglob("*.py") if path.is_file()]
    if not found:
        raise ConfigError(f"the model brings code of its own, but {folder} holds no Python files")
    return _digest(folder, found)


def processor_digest(folder: Path) -> str:
    """Return 64 hex digits that identify the files that a processor is made from.

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
    """Return 64 hex digits that identify the files that say how weights are quantised.

    Engines look into these if ``config.json`` does not say it. Raises OSError, and ConfigError for
    a file too large.
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
