"""`vua completion`: scripts that make bash, zsh and fish complete the command's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import click
from click.shell_completion import get_completion_class

from vua.cli.command import argument, command
from vua.cli.output import Report
from vua.cli.root import vua
from vua.errors import ConfigError

__all__ = ["SHELLS", "Script", "completion"]

SHELLS: Final = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class Script(Report):
    """A completion script."""

    shell: str
    text: str

    def describe(self) -> object:
        return {"shell": self.shell, "code": self.text}

    def show(self) -> None:
        print(self.text)


@command("completion", "print a shell's completion script", takes_directory=False)
@argument("shell", "bash, zsh or fish", metavar="SHELL", type=click.Choice(SHELLS))
def completion(shell: str) -> Script:
    """Return the script for one of SHELLS; it asks `vua` itself for completions."""
    kind = get_completion_class(shell)
    if kind is None:
        raise ConfigError(f"{shell} is not known to the package click")
    return Script(shell, kind(vua, {}, "vua", "_VUA_COMPLETE").source())
