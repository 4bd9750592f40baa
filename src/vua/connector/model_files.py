"""Where the files of the model lie that an engine serves. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from vua.connector.cache_spec import UncachedError

__all__ = ["local_directory"]


def local_directory(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Return where a model's files lie on this machine.

    Args:
        model: a path, or a name on the Hugging Face hub.
        revision: the hub's, for a name.
        download_dir: where the engine downloads to; None: where Hugging Face does.

    Raises:
        UncachedError: there are none.
    """
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - for names alone
    from huggingface_hub.errors import (  # noqa: PLC0415
        HfHubHTTPError,
        LocalEntryNotFoundError,
    )

    try:
        found = snapshot_download(  # of any file, for engines leave some out
            model,
            revision=revision,
            cache_dir=download_dir,
            local_files_only=True,
            ignore_patterns="*",
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError) as problem:
        msg = f"no local files of {model!r} to fingerprint: {problem}"
        raise UncachedError(msg) from problem
    return Path(found)
