"""The command `vua`: shows a cache, and maintains it. Only `warm` needs a server.

Every command may run while other processes read and write the cache. Only `gc`, `rm`, `pin`, `ttl`,
`import` and `verify --repair` change it (`doctor` makes a temporary directory);
`key` makes key files. `docs/commands.md` documents exit codes and `--json`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # no other imports: Ctrl-C is quiet only from `main` on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Without ``arguments`` it runs the command line of this process. Ctrl-C then ends it at once, as
    SIGKILL does, which a cache survives; see also :func:`vua.cli.command.undoing`.
    """
    if arguments is None and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    import sys  # noqa: PLC0415 - see above

    from vua.cli.command import run  # noqa: PLC0415 - see above

    return run(sys.argv[1:] if arguments is None else [*arguments])
