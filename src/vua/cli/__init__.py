"""The command `vua`: looks into a cache directory. Only `warm` needs an engine.

All of it may run while others read and write there; `gc`, `rm`, `pin`, `ttl`, `import`, `adopt`,
`warm` and `verify --repair` alone change anything (`doctor` makes a directory for a while); `key`
makes keys, elsewhere. `docs/cli.md` has the exit codes and what `--json` prints. Where the
environment has VUA_PATH the directory may be left out.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Final

from vua import __version__, native
from vua.capacity.limits import Limits
from vua.cli.adopting import adopt
from vua.cli.advise import advise
from vua.cli.arguments import VARIABLE, Parser, duration_s, parsed, share
from vua.cli.bench import add_arguments, bench
from vua.cli.bucket import adopt_bucket, du_bucket, gc_bucket, rm_bucket
from vua.cli.bucket_doctor import doctor_bucket
from vua.cli.bucket_keep import pins_bucket, ttl_bucket
from vua.cli.capacity import du, gc, ttl
from vua.cli.completion import SHELLS, answer_shell, completion
from vua.cli.doctor import doctor
from vua.cli.events import add_events, events
from vua.cli.explain import Question, explain
from vua.cli.exporting import ExportChoice, export
from vua.cli.importing import import_
from vua.cli.inspection import inspect
from vua.cli.key import add_key, key
from vua.cli.keys import key_arguments, security_of
from vua.cli.listing import SORTS, ls
from vua.cli.owner import as_owner
from vua.cli.removal import pins, rm
from vua.cli.text import UNUSABLE, Write, as_json, guarded, plain
from vua.cli.top import top
from vua.cli.ui import ui
from vua.cli.verification import verify
from vua.cli.warm import add_warm, warm
from vua.errors import StorageError, VUAError
from vua.storage.urls import is_url

__all__ = ["main", "make_parser"]


class _Version(argparse.Action):
    """Shows the version, and whether native code is in use: looked for only when it is asked."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print it and end the program."""
        print(f"vua {__version__}\n{native.status().text}")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Return what takes the command line apart, all commands of it."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON for other programs")
    keys = key_arguments()
    parser: argparse.ArgumentParser = Parser(
        prog="vua",
        description="Look into a VUA cache directory.",
        epilog="Look: ls, du, top, ui, inspect, explain, events. Check: verify, doctor. "
        "Keep in order: gc, ttl, pin, rm, adopt. Carry: export, import. "
        "Measure: bench, advise. Fill: warm. Set up: key, completion. "
        f"DIR may be left out where the environment's {VARIABLE} names it. Exit status: 0 "
        "all is well, 1 damage or not all done, 2 no sense or no such directory.",
    )
    parser.add_argument("--version", action=_Version, help="show the version, and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    one = commands.add_parser("ls", parents=[common], help="list what a directory holds")
    one.add_argument("directory", metavar="DIR", help="directory of the cache")
    one.add_argument("-l", "--long", action="store_true", help="list every chunk")
    one.add_argument(
        "--sort",
        choices=SORTS,
        default="name",
        help="the largest or newest first; default by name",
    )

    one = commands.add_parser("inspect", parents=[common], help="show what entries say and are")
    one.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="file of one chunk; or DIR NAME ..., first digits of its chunks",
    )

    one = commands.add_parser("verify", parents=[common, keys], help="read every file and check it")
    one.add_argument("directory", metavar="DIR", help="directory of the cache")
    one.add_argument("--repair", action="store_true", help="take what is damaged out of sight")
    one.add_argument(
        "--sample", metavar="SHARE", type=share, default=1.0, help="only a random part, like 10%%"
    )
    one = commands.add_parser("top", parents=[common], help="watch a directory in use")
    one.add_argument("directory", metavar="DIR", help="directory of the cache")
    one.add_argument(
        "--interval",
        metavar="TIME",
        type=duration_s,
        help="between looks; default 2s, of a bucket 60s",
    )
    one.add_argument("--once", action="store_true", help="look once, over one interval")
    one = commands.add_parser("doctor", parents=[common], help="test what VUA relies on")
    one.add_argument("directory", metavar="DIR", help="directory of the cache")
    one.add_argument(
        "--trusted-uids",
        metavar="UIDS",
        default="",
        help='as engines are told: "any", or 1000,1001',
    )
    one = commands.add_parser(
        "ui", parents=[common, keys], help="show a directory as a web page on this machine"
    )
    one.add_argument("directory", metavar="DIR", help="directory of the cache")
    one.add_argument(
        "--port", metavar="N", type=int, default=0, help="of 127.0.0.1; default one that is free"
    )
    one.add_argument(
        "--tokenizer", metavar="MODELDIR", help="whose tokenizer.json takes texts to explain"
    )
    add_events(commands, common)
    _add_explain(commands, common, keys)
    _add_upkeep(commands, common, keys)
    _add_transfer(commands, common, keys)

    add_warm(commands, common, keys)
    add_key(commands, common)

    one = commands.add_parser(
        "bench", parents=[common], help="measure a directory, or play a trace"
    )
    add_arguments(one)
    one = commands.add_parser(
        "completion", parents=[common], help="print what makes a shell complete these words"
    )
    one.add_argument("shell", choices=SHELLS)
    return parser


def _add_explain(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    common: argparse.ArgumentParser,
    keys: argparse.ArgumentParser,
) -> None:
    one = commands.add_parser(
        "explain", parents=[common, keys], help="say why a prompt hits or misses"
    )
    one.add_argument("directory", metavar="DIR", help="directory of the cache")
    what = one.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--tokens", metavar="FILE", help="token ids: a JSON list, or integers; - stdin"
    )
    what.add_argument("--prompt", metavar="FILE", help="text for --model's tokenizer.json; - stdin")
    one.add_argument("--model", metavar="MODELDIR", help="the model's directory")
    one.add_argument("--namespace", metavar="NS", default="", help="first digits of a namespace")
    one.add_argument("--chunk-tokens", metavar="N", type=int, help="tokens per chunk")
    one.add_argument(
        "--block-tokens", metavar="N", type=int, help="the engine's block_size; default 16 and 128"
    )
    one.add_argument("--salt", metavar="S", default="", help="the requests' cache salt")
    one.add_argument("--epoch", metavar="E", default="", help="the engine's epoch, with --model")
    one.add_argument("--quick", action="store_true", help="do not look for other continuations")


def _run_explain(options: argparse.Namespace, write: Write | None) -> int:
    names = (field.name for field in fields(Question))
    question = Question(**{name: getattr(options, name) for name in names})
    return explain(options.directory, question, write=write)


def _add_upkeep(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    common: argparse.ArgumentParser,
    keys: argparse.ArgumentParser,
) -> None:
    def add(name: str, text: str, *more: argparse.ArgumentParser) -> argparse.ArgumentParser:
        one = commands.add_parser(name, parents=[common, *more], help=text)
        one.add_argument("directory", metavar="DIR", help="directory of the cache")
        return one

    one = add("du", "show what a directory occupies, and its bounds")
    one.add_argument("--quick", action="store_true", help="estimate it from a sample")

    one = add("advise", "say what more or less room would bring, from the requests of engines")
    one.add_argument(
        "--max-bytes", metavar="SIZE", help="as engines are told, if the directory has more room"
    )

    one = add("gc", "bring a directory within its bounds and sweep it", keys)
    size = "bytes, 500G or a share of the disk like 80%%"
    one.add_argument("--max-bytes", metavar="SIZE", help=f"of the whole directory: {size}")
    one.add_argument("--min-free", metavar="SIZE", help="left free on the disk")
    one.add_argument("--max-per-salt", metavar="SIZE", help="of each cache salt's chunks")
    one.add_argument(
        "--min-free-inodes", metavar="N", help="inodes to be left free, or a share like 2%%"
    )
    one.add_argument(
        "--ttl", metavar="TIME", type=duration_s, help="delete what was not used so long: 1d, 12h"
    )
    _add_care(one)
    one.add_argument("--set", action="store_true", help="keep these in bounds.json, for everybody")
    one.add_argument("--quick", action="store_true", help="do not look for orphans and salts")
    one.add_argument(
        "--lost-keys",
        action="store_true",
        help="delete what is sealed with a key that is none of those given",
    )

    one = add("ttl", "show or set the time without use after which chunks are deleted")
    time = "seconds, or 30m, 12h, 1d, 2w"
    one.add_argument("seconds", metavar="TIME", nargs="?", type=duration_s, help=time)
    one.add_argument("--off", action="store_true", help="keep chunks for as long as there is room")

    one = add("rm", "delete chunks with all that follows them, or namespaces")
    one.add_argument("names", metavar="NAME", nargs="*", help="6 or more hex digits of a name")
    one.add_argument("--all", action="store_true", help="everything")
    one.add_argument("--pinned", action="store_true", help="pinned chunks too")
    _add_care(one)

    one = add("pin", "keep chunks and their prefixes; without NAME list what is kept")
    one.add_argument("names", metavar="NAME", nargs="*", help="6 or more hex digits of a chunk's")
    one.add_argument("--remove", action="store_true", help="unpin")

    one = add("adopt", "let VUA delete its own files in a directory that it did not make")
    one.add_argument("--yes", action="store_true", help="do not ask")


def _add_care(one: argparse.ArgumentParser) -> None:
    one.add_argument("--dry-run", action="store_true", help="only say what would go")
    one.add_argument("--yes", action="store_true", help="do not ask (only done on a terminal)")


def _add_transfer(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    common: argparse.ArgumentParser,
    keys: argparse.ArgumentParser,
) -> None:
    one = commands.add_parser(
        "export", parents=[common, keys], help="write chosen prefixes to one file"
    )
    one.add_argument("directory", metavar="DIR", help="directory of the cache")
    one.add_argument("file", metavar="FILE", help="archive to write; - stdout")
    one.add_argument("names", metavar="NAME", nargs="*", help="6 or more hex digits of a name")
    one.add_argument("--following", action="store_true", help="also what follows these chunks")
    one.add_argument("--tokens", metavar="FILE", help="what is stored of these token ids")
    one.add_argument("--prompt", metavar="FILE", help="what is stored of this text")
    one.add_argument("--model", metavar="MODELDIR", help="for the tokenizer of --prompt")
    one.add_argument("--salt", metavar="S", default="", help="the requests' cache salt")
    one.add_argument("--all", dest="everything", action="store_true", help="everything")
    one = commands.add_parser("import", parents=[common], help="take in what export wrote")
    one.add_argument("directory", metavar="DIR", help="directory of the cache")
    one.add_argument("file", metavar="FILE", help="archive to read; - stdin")


def _run_export(options: argparse.Namespace, write: Write | None) -> int:
    names = (field.name for field in fields(ExportChoice))
    choice = ExportChoice(**{name: getattr(options, name) for name in names})
    return export(options.directory, options.file, choice, write=write)


def _run_upkeep(options: argparse.Namespace, write: Write | None) -> int:
    where = options.directory
    if options.command == "du":
        return du(where, quick=options.quick, write=write)
    if options.command == "ttl":
        return ttl(where, options.seconds, off=options.off, write=write)
    if options.command == "rm":
        return rm(
            *(where, options.names), everything=options.all, force=options.pinned,
            dry_run=options.dry_run, yes=options.yes, write=write,
        )  # fmt: skip
    if options.command == "adopt":
        return adopt(where, yes=options.yes, write=write)
    if options.command == "pin":
        return pins(where, options.names, remove=options.remove, write=write)
    inodes = options.min_free_inodes
    said = Limits(
        max_bytes=options.max_bytes,
        min_free_bytes=options.min_free,
        ttl_s=options.ttl,
        max_bytes_per_salt=options.max_per_salt,
        min_free_inodes=int(inodes) if (inodes or "").isdigit() else inodes,
    )
    return gc(
        where,
        said,
        keep=options.set,
        quick=options.quick,
        lost_keys=options.lost_keys,
        dry_run=options.dry_run,
        yes=options.yes,
        security=options.security,
        write=write,
    )


_RUN: Final[dict[str, Callable[[argparse.Namespace, Write | None], int]]] = {
    "ls": lambda said, write: ls(said.directory, long=said.long, sort=said.sort, write=write),
    "inspect": lambda said, write: inspect(said.files, write=write),
    "advise": lambda said, write: advise(
        said.directory, Limits(max_bytes=said.max_bytes), write=write
    ),
    "bench": lambda said, write: bench(said, write=write),
    "completion": lambda said, write: completion(said.shell, write=write),
    "verify": lambda said, write: verify(
        said.directory, repair=said.repair, part=said.sample, security=said.security, write=write
    ),
    "doctor": lambda said, write: doctor(
        said.directory, trusted_uids=said.trusted_uids, write=write
    ),
    "events": lambda said, _: events(said),
    "warm": lambda said, write: warm(said, write=write),
    "top": lambda said, write: top(said.directory, said.interval, once=said.once, write=write),
    "ui": lambda said, write: ui(
        said.directory,
        port=said.port,
        model=said.tokenizer,
        security=said.security,
        write=write,
    ),
    "explain": _run_explain,
    "export": _run_export,
    "key": lambda said, write: key(said.path, said.salt, write=write),
    "import": lambda said, write: import_(said.directory, said.file, write=write),
}

_ON_BUCKETS: Final[dict[str, Callable[[argparse.Namespace, Write | None], int]]] = {
    "du": lambda said, write: du_bucket(said.directory, write=write),
    "doctor": lambda said, write: doctor_bucket(said.directory, write=write),
    "adopt": lambda said, write: adopt_bucket(said.directory, write=write),
    "rm": lambda said, write: rm_bucket(
        *(said.directory, said.names), everything=said.all, force=said.pinned,
        dry_run=said.dry_run, yes=said.yes, write=write,
    ),
    "pin": lambda said, write: pins_bucket(
        said.directory, said.names, remove=said.remove, write=write
    ),
    "ttl": lambda said, write: ttl_bucket(said.directory, said.seconds, off=said.off, write=write),
    "gc": lambda said, write: gc_bucket(
        *(said.directory, Limits(max_bytes=said.max_bytes, min_free_bytes=said.min_free,
                                 ttl_s=said.ttl, max_bytes_per_salt=said.max_per_salt)),
        keep=said.set, security=said.security if said.lost_keys else None,
        dry_run=said.dry_run, yes=said.yes, write=write,
    ),
}  # fmt: skip
"""What is done otherwise with a cache in a bucket; the rest takes both."""

_AS_OWNER: Final = frozenset({"adopt", "advise", "du", "gc", "pin", "rm", "ttl", "ui", "verify"})
"""Root does these as the user whose the directory is; `import` when it has opened its archive."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; usage errors exit with 2 as argparse does."""
    with guarded():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    parser = make_parser()
    answer_shell(parser)
    options = parsed(parser, sys.argv[1:] if arguments is None else arguments)
    logging.getLogger("vua").addHandler(logging.NullHandler())  # the report says it all
    try:
        if "key_file" in options:
            options.security = security_of(options)
        run, write = (
            _RUN.get(options.command, _run_upkeep),
            as_json if options.json else None,
        )
        if is_url(getattr(options, "directory", None)):
            run = _ON_BUCKETS.get(options.command, run)
        with as_owner(options.directory) if options.command in _AS_OWNER else nullcontext():
            code = run(options, write)
        sys.stdout.flush()
    except BrokenPipeError:  # `vua ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (VUAError, OSError) as problem:
        text = problem.strerror if isinstance(problem, StorageError) else problem
        print(plain(f"vua {options.command}: {text or problem}"), file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        return 130
    return code
