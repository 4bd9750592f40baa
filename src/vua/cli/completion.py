"""`vua completion`: what makes bash, zsh and fish complete the command's words.

The optional package `argcomplete` does it: the shell calls `vua` itself with what was typed so far.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Final

from vua.cli.output import Report
from vua.errors import ConfigError

__all__ = ["SHELLS", "answer_shell", "completion"]

SHELLS: Final = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class Script(Report):
    """What a shell has to read."""

    shell: str
    code_: str

    def describe(self) -> object:
        """Return plain values for programs."""
        return {"shell": self.shell, "code": self.code_}

    def show(self) -> None:
        """Print it."""
        print(self.code_)


def completion(shell: str) -> Script:
    """Return the lines that one of SHELLS has to read; raises ConfigError without the package."""
    return Script(shell, _argcomplete().shellcode(["vua"], shell=shell))


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
