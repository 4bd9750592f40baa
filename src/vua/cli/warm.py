"""`vua warm`: has a running server compute prompts, so that it stores them before users ask.

A line of a file of JSON goes to the server as it is. What the server does not say is not told:
above all whether, and when, it has stored what it computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from urllib import error, request

from vua.cli.command import argument, command, option
from vua.cli.output import DAMAGED, SOUND, Report, progress, table
from vua.cli.prompt import read_text, requests
from vua.errors import ConfigError, InputError

_ANSWER_S: Final = 3600.0
_FIELDS: Final = ("line", "tokens", "found", "problem")


@command("warm", takes_directory=False)
@argument("prompts", 'requests, one a line: {"prompt"} or {"messages"}; - stdin', metavar="FILE")
@option("--server URL", "a vLLM or SGLang that runs with VUA", required=True)
@option("--model TEXT", "for lines that name none; default the server's only one")
def warm(prompts: str, *, server: str, model: str | None = None) -> Report:
    """Send each prompt, one after the other. Raises ConfigError, InputError, OSError."""
    asked = requests(read_text(prompts), prompts)
    address = server.rstrip("/").removesuffix("/v1")
    if model is None and any("model" not in body for _, body in asked):
        model = _model_of(address)
    rows = list[tuple[int, int | None, int | None, str]]()
    with progress() as show:
        for number, (line, body) in enumerate(asked, 1):
            rows.append((line, *_answer(address, {"model": model, **body})))
            amount = sum(tokens or 0 for _, tokens, *_ in rows)
            show("warm", number, len(asked), amount=amount, unit="token")
    tokens = sum(known or 0 for _, known, _, _ in rows)
    found = sum(known or 0 for _, _, known, _ in rows)

    def show_rows() -> None:
        every = [*rows, ("all", tokens, found, "")]
        cells = [["-" if cell is None else cell for cell in row] for row in every]
        table(["line", " tokens", " found", "problem"], cells)
        print(
            "A server stores what it computed after its answer; `vua explain` says what is stored."
        )

    return Report(
        show_rows,
        status=DAMAGED if any(row[-1] for row in rows) else SOUND,
        tokens=tokens,
        found=found,
        prompts=[dict(zip(_FIELDS, row, strict=True)) for row in rows],
    )


def _model_of(address: str) -> str:
    answer = _call(f"{address}/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (LookupError, TypeError) as problem:
        raise ConfigError(f"{address}/v1/models names no model: give --model") from problem


def _answer(address: str, body: dict[str, Any]) -> tuple[int | None, int | None, str]:
    """Return a prompt's tokens, those of them that were not computed, and what went wrong."""
    way = "chat/completions" if "messages" in body else "completions"
    for name in ("stream", "stream_options"):  # the answer is read whole
        body.pop(name, None)
    if "max_completion_tokens" not in body:
        body.setdefault("max_tokens", 1)
    try:
        answer = _call(f"{address}/v1/{way}", body)
    except InputError as problem:
        return None, None, str(problem)
    usage = (isinstance(answer, Mapping) and answer.get("usage")) or {}
    details = usage.get("prompt_tokens_details") or {}
    return usage.get("prompt_tokens"), details.get("cached_tokens"), ""


def _call(url: str, body: object = None) -> Any:
    """Return a server's answer. Raises InputError for a refusal, ConfigError without an answer."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url}: expected http:// or https://")
    data = None if body is None else json.dumps(body).encode()
    asked = request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    try:
        with request.urlopen(asked, timeout=_ANSWER_S) as answer:  # noqa: S310 - checked above
            return json.load(answer)
    except error.HTTPError as problem:
        msg = f"{problem.code}: {problem.read(400).decode(errors='replace')}"
        raise InputError(msg) from problem
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{url}: {problem}") from problem
