"""Prompts: token ids, from a file or by a tokenizer; `vua warm`, `vua key`.

`vua warm` has a running server compute prompts, so that it stores them before users ask. `vua key`
makes key files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Final
from urllib import error
from urllib import request as http

from vua.cli.command import argument, command, option
from vua.cli.output import DAMAGED, SOUND, Report, progress, table
from vua.errors import ConfigError, InputError
from vua.format.keys import token_ids
from vua.io.files import make_folder
from vua.security.keyring import SUFFIX, read_key, tenant_of, write_key

_TAKEN: Final = frozenset(
    ["prompt", "messages", "tools", "chat_template_kwargs", "add_generation_prompt",
     "continue_final_message", "add_special_tokens", "cache_salt"]
)  # fmt: skip
"""Fields of OpenAI requests that make a prompt's tokens, or name its chunks."""
_OTHER: Final = frozenset(
    ["custom_id", "echo", "frequency_penalty", "ignore_eos", "kv_transfer_params",
     "length_penalty", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens",
     "metadata", "min_p", "min_tokens", "model", "n", "parallel_tool_calls", "presence_penalty",
     "priority", "repetition_penalty", "request_id", "return_token_ids", "seed",
     "skip_special_tokens", "stop", "stop_token_ids", "store", "stream", "stream_options",
     "temperature", "tool_choice", "top_k", "top_logprobs", "top_p", "user"]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as an engine gets it."""

    line: int
    """Its line in the file, from 1."""
    ids: bytes
    """Token ids as little-endian u32."""
    salt: str = ""


def read_text(file: str) -> str:
    """Return the content of a file, or of stdin for ``-``. Raises InputError, OSError."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_bytes().decode()
    except UnicodeDecodeError as problem:
        raise InputError(f"{file}: expected UTF-8 text, found other bytes: {problem}") from problem


def read_ids(file: str) -> bytes:
    """Return the token ids in a file (``-``: stdin) as little-endian u32 bytes.

    The file holds a JSON list of integers, or integers separated by white space. Raises InputError
    for anything else, OSError if it cannot be read.
    """
    words: list[Any]
    text = read_text(file)
    try:
        words = json.loads(text) if text.lstrip().startswith("[") else list(map(int, text.split()))
    except (ValueError, RecursionError) as problem:
        msg = f"{file}: expected a JSON list of token ids or integers between spaces: {problem}"
        raise InputError(msg) from problem
    return _ids(words, file)


def _ids(words: list[Any], source: str) -> bytes:
    for place, word in enumerate(words):
        if isinstance(word, bool) or not isinstance(word, int):
            msg = f"{source}: item {place} is {word!r:.40}, expected an integer token id"
            raise InputError(msg)
    return token_ids(words)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def requests(text: str, source: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the requests in a text, one a line or a single one, each with its line.

    A request is a JSON object with ``prompt`` or ``messages``, as for OpenAI's API. Raises
    InputError, which names the line and ``source``, for anything else.
    """
    whole = _json(text)
    lines = [(1, text)] if isinstance(whole, dict) else enumerate(text.split("\n"), 1)
    found = []
    for number, line in lines:
        if not line.strip():
            continue
        request = _json(line)
        given = request if isinstance(request, dict) else {}
        prompt, messages = given.get("prompt"), given.get("messages")
        is_prompt = messages is None and isinstance(prompt, (str, list)) and bool(prompt)
        is_chat = "prompt" not in given and isinstance(messages, list) and bool(messages)
        if not (is_prompt or is_chat):
            what = "no JSON" if request is None else f"{request!r:.40}"
            raise InputError(
                f'{source}, line {number}: expected {{"prompt": ...}} or {{"messages": [...]}} '
                f"of one prompt, found {what}"
            )
        found.append((number, given))
    return found


def read_prompts(tokens: str | None, prompt: str | None, model: str | None) -> list[Prompt]:
    """Return the prompts in a file of token ids or, with a model, of text or requests.

    ``-`` is stdin. Raises ConfigError without a tokenizer, InputError, OSError.
    """
    if tokens is not None:
        return [Prompt(1, read_ids(tokens))]
    file = prompt or "-"
    return Tokenizer(model).prompts(read_text(file), file)


def read_documents(
    file: str, model: str | None
) -> tuple[int, Callable[[Sequence[int]], Sequence[int]]]:
    """Return how many documents a file (``-``: stdin) has, and what makes a prompt of some.

    The file is JSON: ``{"prefix": ..., "documents": [...]}``, all texts or all lists of token ids.
    Texts need a model, and are put together before they are tokenized. Raises ConfigError,
    InputError, OSError.
    """
    given = _json(read_text(file))
    asked = given if isinstance(given, dict) else {}
    first: Any = asked.get("prefix")
    documents = asked.get("documents")
    kinds = {type(one) for one in (first, *(documents if isinstance(documents, list) else ()))}
    if not isinstance(documents, list) or not documents or kinds not in ({str}, {list}):
        raise InputError(
            f'{file}: expected {{"prefix": ..., "documents": [...]}}, all texts, or all token ids'
        )
    tokenizer = Tokenizer(model) if isinstance(first, str) else None

    def prompt(places: Sequence[int]) -> Sequence[int]:
        parts = [first, *(documents[one] for one in places)]
        return tokenizer.ids_of("".join(parts)) if tokenizer else list(chain(*parts))

    return len(documents), prompt


class Tokenizer:
    """A model's `tokenizer.json` and chat template."""

    def __init__(self, model: str | None) -> None:
        """Read the model's directory. Raises ConfigError."""
        if model is None:
            raise ConfigError(
                "a prompt needs its tokenizer: give --model MODELDIR, or the token ids with "
                "--tokens"
            )
        self._directory = model_directory(model)
        path = self._directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{path}: no such file; give the model's directory, or the token ids with --tokens"
            )
        try:
            tokenizers = import_module("tokenizers")
        except ImportError as problem:
            msg = "the package tokenizers is not installed; install it, or give --tokens"
            raise ConfigError(msg) from problem
        try:
            self._made = tokenizers.Tokenizer.from_file(str(path))
        except Exception as problem:  # the library raises plain Exception
            msg = f"{path}: not a tokenizer that the package tokenizers reads: {problem}"
            raise ConfigError(msg) from problem
        self._template: Any = None

    def prompts(self, text: str, source: str) -> list[Prompt]:
        """Return the prompts in a text: one or several requests, or the text itself as one.

        A text that begins with what the tokenizer puts before each text, such as BOS, was made by
        a chat template, and is taken as it is. Raises ConfigError, InputError.
        """
        begins = text.lstrip()
        is_list = begins.startswith("[") and isinstance(_json(text), list)
        if source.endswith((".json", ".jsonl")) or is_list or (
            begins.startswith("{")
            and (_json(text) is not None or _json(begins.partition("\n")[0]) is not None)
        ):  # fmt: skip
            asked = requests(text, source)
            return [self._prompt(request, line, source) for line, request in asked]
        return [Prompt(1, token_ids(self.ids_of(text)))]

    def ids_of(self, text: str) -> list[int]:
        """Return a text's ids with special tokens before and after, unless it has them."""
        whole, plain = self._ids(text, special=True), self._ids(text, special=False)
        for count in range(1, len(whole) - len(plain) + 1):
            if whole[count : count + len(plain)] == plain and plain[:count] == whole[:count]:
                return plain
        return whole

    def _ids(self, text: str, *, special: bool) -> list[int]:
        return list(self._made.encode(text, add_special_tokens=special).ids)

    def _prompt(self, request: dict[str, Any], line: int, source: str) -> Prompt:
        where = f"{source}, line {line}"
        unknown = sorted(request.keys() - _TAKEN - _OTHER)
        if unknown:
            raise InputError(
                f"{where}: {unknown[0]!r} may change the prompt, and is not known here; leave it "
                "out, or give the token ids with --tokens"
            )
        salt, prompt = str(request.get("cache_salt") or ""), request.get("prompt")
        if isinstance(prompt, list):
            return Prompt(line, _ids(prompt, where), salt)
        is_chat = prompt is None
        text = self._chat(request, where) if is_chat else str(prompt)
        special = bool(request.get("add_special_tokens", not is_chat))
        return Prompt(line, token_ids(self._ids(text, special=special)), salt)

    def _chat(self, request: dict[str, Any], where: str) -> str:
        """Return a chat in the model's own template. Raises ConfigError, InputError."""
        messages = json.loads(json.dumps(request["messages"]))
        for number, message in enumerate(messages):
            content = message.get("content") if isinstance(message, dict) else 0
            if not isinstance(content, str | None):
                raise InputError(
                    f"{where}: message {number} has no text as its content: only texts are known "
                    "here; give the token ids with --tokens"
                )
            for call in message.get("tool_calls") or ():  # as vLLM gives them to templates
                function = call.get("function", {})
                if isinstance(function.get("arguments"), str):
                    function["arguments"] = _json(function["arguments"] or "{}")
        options = request.get("chat_template_kwargs") or {}
        names = ("add_generation_prompt", "continue_final_message")
        options = {"add_generation_prompt": True, **{n: request[n] for n in names if n in request},
                   **options}  # fmt: skip
        try:
            if self._template is None:
                automatic = import_module("transformers").AutoTokenizer
                self._template = automatic.from_pretrained(self._directory)
            text: str = self._template.apply_chat_template(
                messages, tools=request.get("tools"), tokenize=False, **options
            )
        except ImportError as problem:
            msg = "chats need the package transformers; install it, or give --tokens"
            raise ConfigError(msg) from problem
        except Exception as problem:  # templates raise what they like
            raise InputError(
                f"{where}: the model's chat template refuses it: {problem}"
            ) from problem
        return text


def model_directory(model: str) -> Path:
    """Return the directory of a model: as given, or that of a name in the hub's cache.

    Raises ConfigError where there is neither.
    """
    if Path(model).is_dir():
        return Path(model)
    try:
        hub = import_module("huggingface_hub")
        return Path(hub.snapshot_download(model, local_files_only=True))
    except Exception as problem:  # it raises many kinds
        raise ConfigError(
            f"{model}: not a directory, nor in the hub's cache; give the model's directory, for "
            "example what `hf download` prints"
        ) from problem


# -- vua warm -------------------------------------------------------------------------------------
#
# A line goes to the server as it is. What the server does not say is not told: above all whether,
# and when, it has stored what it computed.

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
    asked = http.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    try:
        with http.urlopen(asked, timeout=_ANSWER_S) as answer:  # noqa: S310 - checked above
            return json.load(answer)
    except error.HTTPError as problem:
        msg = f"{problem.code}: {problem.read(400).decode(errors='replace')}"
        raise InputError(msg) from problem
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{url}: {problem}") from problem


# -- vua key --------------------------------------------------------------------------------------


@command("key", takes_directory=False)
@argument("path", "file for the key; with --salt a directory", metavar="PATH")
@option("--salt S", "make the key of this cache salt in PATH")
def key(path: str, *, salt: str | None = None) -> Report:
    """Make the key file, or check the existing one.

    Raises ConfigError for an existing unusable key, OSError.
    """
    file = Path(path)
    if salt is not None:
        if not salt:
            raise ConfigError("--salt is empty: requests without a salt use key_file")
        make_folder(file)
        file /= tenant_of(salt.encode()) + SUFFIX
    try:
        write_key(file)
        made = True
    except FileExistsError:
        read_key(file)
        made = False
    return Report(f"{file}: {'made' if made else 'there already'}", file=str(file), made=made)
