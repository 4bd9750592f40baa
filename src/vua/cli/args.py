"""`vua args` and `identify`: what engines are prepared with.

Each argument of an engine is one word of a shell, so that `engine $(vua args sglang /mnt/kv)`
works: what a shell would split or expand is escaped in JSON.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Final

import click

from vua.cli.command import argument, command, option
from vua.cli.output import Report
from vua.connector.config import VLLM_TRANSFER, sglang_arguments
from vua.errors import ConfigError
from vua.io.files import make_folders
from vua.storage.location import directory_of, is_url
from vua.weights import write_note


@command("identify", takes_directory=False)
@argument("model", "directory of the model", metavar="MODELDIR")
def identify(model: str) -> Report:
    """Write a note beside a model's files, so that an image or a volume brings their digests.

    Raises ConfigError, OSError.
    """
    if not Path(model).exists():
        text = f"{model}: expected a directory, found nothing; name the directory of the model"
        raise ConfigError(text)
    note, found = write_note(Path(model))
    weights, nbytes, seconds = found.fingerprint, found.nbytes, round(found.seconds, 1)
    text = f"{note}: weights {weights[:12]}, {nbytes / 1e6:.1f} MB read"
    return Report(text, file=str(note), weights=weights, nbytes=nbytes, seconds=seconds)


ENGINES: Final = ("vllm", "sglang", "lmcache", "docker")
_UNSAFE: Final = re.compile(r"[\s*?\[\]~\\]")
"""What a shell splits or expands in the result of `$(...)`."""


def _json(values: Mapping[str, object]) -> str:
    """Return JSON that a shell leaves in one word; `[` and `]` of lists would be patterns."""
    text = json.dumps(values, separators=(",", ":"))

    def escaped(found: re.Match[str]) -> str:
        return re.sub(r"[ *?\[\]~]", lambda one: f"\\u{ord(one[0]):04x}", found[0])

    return re.sub(r'"(?:[^"\\]|\\.)*"', escaped, text)


def _word(path: str) -> str:
    """Return a path as it is. Raises ConfigError where a shell would split or expand it."""
    if _UNSAFE.search(path):
        raise ConfigError(
            f"{path!r} has spaces or characters that a shell expands: docker's arguments cannot "
            "be printed for it; use a directory without them, or write the arguments by hand"
        )
    return path


def _vllm(path: str) -> tuple[str, ...]:
    own = {"kv_connector_extra_config": {"shared_storage_path": path}}
    return ("--kv-transfer-config", _json({**VLLM_TRANSFER, **own}))


def _sglang(path: str) -> tuple[str, ...]:
    words = ["--enable-cache-report"]
    for name, value in sglang_arguments(path).items():
        words.append(f"--{name.replace('_', '-')}")
        if name.endswith("_config"):
            words.append(_json(json.loads(value)))
        elif value is not True:
            words.append(str(value))
    return tuple(words)


def _lmcache(path: str, *, plain_engines: bool) -> tuple[str, ...]:
    if not plain_engines:
        raise ConfigError(
            "LMCache names K and V by the model's name and the tokens alone; say by "
            "--plain-engines that no engine has LoRA adapters, --hf-overrides, quantisation "
            "that the model's files do not have, or weights updated in place. Engines that do: "
            "use VUA's own connector (`vua args vllm`)"
        )
    adapter = {
        "type": "plugin",
        "module_path": "vua.lmcache.l2_adapter",
        "class_name": "VUAL2Adapter",
        "adapter_params": {"path": path, "plain_engines": True},
    }
    return ("--l2-adapter", _json(adapter))


def _docker(path: str) -> tuple[str, ...]:
    """Run as the directory's owner: VUA works in no other user's directory."""
    directory = directory_of(path)
    if directory is None:
        return ("--gpus", "all", "--ipc=host", "-p", "8000:8000", "-e", f"VUA_PATH={_word(path)}")
    if not directory.is_dir():  # docker would make it as root's
        raise ConfigError(
            f"{path}: expected a directory, found nothing; make it first: "
            f"mkdir -p -m 700 {quote(path)}"
        )
    owner = directory.stat()
    try:
        state = Path("~/.cache/vua-docker").expanduser()
    except RuntimeError:
        raise ConfigError("no home directory for the container's state: set HOME") from None
    if not state.is_dir():  # docker would make it as root's
        make_folders(state)
        if os.geteuid() == 0:
            os.chown(state, owner.st_uid, owner.st_gid)
    return (
        *("--gpus", "all", "--ipc=host", "-p", "8000:8000"),
        *("--user", f"{owner.st_uid}:{owner.st_gid}"),
        *("-e", "HOME=/state", "-e", "USER=vua", "-e", "VUA_PATH=/kv"),
        *("-v", f"{_word(path)}:/kv", "-v", f"{_word(str(state))}:/state"),
    )


@command("args", takes_directory=False)
@argument("engine", "vllm, sglang, lmcache or docker", metavar="ENGINE", type=click.Choice(ENGINES))
@argument("path", "directory of the cache, or URL", metavar="PATH")
@option("--plain-engines", "lmcache: your word that engines only run their files")
def arguments_of(engine: str, path: str, *, plain_engines: bool = False) -> Report:
    """Return the arguments. Raises ConfigError where they cannot be given."""
    where = path if is_url(path) else os.path.abspath(path)  # noqa: PTH100 - links stay
    if engine == "lmcache":
        words = _lmcache(where, plain_engines=plain_engines)
    else:
        words = {"vllm": _vllm, "sglang": _sglang, "docker": _docker}[engine](where)
    return Report(" ".join(words), engine=engine, arguments=words)
