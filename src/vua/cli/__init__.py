"""The command `vua`: shows a cache, and maintains it. Only `warm` needs a server.

Every command may run while other processes read and write the cache. Only `gc`, `rm`, `pin`, `ttl`,
`import` and `verify --repair` change it (`doctor` makes a temporary directory);
`key` makes key files. `docs/commands.md` documents exit codes and `--json`.
"""

from __future__ import annotations

# No other imports here: Ctrl-C is quiet only from `take_over` on.
from vua.cli.interrupts import interrupts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Without ``arguments`` it runs the command line of this process, and handles its SIGINT until
    the process ends.
    """
    if arguments is None:
        interrupts.take_over()
    import sys  # noqa: PLC0415 - see above

    from vua.cli.command import run  # noqa: PLC0415 - see above

    return interrupts.ended(run(sys.argv[1:] if arguments is None else [*arguments]))
