"""`vua completion`: what makes bash, zsh and fish complete the command's words.

The optional package `argcomplete` does it: the shell calls `vua` itself with what was typed so far.
"""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from types import ModuleType
from typing import Final

from vua.cli.text import SOUND, Write
from vua.errors import ConfigError

__all__ = ["SHELLS", "answer_shell", "completion"]

SHELLS: Final = ("bash", "zsh", "fish")


def completion(shell: str, *, write: Write | None) -> int:
    """Print the lines that one of SHELLS has to read; raises ConfigError without the package."""
    code = _argcomplete().shellcode(["vua"], shell=shell)
    if write is not None:
        write({"shell": shell, "code": code})
    else:
        print(code)
    return SOUND


def answer_shell(parser: argparse.ArgumentParser) -> None:
    """Tell a shell that asks for it what may come next, and end the process; else do nothing."""
    if "_ARGCOMPLETE" in os.environ:
        _argcomplete().autocomplete(parser)


def _argcomplete() -> ModuleType:
    try:
        return import_module("argcomplete")
    except ImportError as problem:
        msg = "the package argcomplete is not installed: pip install argcomplete"
        raise ConfigError(msg) from problem
