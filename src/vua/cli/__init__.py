"""The command `vua`: looks into a cache directory. Needs no engine, no GPU and no server.

Nothing here changes a directory, and all of it may run while others write there. Exit codes: 0
all is well, 1 damage was found, 2 the question makes no sense (or the directory cannot be read).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from vua import __version__
from vua.cli.bench import add_arguments, bench
from vua.cli.inspection import inspect
from vua.cli.listing import ls
from vua.cli.text import UNUSABLE, as_json
from vua.cli.verification import verify
from vua.errors import VUAError

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON for other programs")
    parser = argparse.ArgumentParser(prog="vua", description="Look into a VUA cache directory.")
    parser.add_argument("--version", action="version", version=f"vua {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    one = commands.add_parser("ls", parents=[common], help="list what a directory holds")
    one.add_argument("directory", metavar="DIR", help="directory of the cache")
    one.add_argument("-l", "--long", action="store_true", help="list every chunk")

    one = commands.add_parser("inspect", parents=[common], help="show what entries say and are")
    one.add_argument("files", metavar="FILE", nargs="+", help="file of one chunk")

    one = commands.add_parser("verify", parents=[common], help="read every file and check it")
    one.add_argument("directory", metavar="DIR", help="directory of the cache")

    one = commands.add_parser("bench", parents=[common], help="measure VUA, or a directory")
    add_arguments(one)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; usage errors exit with 2 as argparse does."""
    options = _parser().parse_args(arguments)
    logging.getLogger("vua").addHandler(logging.NullHandler())  # the report says it all
    write = as_json if options.json else None
    try:
        if options.command == "ls":
            code = ls(options.directory, long=options.long, write=write)
        elif options.command == "inspect":
            code = inspect(options.files, write=write)
        elif options.command == "bench":
            code = bench(options, write=write)
        else:
            code = verify(options.directory, write=write)
        sys.stdout.flush()
    except BrokenPipeError:  # `vua ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (VUAError, OSError) as problem:
        print(f"vua {options.command}: {problem}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        return 130
    return code
