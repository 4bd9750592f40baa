"""How messages write sizes and numbers of things."""

from __future__ import annotations

from collections.abc import Callable


def counted(number: int, what: str, verb: str = "", verbs: str = "", *, exact: bool = True) -> str:
    """Return a number with its noun, and the verb for one of them or the verbs for several.

    >>> counted(1, "chunk"), counted(12345, "chunk"), counted(2, "entry")
    ('1 chunk', '12,345 chunks', '2 entries')
    >>> counted(1, "file", "is", "are"), counted(0, "file", "is", "are")
    ('1 file is', '0 files are')
    """
    if number == 1:
        return f"1 {what} {verb}".rstrip()
    many = f"{what[:-1]}ies" if what.endswith("ry") else f"{what}s"
    return f"{about(number, exact=exact)} {many} {verbs}".rstrip()


def size(nbytes: float) -> str:
    """Return ``nbytes`` in the unit that keeps it short.

    >>> size(512), size(4096), size(5_000_000)
    ('512 B', '4.0 KiB', '4.8 MiB')
    """
    step = max(0, min(int(nbytes).bit_length() - 1, 50)) // 10
    if step == 0:
        return f"{int(nbytes)} B"
    return f"{nbytes / (1 << 10 * step):.1f} {'_KMGTP'[step]}iB"


def about(number: int, words: Callable[[int], str] = "{:,}".format, *, exact: bool) -> str:
    """Return a number in words; if it is not ``exact``, with the three digits that a sample knows.

    >>> about(99_554, exact=True), about(99_554, exact=False), about(99_554, size, exact=False)
    ('99,554', 'about 99,600', 'about 97.3 KiB')
    """
    return words(number) if exact else f"about {words(round(number, 3 - len(str(number))))}"
