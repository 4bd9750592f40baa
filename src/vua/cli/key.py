"""`vua key`: makes keys, and says which one a salt has."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from vua.cli.output import Report
from vua.errors import ConfigError
from vua.security.keyring import SUFFIX, read_key, tenant_of, write_key

__all__ = ["add_key", "key"]


def add_key(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Add the command to the parser."""
    one = commands.add_parser("key", parents=[common], help="make a key, unless it is there")
    one.add_argument("path", metavar="PATH", help="file for the key; with --salt a directory")
    one.add_argument("--salt", metavar="S", help="make the key of this cache salt in PATH")


@dataclass(frozen=True, slots=True)
class Key(Report):
    """A key's file."""

    file: str
    made: bool
    """Now, not before."""

    def describe(self) -> object:
        """Return plain values for programs."""
        return {"file": self.file, "made": self.made}

    def show(self) -> None:
        """Print it."""
        print(f"{self.file}: {'made' if self.made else 'there already'}")


def key(path: str, salt: str | None) -> Key:
    """Make the key file, or check the one that is there.

    Raises ConfigError where a key is there that cannot be used, OSError.
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
