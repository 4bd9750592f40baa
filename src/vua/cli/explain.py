"""`vua explain`: why a prompt hits or misses, namespace by namespace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import click

from vua.capacity.listing import Continuations
from vua.capacity.spaces import Show
from vua.capacity.upkeep import advice, ends_of, parted_at
from vua.catalog import open_catalog
from vua.catalog.base import Catalog, NamespaceCatalog
from vua.catalog.check import NO_KEYS
from vua.catalog.contents import SHORT
from vua.catalog.prefix import (
    ChunkState,
    GroupState,
    expect,
    first_salts,
    group_state,
    loadable,
    order_documents,
    prompt_keys,
    usable,
)
from vua.cli.command import command, option
from vua.cli.output import DAMAGED, SOUND, Report, facts, line, plain, progress
from vua.cli.prompt import Prompt, model_directory, read_documents, read_prompts
from vua.errors import ConfigError, explaining
from vua.format.identity import Identity
from vua.io.words import counted
from vua.security.keyring import NoKeyError
from vua.security.settings import Security
from vua.storage.description import Description, FieldDifference, differences, nearest
from vua.storage.location import directory_of
from vua.store.namespace import Namespace

if TYPE_CHECKING:
    from vua.security.seal import Seal  # needs an optional package

BLOCKS: Final = (16, 128)
"""vLLM's default tokens per block (`block_size`): on GPUs, and on CPUs."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The chunks of the prompt in one namespace."""

    namespace: Description
    state: str
    differences: list[FieldDifference] | None
    """From the model's files; None without a model."""
    length: int = 0
    groups: tuple[GroupState, ...] = ()
    """Empty if the namespace is not described, or the prompt is not cached."""
    others: Continuations | None = None
    salts: Mapping[str, int] | None = None
    """Stored prompts by salt, as :func:`first_salts` counts them, if the first chunk is missing."""
    same: Sequence[str] = ()
    """Salts under which the prompt's first chunk is stored."""
    seal: Seal | None = None
    """The seal of the prompt's files; None if they are not sealed."""
    locked: str = ""
    blocks: tuple[int, ...] = BLOCKS

    @property
    def usable(self) -> int:
        return usable(self.groups) if self.groups else 0

    @property
    def last_chunk(self) -> str | None:
        """The name of the last usable chunk: pinned, it holds all before it."""
        return self.groups[0].chunks[self.usable - 1].key.name if self.usable else None

    @property
    def size(self) -> int:
        return self.groups[0].layout.chunk_tokens if self.groups else 0

    @property
    def loads(self) -> dict[int, int]:
        """How many tokens of the prompt vLLM can load, by its tokens per block."""
        return {size: loadable(self.groups, self.length, size) for size in self.blocks
                if self.groups}  # fmt: skip

    @property
    def gap(self) -> ChunkState | None:
        """The first missing chunk of a group that needs all of them."""
        full = [group for group in self.groups if group.layout.window is None] or self.groups
        gaps = [group.first_missing for group in full]
        every = (gap for gap in gaps if gap is not None)
        return min(every, key=attrgetter("index"), default=None)


def verdict(answer: Answer) -> str:
    """Say in one line what the prompt would find, and why no more."""
    if answer.locked:
        return f"not cached: {answer.locked}"
    if not answer.groups:
        return f"a miss: namespace.json is {answer.state}; the next engine that stores rewrites it"
    size, chunks, count = answer.size, len(answer.groups[0].chunks), answer.usable
    if not chunks:
        return (
            f"a miss: {counted(answer.length, 'token', 'is', 'are')} less than one chunk of {size}"
        )
    gap = answer.gap
    if gap is None and count == chunks:
        whole = f"{'all ' * (chunks > 1)}{counted(chunks, 'whole chunk')}"
        hit = f"a hit: {whole}, {count * size} of {answer.length} tokens"
        return f"{hit}{_loaded(answer)}"
    hit = f"a hit of {count * size} of {answer.length} tokens" if count else "a miss"
    hit += _loaded(answer) if count else ""
    if gap is None or gap.index > count:
        return f"{hit}: no later window of the sliding layers is stored whole"
    return f"{hit}: chunk {gap.index} is {gap.state}{_reason(answer, gap)}"


def _loaded(answer: Answer) -> str:
    """Say how much of it an engine loads: a hit ends with one of its blocks."""
    words = [f"{tokens} with blocks of {size}" for size, tokens in answer.loads.items()]
    return f", of which an engine loads {' or '.join(words)}"


def _reason(answer: Answer, gap: ChunkState) -> str:
    groups, others = answer.groups, answer.others
    if any(group.layout.window is None and group.runs and group.runs[-1][1] > gap.index
           for group in groups):  # fmt: skip
        return ", a hole: later chunks are stored, but unusable until it is stored again"
    if gap.state != "absent" or others is None:
        return ""
    if gap.index == 0:
        return f"; {_of_others(answer, gap)}"
    if not others.others:
        return "; no stored chunk continues from there: never stored, or evicted"
    return (
        f"; {counted(others.others, 'stored chunk', 'continues', 'continue')} differently: "
        f"other tokens (or extras) than the prompt's somewhere in {gap.key.start} to {gap.key.stop}"
    )


def _of_others(answer: Answer, first: ChunkState) -> str:
    others, size, salts = answer.others, answer.size, answer.salts or {}
    if others is None or not others.others:
        return "no prompt is stored here"
    if answer.same:
        named = [salt for salt in answer.same if salt != "-"]
        where = [f"for another salt, adapter or image ({', '.join(named)})"] if named else []
        where += ["without a salt"] if "-" in answer.same else []
        return (
            f"the same first {size} tokens are stored {' and '.join(where)}: only that differs "
            "(--salt names a request's salt)"
        )
    text = f"{counted(others.others, 'other prompt')} stored here. "
    mine = first.key.parent.hex()[:SHORT] or "-"
    if not others.with_extras and mine == "-":
        return f"{text}None has a salt, an adapter or an image: the first {size} tokens differ"
    kinds = [f"{number} {_salted(salt)}" for salt, number in salts.items() if salt != mine][:5]
    counts = ", ".join([f"{salts.get(mine, 0)} {_salted(mine)} as this one", *kinds])
    return f"{text}{counts}: the first {size} tokens differ"


def _salted(salt: str) -> str:
    return "without a salt" if salt == "-" else f"with salt {salt}"


def _explained(
    directory: str, expected: Identity | None, length: int, answers: Sequence[Answer]
) -> Report:
    answers = sorted(answers, key=lambda one: (-one.usable * one.size, one.namespace.name))

    def show() -> None:
        if not answers:
            print(f"{directory}: no namespace to look at, so nothing is stored: a miss")
        elif len(answers) == 1:
            line("", f"verdict: {verdict(answers[0])}")
        else:
            facts(
                "verdict: depends on the engine, which looks into one of these namespaces; its log "
                "names it at the start (--namespace chooses one here)",
                _verdicts(answers),
            )
        for answer in answers:
            facts(f"namespace {_named(answer.namespace)}", _lines(answer))

    damaged = any(group.damaged for answer in answers for group in answer.groups)
    return Report(
        show,
        status=DAMAGED if damaged else SOUND,
        directory=directory,
        tokens=length,
        model=expected and expected.describe(),
        namespaces=[_describe(answer) for answer in answers],
    )


def _verdicts(answers: Sequence[Answer]) -> Iterator[tuple[str, str]]:
    first = answers[0].namespace.identity
    for answer in answers:
        yield answer.namespace.name[:SHORT], verdict(answer)
        other = answer.namespace.identity
        found = differences(other, first) if first and other else []
        if found:
            more = f" and {len(found) - 3} more" * (len(found) > 3)
            yield "", f"not the first: {'; '.join(map(str, found[:3]))}{more}"


def _of_lines(lines: Sequence[int], each: Sequence[Report]) -> Report:
    def show() -> None:
        for number, one in zip(lines, each, strict=True):
            print(end=f"line {number}: ")
            one.show()

    told = [{"line": number, **one.values} for number, one in zip(lines, each, strict=True)]
    return Report(show, status=max((one.status for one in each), default=SOUND), prompts=told)


def _recent(catalog: Catalog, prefix: str, key_file: str | None) -> Report:
    found, root = catalog.contents()[0], directory_of(catalog.where)
    noted = [*parted_at(root, key_file).items()] if root is not None else []
    days, told = list[dict[str, object]](), list[str]()
    for one in found:
        for day, parted in [(day, spaces.get(one.name)) for day, spaces in noted[::-1]]:
            if parted and one.name.startswith(prefix):
                why = advice(parted)
                days.append({"namespace": one.name, "day": day, "parted": parted, "verdict": why})
                told += [f"{day}  namespace {plain(_named(one))}"]
                told += [why or "too few prompts to tell why they part", f"  {ends_of(parted)}"]
    nothing = "engines have noted no prompts in the last days; of buckets they note none"
    text = "\n".join(told) or f"{catalog.where}: {nothing}"
    return Report(text, directory=catalog.where, days=days)


@command("explain")
@option("--tokens FILE", "token ids: a JSON list, or integers; - stdin")
@option("--prompt FILE", "text or JSON requests for --model's tokenizer; - stdin")
@option("--model MODELDIR", "the model's directory, or its name in the hub's cache")
@option("--order FILE", 'JSON {"prefix", "documents"}: their order that hits most')
@option("--recent", "where the last days' prompts part from stored ones")
@option("--namespace NS", "first digits of a namespace", default="")
@option(
    "--block-tokens N", "the engine's block_size; default 16 and 128", type=click.IntRange(min=1)
)
@option("--salt S", "the requests' cache salt", default="")
@option("--quick", "do not look for other continuations")
def explain(directory: str, *, security: Security = NO_KEYS, **asked: Any) -> Report:
    """Report what is stored of a prompt, and why no more; exit status 1 if files are damaged.

    ``asked`` are the options. Raises ConfigError, InputError, StorageError.
    """
    kinds = ("tokens", "prompt", "order", "recent")
    if sum(asked[name] not in (None, False) for name in kinds) != 1:
        raise click.UsageError(f"give one of {' '.join(f'--{name}' for name in kinds)}")
    if asked.pop("recent"):
        return _recent(open_catalog(directory), asked["namespace"], security.key_file)
    if asked["model"] is not None:
        asked["model"] = str(model_directory(asked["model"]))
    order = asked.pop("order")
    question = SimpleNamespace(security=security, **asked)
    if order is not None:
        count, made_of = read_documents(order, question.model)
        more = {"namespace": question.namespace, "salt": question.salt}
        places, tokens, name = order_documents(directory, count, made_of, security=security, **more)
        where = f" in namespace {name[:SHORT]}" if name else ""
        text = f"{' '.join(map(str, places))}: {counted(tokens, 'token')} stored{where}"
        return Report(text, directory=directory, order=places, tokens=tokens, namespace=name)
    prompts = read_prompts(question.tokens, question.prompt, question.model)
    catalog = open_catalog(directory)
    expected = _expected(question)
    with progress() as show, catalog.namespaces(show) as (spaces, _):
        by_description = {one.stated: one for one in spaces}
        candidates = _candidates([*by_description], expected, question)
        made = [
            _explained(directory, expected, len(prompt.ids) // 4, answers)
            for prompt in prompts
            for answers in [[_answer(by_description[one], expected, prompt, question, show)
                             for one in candidates]]
        ]  # fmt: skip
    return made[0] if len(made) == 1 else _of_lines([one.line for one in prompts], made)


def _expected(question: SimpleNamespace) -> Identity | None:
    if question.model is None or (
        question.prompt and not Path(question.model, "config.json").is_file()
    ):
        return None
    with progress() as show:
        return expect(
            question.model, lambda done, of: show("reading weights", done, of, amount=done)
        )


def _candidates(
    found: Sequence[Description], expected: Identity | None, question: SimpleNamespace
) -> list[Description]:
    if question.namespace:
        named = [one for one in found if one.name.startswith(question.namespace)]
        if not named:
            msg = f"no namespace begins with {question.namespace!r}; `vua ls` lists what is there"
            raise ConfigError(msg)
        return named
    if expected is None:
        return [*found]
    near = nearest(expected, found, complete=False)
    return [one.found for one in near if not one.is_of_others or one is near[0]]


def _answer(
    space: NamespaceCatalog, expected: Identity | None, prompt: Prompt, question: SimpleNamespace,
    show: Show,
) -> Answer:  # fmt: skip
    ids, length, found = prompt.ids, len(prompt.ids) // 4, space.stated
    with explaining(str(found.path)):
        namespace = Namespace.open(found.path, security=question.security)
    differ = None
    if expected is not None and found.identity is not None:
        differ = differences(expected, found.identity, complete=False)
    answer = Answer(found, space.state, differ, length)
    if namespace is None:
        return answer
    try:
        keys, seal = prompt_keys(namespace, ids, question.salt or prompt.salt)
    except NoKeyError as problem:
        return replace(answer, locked=str(problem))
    groups = tuple(group_state(store, keys, seal) for store in namespace.stores)
    blocks = (question.block_tokens,) if question.block_tokens else BLOCKS
    answer = replace(answer, groups=groups, seal=seal, blocks=blocks)
    gap = answer.gap
    if gap is None or question.quick or space.is_remote:
        return answer
    listing = space.listing(show)
    if gap.index == 0:
        salts, same = first_salts(listing, ids[: 4 * answer.size])
        answer = replace(answer, salts=salts, same=same)
    before = keys[gap.index - 1].name if gap.index else ""
    return replace(answer, others=listing.others(before, gap.key.name))


# -- for programs -----------------------------------------------------------------------------


def _describe(answer: Answer) -> dict[str, object]:
    namespace, differ, others = answer.namespace, answer.differences, answer.others
    return {
        "namespace": namespace.name,
        "description": answer.state,
        "engine": namespace.engine or None,
        "identity": namespace.identity and namespace.identity.describe(),
        "differences": differ and [one._asdict() for one in differ],
        "seal": answer.seal and answer.seal.kind,
        "key": answer.seal and answer.seal.key_id,
        "usable_chunks": answer.usable,
        "usable_tokens": answer.usable * answer.size,
        "last_chunk": answer.last_chunk,
        "loads": {str(size): tokens for size, tokens in answer.loads.items()},
        "groups": [_describe_group(group) for group in answer.groups],
        "others": others and others._asdict(),
        "salts": answer.salts,
        "same_tokens": list(answer.same),
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


def _lines(answer: Answer) -> Iterator[tuple[str, str]]:
    if answer.differences is not None:
        found = "; ".join(map(str, answer.differences)) or "no difference"
        yield "compared", f"the model's files (here) with this namespace (there): {found}"
    if answer.seal is not None:
        yield "key", f"{answer.seal.key_id}, {answer.seal.kind}"
    for group in answer.groups:
        yield "stored" if group.layout.window is None else group.layout.group, _stored(group)
        gap = group.first_missing
        told = group.damaged
        if gap is not None and gap not in told:
            told = [gap, *told]
        for chunk in told[:4]:
            yield chunk.state, _chunk(chunk)
            for reason in chunk.reasons:
                yield "", reason
    if answer.last_chunk is not None:
        name = answer.last_chunk[:SHORT]
        yield "last chunk", f"{name}; `vua pin DIR {name}` keeps it and all before it"


def _named(found: Description) -> str:
    model = found.identity.name if found.identity else ""
    return "  ".join(filter(None, (found.name[:SHORT], model, found.engine)))


def _stored(group: GroupState) -> str:
    runs = ", ".join(f"{first}-{stop - 1}" for first, stop in group.runs) or "none"
    text = f"{group.leading} leading of {counted(len(group.chunks), 'chunk')} (chunks {runs})"
    if group.galloping != group.leading:
        text += f"; a lookup by names says {group.galloping}"
    if group.layout.window is not None:
        text += f"; only those in a window of {group.layout.window} tokens are needed"
    return text


def _chunk(chunk: ChunkState) -> str:
    files = f", files {' '.join(chunk.files)}" if chunk.files else ""
    key = chunk.key
    return f"chunk {chunk.index}, tokens {key.start} to {key.stop}, {key.name}{files}"
