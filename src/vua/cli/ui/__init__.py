"""`vua ui`: a cache directory as a local web page. Reads, and changes nothing."""

from __future__ import annotations

import contextlib

from vua.cli.prompt import tokenizer
from vua.cli.text import SOUND, Write
from vua.cli.ui.server import Server
from vua.cli.ui.state import State
from vua.cli.walk import open_root
from vua.errors import ConfigError
from vua.security.settings import Security

__all__ = ["ui"]


def ui(
    directory: str,
    *,
    port: int,
    model: str | None,
    security: Security,
    write: Write | None,
) -> int:
    """Serve the page until Ctrl-C; ``model`` is the directory of a tokenizer for pasted texts.

    Raises ConfigError where the port is taken or there is no tokenizer, StorageError where there is
    no such directory.
    """
    # Forks: before this process speaks to a bucket, whose connections no child may have.
    state = State(directory, security, None if model is None else tokenizer(model))
    try:
        open_root(directory)
        try:
            server = Server(port, state)
        except (OSError, OverflowError) as problem:
            msg = (
                f"port {port} of 127.0.0.1 cannot be taken: {problem}; leave out --port for another"
            )
            raise ConfigError(msg) from problem
        with server, contextlib.suppress(KeyboardInterrupt):
            if write is not None:
                write({"directory": directory, "url": server.url})
            else:
                print(f"{directory}: open {server.url}\nCtrl-C ends it", flush=True)
            server.serve_forever()
    finally:
        state.close()
    return SOUND
