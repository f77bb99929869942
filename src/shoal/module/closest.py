"""What a user may have meant by a name, or a pattern of names, that none of a model's modules has.

Numbers are left as they were written, since a block of another number is another block. Tried are, in this order: the
closest word in the place of each that no name has, a level that was left out, the closest name as a whole, and what the
last part lies in (a layer, of its weight).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence

ANY, MANY = "*", "**"
Matches = Callable[[str, str], bool]
"""matches(pattern, name): whether a pattern means the name."""


def closest(pattern: str, names: Sequence[str], matches: Matches) -> str:
    """Returns ' Did you mean "x"?' with what is closest to `pattern` and matches one of `names`, or which numbers there
    are where that of the pattern is too large; '' when nothing is close."""
    parts = pattern.split(".")
    corrected = _corrected(parts, names)
    tried = (".".join(corrected), *_deeper(corrected), *_as_a_whole(parts, names), *_around(corrected, names))
    for meant in tried:
        if meant and any(matches(meant, name) for name in names):
            return f' Did you mean "{meant}"?'
    return _numbers(parts, names)


def _corrected(parts: Sequence[str], names: Sequence[str]) -> list[str]:
    """The closest word in the place of each that no name has."""
    words = list(dict.fromkeys(word for name in names for word in name.split(".") if not word.isdigit()))
    return [_word(part, words) for part in parts]


def _word(part: str, words: Sequence[str]) -> str:
    if _is_any(part) or part in words:
        return part
    return next(iter(difflib.get_close_matches(part, words, n=1)), part)


def _deeper(parts: Sequence[str]) -> Iterator[str]:
    """The pattern with any number of further levels somewhere, which it may lack."""
    for place in reversed(range(len(parts))):
        if MANY not in (parts[place], *parts[max(place - 1, 0) : place]):
            yield ".".join([*parts[:place], MANY, *parts[place:]])


def _as_a_whole(parts: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """The closest name of as many parts, with the numbers of the pattern."""
    counted = {_without_numbers(name.split(".")) for name in names if name.count(".") == len(parts) - 1}
    for meant in difflib.get_close_matches(_without_numbers(parts), sorted(counted), n=1):
        numbers = iter([part for part in parts if _is_number(part)])
        yield ".".join(next(numbers, ANY) if part == ANY else part for part in meant.split("."))


def _around(parts: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """What the last part lies in, if that is a word, and nothing else lies there."""
    around = _without_numbers(parts[:-1])
    if not _is_any(parts[-1]) and not any(_without_numbers(name.split(".")).startswith(f"{around}.") for name in names):
        yield ".".join(parts[:-1])


def _numbers(parts: Sequence[str], names: Sequence[str]) -> str:
    """Which numbers there are in the place of the first that is too large."""
    for place, part in enumerate(parts):
        if part.isdigit() and place:
            before = ".".join(parts[:place])
            there = [name.split(".") for name in names if name.startswith(f"{before}.")]
            found = sorted({int(each[place]) for each in there if each[place].isdigit()})
            if found and int(part) not in found:
                return f" There are {before}.{found[0]} to {before}.{found[-1]}."
    return ""


def _without_numbers(parts: Sequence[str]) -> str:
    return ".".join(ANY if _is_number(part) else part for part in parts)


def _is_number(part: str) -> bool:
    return part == ANY or part.isdigit()


def _is_any(part: str) -> bool:
    return MANY in part or _is_number(part)
