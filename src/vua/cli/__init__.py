"""The command `vua`: looks into a cache directory. Needs no engine, no GPU and no server.

All of it may run while others read and write there; `gc`, `rm`, `pin` and `ttl` alone change
anything (`doctor` makes a directory for a while); `key` makes keys, elsewhere. Exit codes: 0 all is
well, 1 damage was found (or a directory stays beyond its bounds, pins kept something, `doctor`
found something bad), 2 the question makes no sense (or the directory cannot be read).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields

from vua import __version__
from vua.bounds import Bounds
from vua.cli.bench import add_arguments, bench
from vua.cli.capacity import du, gc, ttl
from vua.cli.doctor import doctor
from vua.cli.explain import Question, explain
from vua.cli.inspection import inspect
from vua.cli.key import add_key, key
from vua.cli.listing import ls
from vua.cli.removal import pins, rm
from vua.cli.text import UNUSABLE, Write, as_json
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
    one = commands.add_parser("doctor", parents=[common], help="test what VUA relies on")
    one.add_argument("directory", metavar="DIR", help="directory of the cache")
    _add_explain(commands, common)
    _add_upkeep(commands, common)

    add_key(commands, common)

    one = commands.add_parser("bench", parents=[common], help="measure VUA, or a directory")
    add_arguments(one)
    return parser


def _add_explain(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    one = commands.add_parser("explain", parents=[common], help="say why a prompt hits or misses")
    one.add_argument("directory", metavar="DIR", help="directory of the cache")
    what = one.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--tokens", metavar="FILE", help="token ids: a JSON list, or integers; - stdin"
    )
    what.add_argument("--prompt", metavar="FILE", help="text for --model's tokenizer.json; - stdin")
    one.add_argument("--model", metavar="MODELDIR", help="the model's directory")
    one.add_argument("--namespace", metavar="NS", default="", help="first digits of a namespace")
    one.add_argument("--chunk-tokens", metavar="N", type=int, help="tokens per chunk")
    one.add_argument("--salt", metavar="S", default="", help="the requests' cache salt")
    one.add_argument("--epoch", metavar="E", default="", help="the engine's epoch, with --model")
    one.add_argument("--quick", action="store_true", help="do not look for other continuations")


def _run_explain(options: argparse.Namespace, write: Write | None) -> int:
    names = (field.name for field in fields(Question))
    question = Question(**{name: getattr(options, name) for name in names})
    return explain(options.directory, question, write=write)


def _add_upkeep(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    def add(name: str, text: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, parents=[common], help=text)
        one.add_argument("directory", metavar="DIR", help="directory of the cache")
        return one

    one = add("du", "show what a directory occupies, and its bounds")
    one.add_argument("--quick", action="store_true", help="estimate it from a sample")

    one = add("gc", "bring a directory within its bounds and sweep it")
    size = "bytes, 500G or a share of the disk like 80%%"
    one.add_argument("--max-bytes", metavar="SIZE", help=f"of the whole directory: {size}")
    one.add_argument("--min-free", metavar="SIZE", help="left free on the disk")
    one.add_argument("--max-per-salt", metavar="SIZE", help="of each cache salt's chunks")
    one.add_argument(
        "--ttl", metavar="SECONDS", type=float, help="delete what was not used so long"
    )
    one.add_argument("--set", action="store_true", help="keep these in bounds.json, for everybody")
    one.add_argument("--quick", action="store_true", help="do not look for orphans and salts")

    one = add("ttl", "show or set the time without use after which chunks are deleted")
    one.add_argument("seconds", metavar="SECONDS", nargs="?", type=float)
    one.add_argument("--off", action="store_true", help="keep chunks for as long as there is room")

    one = add("rm", "delete chunks with all that follows them, or namespaces")
    one.add_argument("names", metavar="NAME", nargs="*", help="6 or more hex digits of a name")
    one.add_argument("--all", action="store_true", help="everything")
    one.add_argument("--pinned", action="store_true", help="pinned chunks too")

    one = add("pin", "keep chunks and their prefixes; without NAME list what is kept")
    one.add_argument("names", metavar="NAME", nargs="*", help="6 or more hex digits of a chunk's")
    one.add_argument("--remove", action="store_true", help="unpin")


def _run_upkeep(options: argparse.Namespace, write: Write | None) -> int:
    where = options.directory
    if options.command == "du":
        return du(where, quick=options.quick, write=write)
    if options.command == "ttl":
        return ttl(where, options.seconds, off=options.off, write=write)
    if options.command == "rm":
        return rm(where, options.names, everything=options.all, force=options.pinned, write=write)
    if options.command == "pin":
        return pins(where, options.names, remove=options.remove, write=write)
    said = Bounds(
        max_bytes=options.max_bytes,
        min_free_bytes=options.min_free,
        ttl_s=options.ttl,
        max_bytes_per_salt=options.max_per_salt,
    )
    return gc(where, said, keep=options.set, quick=options.quick, write=write)


def _run(options: argparse.Namespace, write: Write | None) -> int:
    where = getattr(options, "directory", "")
    runs: dict[str, Callable[[], int]] = {
        "ls": lambda: ls(where, long=options.long, write=write),
        "inspect": lambda: inspect(options.files, write=write),
        "bench": lambda: bench(options, write=write),
        "verify": lambda: verify(where, write=write),
        "doctor": lambda: doctor(where, write=write),
        "explain": lambda: _run_explain(options, write),
        "key": lambda: key(options.path, options.salt, write=write),
    }
    return runs.get(options.command, lambda: _run_upkeep(options, write))()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; usage errors exit with 2 as argparse does."""
    options = _parser().parse_args(arguments)
    logging.getLogger("vua").addHandler(logging.NullHandler())  # the report says it all
    write = as_json if options.json else None
    try:
        code = _run(options, write)
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
