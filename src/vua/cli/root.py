"""The command line as a whole: all commands, and how each run ends.

A command's module is imported when it runs.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Final

import click

from vua.cli.command import COMMANDS, VARIABLE, with_help
from vua.cli.interrupts import INTERRUPTED, interrupts
from vua.cli.output import UNUSABLE, guarded, plain
from vua.errors import ConfigError, StorageError, VUAError

_MODULES: Final = {
    "ls": "ls",
    "inspect": "verify",
    "verify": "verify",
    "top": "looks",
    "doctor": "verify",
    "ui": "ui.server",
    "events": "events",
    "explain": "explain",
    "du": "upkeep",
    "gc": "upkeep",
    "ttl": "upkeep",
    "rm": "upkeep",
    "pin": "upkeep",
    "export": "transfer",
    "import": "transfer",
    "warm": "warm",
    "args": "args",
    "key": "prompt",
    "identify": "args",
    "completion": "args",
}
"""The module of each command."""
_GONE: Final = {
    "advise": "`vua top DIR` says what is evicted, and the engine's metric "
    "vua_saved_prefill_seconds_total what the cache saves under a limit",
    "bench": "`vua doctor DIR --prefill TOKENS/S` says what the storage reads in GB/s and "
    "from which prompt length on loading wins; benchmarks/speed.py in a checkout measures more",
}
"""What to use instead of commands that there were."""


class _Commands(click.Group):
    """All commands, in order; each is imported at first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name in _GONE:
            raise ConfigError(f"there is no such command any more: {_GONE[cmd_name]}")
        if cmd_name not in _MODULES:
            return None
        import_module(f"vua.cli.{_MODULES[cmd_name]}")
        return COMMANDS[cmd_name]


def _show_version(context: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001
    """Show the version, and whether native code is used, which is looked up only here."""
    if value and not context.resilient_parsing:
        from vua import __version__, native  # noqa: PLC0415 - likewise

        print(f"vua {__version__}\n{native.status().text}")
        context.exit()


vua: Final = with_help(
    _Commands(
        "vua",
        params=[
            click.Option(
                ["--version"], is_flag=True, expose_value=False, is_eager=True,
                callback=_show_version, help="show the version, and exit",
            )
        ],
        help="Look into a VUA cache, and keep it in order.",
        epilog="Look: ls, du, top, ui, inspect, explain, events. Check: verify, doctor. "
        "Keep in order: gc, ttl, pin, rm. Carry: export, import. "
        "Fill: warm. Set up: args, key, identify, completion. "
        f"DIR may be left out where the environment's {VARIABLE} names it. Exit status: 0 success, "
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
    logging.getLogger("vua").addHandler(logging.NullHandler())  # the report says it all
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
        text = problem.strerror if isinstance(problem, StorageError) else problem
        print(plain(f"vua {words[0]}: {text or problem}"), file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        return INTERRUPTED
    return code


def _refuse(problem: click.UsageError) -> int:
    """Report a usage error in one line, below the line of usage."""
    context, text, hint = problem.ctx, problem.format_message().rstrip("."), ""
    path = "vua" if context is None else context.command_path
    if isinstance(problem, click.MissingParameter) and problem.param is not None:
        is_option = isinstance(problem.param, click.Option)
        name = problem.param.opts[0] if is_option else problem.param.human_readable_name
        text = f"the following arguments are required: {name}"
        if name == "DIR":
            hint = f": name the cache's directory, or set {VARIABLE}"
    if context is not None:
        print(context.get_usage(), file=sys.stderr)
    end = " See" if text.endswith("?") else "; see"
    print(plain(f"{path}: error: {text}{hint}{end} `{path} --help`"), file=sys.stderr)
    return UNUSABLE
