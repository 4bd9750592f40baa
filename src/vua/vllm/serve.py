"""``vua-vllm serve ...``: vLLM's own server, started with VUA's connector and safe defaults.

Adds one ``--kv-transfer-config`` to the arguments and hands everything to vLLM's command line.
Whatever the user sets in that option wins over the defaults.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Final

from vua.errors import ConfigError
from vua.vllm import CONNECTOR
from vua.vllm.config import ConnectorConfig

__all__ = ["main", "with_connector"]

_OPTION: Final = "--kv-transfer-config"
_PATH_OPTION: Final = "--vua-path"
_DEFAULTS: Final = {
    "kv_connector": CONNECTOR,
    "kv_connector_module_path": "vua.vllm.kv_connector_v1",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
_USAGE: Final = """usage: vua-vllm serve MODEL [--vua-path DIRECTORY] [any argument of vllm serve]

The directory of the KV cache comes from --vua-path, from "shared_storage_path" in
--kv-transfer-config '{"kv_connector_extra_config": {...}}', or from the environment's VUA_PATH.
"""


def with_connector(arguments: Sequence[str]) -> list[str]:
    """Return vLLM's arguments with the connector set.

    Args:
        arguments: as given to ``vua-vllm``; only those of ``serve`` are changed.

    Raises:
        ConfigError: no directory, two different ones, or settings that the connector refuses.

    >>> with_connector(["serve", "m", "--vua-path", "/kv"])[:3]
    ['serve', 'm', '--kv-transfer-config']
    """
    if not arguments or arguments[0] != "serve":
        return list(arguments)
    rest, path = _take(arguments, _PATH_OPTION)
    rest, text = _take(rest, _OPTION)
    if any(argument.startswith(f"{_OPTION}.") for argument in rest):
        msg = f"give {_OPTION} as one JSON object, not as {_OPTION}.KEY options"
        raise ConfigError(msg)
    given = _parsed(text)
    if given.get("kv_connector", CONNECTOR) != CONNECTOR:  # e.g. a MultiConnector: the user knows
        if path is not None:
            msg = f"{_PATH_OPTION} has no effect on the connector {given['kv_connector']!r}"
            raise ConfigError(msg)
        return [*rest, _OPTION, json.dumps(given)]
    config: dict[str, Any] = {**_DEFAULTS, **given}
    extra = dict(given.get("kv_connector_extra_config") or {})
    stated = extra.get("shared_storage_path", path)
    if path is not None and stated != path:
        msg = f"two directories: {_PATH_OPTION} {path} and shared_storage_path {stated!r}"
        raise ConfigError(msg)
    if stated is not None:
        extra["shared_storage_path"] = stated
    extra["shared_storage_path"] = ConnectorConfig.from_extra_config(extra).shared_storage_path
    config["kv_connector_extra_config"] = extra
    return [*rest, _OPTION, json.dumps(config)]


def _take(arguments: Sequence[str], option: str) -> tuple[list[str], str | None]:
    """Take ``option VALUE`` or ``option=VALUE`` out of the arguments; vLLM takes _ for - too."""
    rest: list[str] = []
    value: str | None = None
    waiting = False
    for argument in arguments:
        name, equals, inline = argument.partition("=")
        if waiting:
            value, waiting = argument, False
        elif name.startswith("--") and name.replace("_", "-") == option:
            value, waiting = inline, not equals
        else:
            rest.append(argument)
    if waiting:
        msg = f"{option} needs a value"
        raise ConfigError(msg)
    return rest, value


def _parsed(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except ValueError as problem:
        msg = f"{_OPTION} is not JSON ({problem}): {text:.200}"
        raise ConfigError(msg) from problem
    if not isinstance(given, dict):
        msg = f"{_OPTION} must be a JSON object, found {text:.200}"
        raise ConfigError(msg)
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run vLLM's command line with the connector set; the console script ``vua-vllm``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0 if given else 2
    try:
        sys.argv = ["vllm", *with_connector(given)]
    except ConfigError as problem:
        sys.stderr.write(f"vua-vllm: {problem}\n")
        return 2
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
