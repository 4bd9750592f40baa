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
from vua.cli.advise import advise
from vua.cli.bench import add_arguments, bench
from vua.cli.completion import SHELLS, answer_shell, completion
from vua.cli.doctor import doctor
from vua.cli.events import Publishing, events
from vua.cli.explain import Question, explain
from vua.cli.key import add_key, key
from vua.cli.looks import top
from vua.cli.ls import SORTS, ls
from vua.cli.output import UNUSABLE, Output, Report, guarded, plain
from vua.cli.owner import as_owner
from vua.cli.transfer import ExportChoice, export, import_
from vua.cli.ui.server import ui
from vua.cli.upkeep import adopt, du, gc, pins, rm, ttl
from vua.cli.values import VARIABLE, Parser, duration_s, parsed, share
from vua.cli.verify import inspect, verify
from vua.cli.warm import add_warm, warm
from vua.errors import StorageError, VUAError
from vua.security.keyring import check_keys
from vua.security.settings import Security

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
    _add_events(commands, common)
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


def _add_events(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    common: argparse.ArgumentParser,
) -> None:
    """Add the command's arguments."""
    one = commands.add_parser(
        "events", parents=[common], help="tell routers which chunks a cache holds"
    )
    one.add_argument("directory", metavar="DIR", help="directory of the cache")
    one.add_argument("--follow", action="store_true", help="go on with what is stored and removed")
    one.add_argument(
        "--interval",
        metavar="TIME",
        type=duration_s,
        help="between looks; default 5s, of a bucket 60s",
    )
    one.add_argument(
        "--locality",
        type=str.upper,
        choices=("LOCAL", "REMOTE"),
        help="of the storage; default by the file system's kind",
    )
    one.add_argument(
        "--zmq", metavar="ENDPOINT", help="publish there, like tcp://127.0.0.1:5557, not on stdout"
    )
    one.add_argument(
        "--connect", action="store_true", help="the router has bound that endpoint: connect to it"
    )
    one.add_argument("--topic", default="", help="of the messages; default none")
    one.add_argument(
        "--replay-endpoint", metavar="ENDPOINT", help="answer there who asks for missed batches"
    )


def key_arguments() -> argparse.ArgumentParser:
    """Return a parent for parsers of commands that can use keys; see :func:`security_of`."""
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("keys", "as the engines are told them; none by default")
    group.add_argument("--key-file", metavar="FILE", help="the directory's own key")
    group.add_argument("--tenant-keys", metavar="DIR", help="keys of cache salts")
    group.add_argument("--encrypt", action="store_true", help="what is --key-file's is encrypted")
    return parent


def security_of(options: argparse.Namespace) -> Security:
    """Return what the arguments say. Raises ConfigError where such keys cannot be used."""
    security = Security(
        key_file=options.key_file, tenant_keys=options.tenant_keys, encrypt=options.encrypt
    )
    check_keys(security)
    return security


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


def _question(options: argparse.Namespace) -> Question:
    return Question(**{field.name: getattr(options, field.name) for field in fields(Question)})


def _choice(options: argparse.Namespace) -> ExportChoice:
    return ExportChoice(**{one.name: getattr(options, one.name) for one in fields(ExportChoice)})


def _gc(options: argparse.Namespace) -> Report:
    inodes = options.min_free_inodes
    said = Limits(
        max_bytes=options.max_bytes,
        min_free_bytes=options.min_free,
        ttl_s=options.ttl,
        max_bytes_per_salt=options.max_per_salt,
        min_free_inodes=int(inodes) if (inodes or "").isdigit() else inodes,
    )
    return gc(
        *(options.directory, said), keep=options.set, quick=options.quick,
        lost_keys=options.lost_keys, dry_run=options.dry_run, yes=options.yes,
        security=options.security,
    )  # fmt: skip


_RUN: Final[dict[str, Callable[[argparse.Namespace, Output], Report | int]]] = {
    "ls": lambda said, _: ls(said.directory, long=said.long, sort=said.sort),
    "inspect": lambda said, _: inspect(said.files),
    "advise": lambda said, _: advise(said.directory, Limits(max_bytes=said.max_bytes)),
    "bench": lambda said, _: bench(said),
    "completion": lambda said, _: completion(said.shell),
    "verify": lambda said, _: verify(
        said.directory, repair=said.repair, part=said.sample, security=said.security
    ),
    "doctor": lambda said, _: doctor(said.directory, trusted_uids=said.trusted_uids),
    "events": lambda said, _: events(
        said.directory, follow=said.follow, interval_s=said.interval, locality=said.locality,
        how=Publishing(said.zmq, said.connect, said.topic, said.replay_endpoint),
    ),
    "warm": lambda said, output: warm(said, output=output),
    "top": lambda said, output: top(said.directory, said.interval, once=said.once, output=output),
    "ui": lambda said, output: ui(
        said.directory, port=said.port, model=said.tokenizer, security=said.security, output=output
    ),
    "explain": lambda said, _: explain(said.directory, _question(said)),
    "export": lambda said, _: export(said.directory, said.file, _choice(said), as_json=said.json),
    "key": lambda said, _: key(said.path, said.salt),
    "import": lambda said, _: import_(said.directory, said.file),
    "du": lambda said, _: du(said.directory, quick=said.quick),
    "gc": lambda said, _: _gc(said),
    "ttl": lambda said, _: ttl(said.directory, said.seconds, off=said.off),
    "rm": lambda said, _: rm(
        *(said.directory, said.names), everything=said.all, force=said.pinned,
        dry_run=said.dry_run, yes=said.yes,
    ),
    "pin": lambda said, _: pins(said.directory, said.names, remove=said.remove),
    "adopt": lambda said, output: adopt(said.directory, yes=said.yes, output=output),
}  # fmt: skip

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
    output = Output("json" if options.json else "person")
    try:
        if "key_file" in options:
            options.security = security_of(options)
        with as_owner(options.directory) if options.command in _AS_OWNER else nullcontext():
            found = _RUN[options.command](options, output)
        code = output.show(found) if isinstance(found, Report) else found
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
