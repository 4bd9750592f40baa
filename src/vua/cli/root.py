"""The command line as a whole: all commands, and how each run ends.

A command's module is imported when it runs.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Final

import click

from vua.cli.command import COMMANDS, ENTRIES, GROUPS, VARIABLE, shows, with_help
from vua.cli.interrupts import INTERRUPTED, interrupts
from vua.cli.output import UNUSABLE, guarded, plain
from vua.errors import StorageError, VUAError, explained

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


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

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem  # noqa: PLC0415 - for shells alone

        near = [name for name in ENTRIES if name.startswith(incomplete)]
        found = [CompletionItem(name, help=ENTRIES[name].text) for name in near]
        return found + click.Command.shell_complete(self, ctx, incomplete)

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
    from vua import __version__, native  # noqa: PLC0415 - see above

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
        try:
            return _run(words)
        except BaseException:
            if interrupts.came:  # and became another exception on its way
                return INTERRUPTED
            raise


def _run(words: list[str]) -> int:  # noqa: PLR0911 - a status for each way to end
    if words[:1] == ["help"]:
        words = [*filter("help".__ne__, words), "--help"]
    try:
        if asked := os.environ.get("_VUA_COMPLETE"):  # a shell asks for completions
            from click.shell_completion import shell_complete  # noqa: PLC0415

            return shell_complete(vua, {}, "vua", "_VUA_COMPLETE", asked)
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
        if interrupts.came:
            return INTERRUPTED
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
