"""`vua explain`: why a prompt hits or misses, namespace by namespace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

from vua.capacity.bucket import BucketCapacity
from vua.capacity.prefix_tree import PrefixTree, read_prefix_tree
from vua.cli.answer import BLOCKS, Answer, verdict
from vua.cli.identify import Difference, Expected, compare, expect, nearest
from vua.cli.keys import NO_KEYS, prompt_keys
from vua.cli.prefix import ChunkState, GroupState, continuations, look
from vua.cli.prompt import prompt_ids, read_ids
from vua.cli.spread import over_fans
from vua.cli.text import DAMAGED, SHORT, SOUND, Write, facts, progress
from vua.cli.walk import described, open_root
from vua.errors import ConfigError
from vua.format.layout import KVLayout
from vua.security.keyring import NoKeyError
from vua.security.settings import Security
from vua.storage.description import Description
from vua.storage.problems import explained
from vua.store.opening import open_namespace

__all__ = ["Question", "explain", "explain_ids"]

_DEFAULT_CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What `vua explain` is asked."""

    tokens: str | None = None
    """File of token ids, ``-`` for stdin."""
    prompt: str | None = None
    """File of text, in place of ``tokens``; needs ``model`` for its tokenizer."""
    namespace: str = ""
    """First digits of the namespaces to look at; by default all (that fit ``model``)."""
    model: str | None = None
    """Directory of the model."""
    chunk_tokens: int | None = None
    """Only namespaces with chunks of so many tokens."""
    block_tokens: int | None = None
    """Tokens per block of the engine in question; by default those of GPUs and of CPUs."""
    salt: str = ""
    """The requests' cache salt."""
    epoch: str = ""
    """The engine's setting; only for comparing identities."""
    quick: bool = False
    """Do not look for what is stored in place of a missing chunk."""
    security: Security = NO_KEYS
    """The engines' keys: names are worked out with them."""


def explain(directory: str, question: Question, *, write: Write | None) -> int:
    """Print what is stored of a prompt, and why no more; exit status 1 if files are damaged.

    A miss by itself is no damage. Raises ConfigError, InputError, StorageError.
    """
    if question.block_tokens is not None and question.block_tokens < 1:
        msg = f"--block-tokens must be a positive number, found {question.block_tokens}"
        raise ConfigError(msg)
    try:
        if question.tokens is not None:
            ids = read_ids(question.tokens)
        else:
            ids = prompt_ids(question.prompt or "-", question.model)
    except OSError as problem:
        raise explained(problem, str(question.tokens or question.prompt)) from problem
    found, _ = open_root(directory)
    expected = _expected(question)
    answers = _answers(found, expected, ids, question)
    if write is not None:
        write(_report(directory, expected, ids, answers))
    else:
        if expected is not None:
            _print_expected(expected, found)
        for answer in answers:
            _print(answer)
        if not answers:
            print(f"{directory}: no namespace to look at, so nothing is stored: a miss")
    damaged = any(group.damaged for answer in answers for group in answer.groups)
    return DAMAGED if damaged else SOUND


def explain_ids(
    directory: str, ids: bytes, question: Question, trees: Mapping[str, PrefixTree]
) -> dict[str, object]:
    """Return what `vua explain --json` prints of token ids, whatever else is asked.

    ``trees``, by namespace, are asked what is stored in place of a missing chunk, with
    ``question.quick`` these alone. Raises as :func:`explain` does.
    """
    found, _ = open_root(directory)
    return _report(directory, None, ids, _answers(found, None, ids, question, trees))


def _answers(
    found: Sequence[Description],
    expected: Expected | None,
    ids: bytes,
    question: Question,
    trees: Mapping[str, PrefixTree] = MappingProxyType({}),
) -> list[Answer]:
    """What is stored in each namespace that is asked for, where most can be used first."""
    answers = [
        _answer(namespace, differences, ids, question, trees)
        for namespace, differences in _candidates(found, expected, question)
    ]
    return sorted(answers, key=lambda one: (-one.usable * one.size, one.namespace.name))


def _expected(question: Question) -> Expected | None:
    if question.model is None or (
        question.prompt and not Path(question.model, "config.json").is_file()
    ):
        return None
    size = question.chunk_tokens or _DEFAULT_CHUNK_TOKENS
    try:
        with progress() as show:
            return expect(
                question.model,
                chunk_tokens=size,
                epoch=question.epoch,
                progress=lambda done, of: show("reading weights", done, of, amount=done),
            )
    except OSError as problem:
        raise explained(problem, question.model) from problem


def _candidates(
    found: Sequence[Description], expected: Expected | None, question: Question
) -> list[tuple[Description, list[Difference] | None]]:
    """The namespaces to look at, with how they differ from the one that the model leads to."""
    if question.namespace:
        named = [one for one in found if one.name.startswith(question.namespace)]
        if not named:
            msg = f"no namespace begins with {question.namespace!r}; `vua ls` lists what is there"
            raise ConfigError(msg)
        known = [(one, one.identity) for one in named]
        return [(one, compare(expected, who) if expected and who else None) for one, who in known]
    if expected is not None:
        near = nearest(expected, found)
        fit = [pair for pair in near if not any(one.field == "weights" for one in pair[1])]
        return [*(fit or near[:1])]
    size = question.chunk_tokens
    return [
        (one, None) for one in found
        if size is None or one.layout is None or one.layout.chunk_tokens == size
    ]  # fmt: skip


def _answer(
    found: Description,
    differences: list[Difference] | None,
    ids: bytes,
    question: Question,
    trees: Mapping[str, PrefixTree],
) -> Answer:
    length = len(ids) // 4
    try:
        namespace = open_namespace(found.path, security=question.security)
    except OSError as problem:
        raise explained(problem, str(found.path)) from problem
    if namespace is None:
        return Answer(found, differences, length)
    try:
        keys, seal = prompt_keys(namespace, ids, question.salt)
    except NoKeyError as problem:
        return Answer(found, differences, length, locked=str(problem))
    groups = tuple(look(store, keys, seal) for store in namespace.stores)
    blocks = (question.block_tokens,) if question.block_tokens else BLOCKS
    answer = Answer(found, differences, length, groups, seal=seal, blocks=blocks)
    gap = answer.gap
    capacity = namespace.capacity
    if gap is None or isinstance(capacity, BucketCapacity):
        return answer
    before = keys[gap.index - 1].name if gap.index else ""
    tree = trees.get(found.name)
    if tree is None and question.quick:
        return answer
    if tree is None:
        with progress() as show:
            tree = read_prefix_tree(capacity.space, show, over_fans)
    return replace(answer, others=continuations(tree, gap.key, before))


# -- for programs -----------------------------------------------------------------------------


def _report(
    directory: str, expected: Expected | None, ids: bytes, answers: list[Answer]
) -> dict[str, object]:
    return {
        "directory": directory,
        "tokens": len(ids) // 4,
        "model": None if expected is None else _as_fields(expected),
        "namespaces": [_describe(answer) for answer in answers],
    }


def _as_fields(expected: Expected) -> dict[str, object]:
    return {
        "identity": expected.identity.describe(),
        "unknown": list(expected.unknown),
        "notes": list(expected.notes),
    }


def _describe(answer: Answer) -> dict[str, object]:
    namespace, differences, others = answer.namespace, answer.differences, answer.others
    return {
        "namespace": namespace.name,
        "description": described(namespace),
        "identity": namespace.identity and namespace.identity.describe(),
        "differences": None if differences is None else [asdict(one) for one in differences],
        "seal": answer.seal and answer.seal.kind,
        "key": answer.seal and answer.seal.key_id,
        "usable_chunks": answer.usable,
        "usable_tokens": answer.usable * answer.size,
        "loads": {str(size): tokens for size, tokens in answer.loads.items()},
        "groups": [_describe_group(group) for group in answer.groups],
        "others": others and asdict(others),
        "verdict": verdict(answer),
    }


def _describe_group(group: GroupState) -> dict[str, object]:
    gap = group.first_missing
    return {
        "group": group.layout.group,
        "layout": group.layout.describe(),
        "chunks": len(group.chunks),
        "galloping": group.galloping,
        "leading": group.leading,
        "runs": [list(run) for run in group.runs],
        "first_missing": gap and _describe_chunk(gap),
        "damaged": [_describe_chunk(chunk) for chunk in group.damaged],
    }


def _describe_chunk(chunk: ChunkState) -> dict[str, object]:
    return {
        "chunk": chunk.index,
        "tokens": [chunk.key.start, chunk.key.stop],
        "prefix_hash": chunk.key.name,
        "parent": chunk.key.parent.hex() or None,
        "state": chunk.state,
        "shards": list(chunk.files),
        "reasons": list(chunk.reasons),
    }


# -- for people -------------------------------------------------------------------------------


def _print_expected(expected: Expected, found: Sequence[Description]) -> None:
    identity = expected.identity
    there = any(one.name == identity.namespace for one in found)
    told = "there" if there else "not there as such"
    lines = [("namespace", f"{identity.namespace[:SHORT]}, {told}")]
    lines += [("note", note) for note in expected.notes]
    if not any(one.identity is not None for one in found):
        lines.append(("nearest", "no namespace says what it is for"))
    facts(f"model {identity.name}", lines)


def _print(answer: Answer) -> None:
    namespace = answer.namespace
    identity = namespace.identity
    name = identity.name if identity else ""
    facts(f"namespace {namespace.name[:SHORT]}  {name}".rstrip(), _lines(answer))


def _lines(answer: Answer) -> Iterator[tuple[str, str]]:
    identity = answer.namespace.identity
    if identity is not None:
        fields = identity.describe()
        shown = [f"{name} {_short(fields[name])}" for name in fields if name not in
                 ("version", "namespace", "name") and fields[name] != ""]  # fmt: skip
        yield "identity", ", ".join(shown)
    if answer.differences is not None:
        yield "compared", _compared(answer.differences)
    if answer.seal is not None:
        yield "key", f"{answer.seal.key_id}, {answer.seal.kind}"
    for group in answer.groups:
        yield _label(group.layout), _stored(group)
        gap = group.first_missing
        told = group.damaged
        if gap is not None and gap not in told:
            told = [gap, *told]
        for chunk in told[:4]:
            yield chunk.state, _chunk(chunk)
            for reason in chunk.reasons:
                yield "", reason
    yield "verdict", verdict(answer)


def _short(value: str | int) -> str:
    text = str(value)
    return text if len(text) < 40 else text[:SHORT]


def _compared(differences: list[Difference]) -> str:
    differing = {one.field for one in differences}
    same = [name for name in ("model", "weights") if name not in differing]
    said = [f"same {' and '.join(same)}"] if same else []
    return ", ".join(said + [str(one) for one in differences])


def _label(layout: KVLayout) -> str:
    return "stored" if layout.window is None else layout.group


def _stored(group: GroupState) -> str:
    runs = ", ".join(f"{first}-{stop - 1}" for first, stop in group.runs) or "none"
    text = f"{group.leading} leading of {len(group.chunks)} chunks (chunks {runs})"
    if group.galloping != group.leading:
        text += f"; a lookup by names says {group.galloping}"
    if group.layout.window is not None:
        text += f"; only those in a window of {group.layout.window} tokens are needed"
    return text


def _chunk(chunk: ChunkState) -> str:
    files = f", files {' '.join(chunk.files)}" if chunk.files else ""
    key = chunk.key
    return f"chunk {chunk.index}, tokens {key.start} to {key.stop}, {key.name}{files}"
