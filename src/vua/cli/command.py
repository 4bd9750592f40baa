"""How a command is declared: a function with its arguments and options, by `click`; how it is run.

::

    @command("ls")
    @option("-l --long", "list every chunk")
    def ls(directory: str, *, long: bool = False) -> Report: ...

The function stays callable. It returns a report (:mod:`vua.cli.output`), or, if it takes ``output``
and shows its reports itself, an exit status. The given keys are passed as ``security``.

:func:`as_owner` and :func:`asking` guard commands that change a directory: they choose the user,
and ask for confirmation.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click

from vua.cli.output import INTERRUPTED, UNUSABLE, Output, Report, guarded, plain
from vua.errors import ConfigError, StorageError, VUAError, explained

if TYPE_CHECKING:
    from vua.catalog.base import Ask
    from vua.security.settings import Security

_ROOT: Final = 0
_LATER: Final = (
    *("json", "multiprocessing.pool", "multiprocessing.popen_fork", "sqlite3"),
    *("vua.capacity.listing", "vua.catalog.directory", "vua.catalog.probes", "vua.store.namespace"),
)
"""Modules that commands import when they need them."""


@contextlib.contextmanager
def as_owner(directory: str) -> Iterator[None]:
    """Work on a directory as its owner, if run by root.

    So new files belong to the cache's user, and root follows no links of other users. Nothing
    changes for other users, and in root's own directories.
    """
    try:
        status = os.stat(directory)  # noqa: PTH116 - may be any name
    except OSError:
        yield  # the command says what is wrong
        return
    if os.geteuid() != _ROOT or status.st_uid == _ROOT or not stat.S_ISDIR(status.st_mode):
        yield
        return
    for name in _LATER:  # the owner may not be allowed to read root's Python
        with suppress(ImportError):
            import_module(name)
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups([status.st_gid])
    os.setegid(status.st_gid)
    os.seteuid(status.st_uid)
    try:
        yield
    finally:
        os.seteuid(_ROOT)
        os.setegid(gid)
        os.setgroups(groups)


@contextlib.contextmanager
def undoing() -> Iterator[None]:
    """Have Ctrl-C raise KeyboardInterrupt meanwhile: what was begun is removed, then all ends."""
    import signal  # noqa: PLC0415 - help goes without

    if signal.getsignal(signal.SIGINT) != signal.SIG_DFL:
        yield
        return
    came = list[object]()

    def interrupt(*_: object) -> None:
        came.append(None)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if came:  # also where it became another exception on its way
            signal.raise_signal(signal.SIGINT)


def asking(*, yes: bool) -> Ask:
    """Return a function that asks on a terminal whether to continue, and else raises ConfigError.

    Without a terminal, or with ``yes``, it does not ask.
    """

    def ask(question: str) -> None:
        if yes or not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
            return
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise ConfigError("nothing was changed")

    return ask


VARIABLE: Final = "VUA_PATH"
"""Names the directory if a command is given none; engines use it, too."""


class Entry(NamedTuple):
    """A command in the list of all."""

    module: str
    """In :mod:`vua.cli`; imported when the command runs, so that the list costs no import."""
    text: str


GROUPS: Final[dict[str, dict[str, Entry]]] = {
    "Look": {
        "ls": Entry("ls", "list what a cache holds"),
        "du": Entry("upkeep", "show what a cache occupies, and its bounds"),
        "top": Entry("upkeep", "watch a cache in use"),
        "ui": Entry("ui", "show a cache as a web page on this machine"),
        "explain": Entry("explain", "say why a prompt hits or misses"),
        "events": Entry("events", "tell routers which chunks a cache holds"),
    },
    "Check": {
        "verify": Entry("verify", "read every file and check it"),
        "doctor": Entry("verify", "test what VUA relies on"),
    },
    "Keep in order": {
        "gc": Entry("upkeep", "bring a cache within its bounds and sweep it"),
        "ttl": Entry("upkeep", "show or set the time without use after which chunks are deleted"),
        "pin": Entry(
            "upkeep", "protect chunks and their prefixes from eviction; without NAME list the pins"
        ),
        "rm": Entry("upkeep", "delete chunks with all that follows them, or namespaces"),
    },
    "Carry and fill": {
        "export": Entry("transfer", "write chosen prefixes to one file"),
        "import": Entry("transfer", "import what export wrote"),
        "warm": Entry("prompt", "have a running server compute prompts"),
    },
    "Set up": {
        "args": Entry("args", "print an engine's arguments for a cache directory"),
        "key": Entry("prompt", "make a key file, or check an existing one"),
        "identify": Entry("args", "digest a model's weights once for all that start it"),
    },
}
ENTRIES: Final = {name: entry for group in GROUPS.values() for name, entry in group.items()}
COMMANDS: Final[dict[str, click.Command]] = {}
EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "ls": ("vua ls /mnt/kv --sort size", "vua ls /mnt/kv --model qwen --long"),
    "verify": ("vua verify /mnt/kv --repair", "vua verify s3://bucket/kv --sample 10%"),
    "top": ("vua top /mnt/kv --interval 10s",),
    "doctor": ("vua doctor /mnt/kv", "sudo -u vllm vua doctor /mnt/kv"),
    "ui": ("vua ui /mnt/kv --port 8642",),
    "events": ("vua events /mnt/kv --follow --zmq tcp://127.0.0.1:5557",),
    "explain": ("vua explain /mnt/kv --prompt question.txt --model Qwen/Qwen3-8B",),
    "du": ("vua du /mnt/kv --exact",),
    "gc": ("vua gc /mnt/kv --max-bytes 500G --set", "vua gc /mnt/kv --dry-run"),
    "ttl": ("vua ttl /mnt/kv 30d",),
    "rm": ("vua rm /mnt/kv 1cbbd9 --dry-run", "vua rm /mnt/kv --all"),
    "pin": ("vua pin /mnt/kv 4f90a1", "vua pin /mnt/kv"),
    "export": ("vua export /mnt/kv docs.tar 4f90a1 --following",),
    "import": ("vua import /mnt/kv docs.tar",),
    "warm": ("vua warm chats.jsonl --server http://127.0.0.1:8000",),
    "args": ("python -m sglang.launch_server --model-path M $(vua args sglang /mnt/kv)",),
    "identify": ("vua identify /models/llama",),
    "key": ("vua key own.key", "vua key keys --salt tenant-a"),
}
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

F = TypeVar("F", bound=Callable[..., "Report | int"])
W = TypeVar("W", bound=Callable[..., object])
C = TypeVar("C", bound=click.Command)


class _Argument(click.Argument):
    def __init__(self, *words: Any, text: str = "", **more: Any) -> None:
        super().__init__(*words, **more)
        self.text = text


def argument(name: str, text: str, **more: Any) -> Callable[[W], W]:
    """Declare an argument, and its explanation; the rest as for `click.argument`."""
    return click.argument(name, cls=_Argument, text=text, **more)


def option(spec: str, text: str, name: str = "", **more: Any) -> Callable[[W], W]:
    """Declare an option, and its explanation; the rest as for `click.option`.

    ``spec`` has what users write: ``-l --long`` of a flag, ``--max-bytes SIZE`` of a value.
    """
    words = spec.split()
    if words[-1][0] != "-":
        more["metavar"] = words.pop()
    elif "type" not in more:
        more["is_flag"] = True
    return click.option(*words, *filter(None, [name]), help=text, **more)


@option("--key-file FILE", "the directory's own key: the same as the engines'")
@option("--tenant-keys DIR", "keys of cache salts: the same as the engines'")
@option("--encrypt", "chunks of --key-file are encrypted")
def _security(**given: Any) -> Security:
    from vua.security.keyring import check_keys  # noqa: PLC0415 - help goes without
    from vua.security.settings import Security  # noqa: PLC0415 - help goes without

    security = Security(**given)
    check_keys(security)
    return security


def _params(work: Callable[..., object]) -> list[click.Parameter]:
    return [*reversed(getattr(work, "__click_params__", []))]


def command(
    name: str, *, takes_directory: bool = True, as_owner_of: bool = False, makes_it: bool = False
) -> Callable[[F], F]:
    """Declare a command.

    Args:
        name: its name in ENTRIES.
        takes_directory: whether its words begin with the cache's directory.
        as_owner_of: whether root runs it as the directory's owner.
        makes_it: whether it makes a missing directory.
    """

    def declare(work: F) -> F:
        takes, text = inspect.signature(work).parameters, ENTRIES[name].text
        params, keys = _params(work), _params(_security) if "security" in takes else []
        if takes_directory:
            told = "directory of the cache, or URL"
            where = _Argument(["directory"], metavar="DIR", envvar=VARIABLE, text=told)
            params.insert(0, where)

        @option("--json", "print JSON for other programs", name="as_json")
        def run(*, as_json: bool, **options: Any) -> int:
            import logging  # noqa: PLC0415 - help goes without

            from vua.storage.location import is_url  # noqa: PLC0415 - help goes without
            from vua.storage.mark import check_root  # noqa: PLC0415 - help goes without

            logging.getLogger("vua").addHandler(logging.NullHandler())  # the report says it all
            output = Output(is_json=as_json)
            if takes_directory and not makes_it and not is_url(options["directory"]):
                check_root(options["directory"], create=False)
            if keys:
                given = {str(one.name): options.pop(str(one.name)) for one in keys}
                options["security"] = _security(**given)
            if "output" in takes:
                options["output"] = output
            with as_owner(options["directory"]) if as_owner_of else nullcontext():
                found = work(**options)
                return output.show(found) if isinstance(found, Report) else found

        sentence = f"{text[:1].upper()}{text[1:]}."
        params += [*keys, *_params(run)]
        made = _Command(name, params=params, callback=run, help=sentence, short_help=text)
        COMMANDS[name] = with_help(made)
        return work

    return declare


def shows(words: Sequence[str], text: str, what: Callable[[click.Context], str]) -> click.Option:
    """Return an option that shows something, and ends the command."""

    def show(context: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001
        if value and not context.resilient_parsing:
            print(what(context))
            context.exit()

    return click.Option(
        words, is_flag=True, expose_value=False, is_eager=True, callback=show, help=text
    )


def with_help(one: C) -> C:
    """Give a command --help; `click`'s own would bypass the guard of the terminal."""
    one.add_help_option = False
    text = "show this message, and exit"
    one.params.append(shows(["-h", "--help"], text, click.Context.get_help))
    return one


class _Command(click.Command):
    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        arguments = [one for one in self.params if isinstance(one, _Argument)]
        told = [(one.human_readable_name, one.text) for one in arguments]
        if told:
            with formatter.section("Arguments"):
                formatter.write_dl(told)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Examples"):
            for one in EXAMPLES[self.name or ""]:
                formatter.write(f"{'':{formatter.current_indent}}{one}\n")


# -- values ---------------------------------------------------------------------------------------


def duration_s(text: str) -> float:
    """Return the seconds in ``90``, ``90s``, ``30m``, ``12h``, ``1d`` or ``2w``.

    Raises click.BadParameter for anything else.

    >>> duration_s("1.5h")
    5400.0
    """
    unit = text[-1:].lower()
    with suppress(ValueError):
        seconds = float(text[:-1]) * _UNITS_S[unit] if unit in _UNITS_S else float(text)
        if 0 <= seconds < math.inf:
            return seconds
    raise click.BadParameter(f"{text!r:.40} is not a duration; give seconds, or 30m, 12h, 1d, 2w")


def lifetime_s(text: str) -> float:
    """As `duration_s`, but with a unit: ``vua ttl DIR 30`` would delete nearly everything."""
    seconds = duration_s(text)
    if seconds and text[-1:].lower() not in _UNITS_S:
        raise click.BadParameter(
            f"{text!r:.40} has no unit: give {text}s, {text}m, {text}h or {text}d"
        )
    return seconds


def share(text: str) -> float:
    """Return the share in ``10%``. Raises click.BadParameter for anything else.

    >>> share("2.5%")
    0.025
    """
    try:
        part = float(text.removesuffix("%")) / 100 if text.endswith("%") else 0.0
    except ValueError:
        part = 0.0
    if not 0 < part <= 1:
        raise click.BadParameter(f"{text!r:.40} is not a share; give a percentage like 10%")
    return part


# -- the command line as a whole -----------------------------------------------------------------


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(ENTRIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in ENTRIES:
            return None
        import_module(f"vua.cli.{ENTRIES[cmd_name].module}")
        return COMMANDS[cmd_name]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in ENTRIES and not ctx.resilient_parsing and args[0][:1] != "-":
            from difflib import get_close_matches  # noqa: PLC0415 - for this error alone

            near = " or ".join(map(repr, get_close_matches(args[0], ENTRIES, n=3)))
            more = f", did you mean {near}?" if near else ""
            ctx.fail(f"there is no command {args[0]!r}{more}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write them in groups; no command's module is imported."""
        del ctx
        widest = max(map(len, ENTRIES))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{widest}}", one.text) for name, one in group.items()])


def _version(_: click.Context) -> str:
    """Return the version, and whether native code is used, which is looked up only here."""
    from vua import __version__, native  # noqa: PLC0415 - help goes without

    return f"vua {__version__}\n{native.status().text}"


vua: Final = with_help(
    _Commands(
        "vua",
        params=[shows(["--version"], "show the version, and exit", _version)],
        help="Look into a VUA cache, and keep it in order.",
        epilog="`vua help COMMAND` says more about one. "
        f"Without other words DIR may be left out: {VARIABLE} names it. Exit status: 0 success, "
        "1 damage found or work incomplete, 2 usage error or missing directory.",
    )
)  # fmt: skip
"""The command line; a help text or an error fits the terminal's width."""


def run(words: list[str]) -> int:
    """Run one command and return its exit status."""
    with guarded():
        return _run(words)


def _run(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = [*filter("help".__ne__, words), "--help"]
    try:
        with vua.make_context("vua", words or ["--help"]) as context:
            code: int = vua.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.UsageError as problem:
        return _refuse(problem)
    except BrokenPipeError:  # `vua ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (VUAError, OSError) as problem:
        if isinstance(problem, OSError) and not isinstance(problem, StorageError):
            problem = explained(problem, str(problem.filename or "a file"))
        text = problem.strerror if isinstance(problem, OSError) else problem
        print(plain(f"vua {words[0]}: {text or problem}"), file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        return INTERRUPTED
    return code


def _refuse(problem: click.UsageError) -> int:
    context, text = problem.ctx, " ".join(problem.format_message().split()).rstrip(".")
    path = "vua" if context is None else context.command_path
    if isinstance(problem, click.MissingParameter) and "'DIR'" in text:
        text += f": name the cache's directory, or set {VARIABLE}"
    if context is not None:
        print(context.get_usage(), file=sys.stderr)
    end = " See" if text.endswith("?") else "; see"
    print(plain(f"{path}: error: {text}{end} `{path} --help`"), file=sys.stderr)
    return UNUSABLE
