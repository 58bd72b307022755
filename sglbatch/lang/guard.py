"""Row values are data: they never make special tokens, even where the template writes those itself.

A special-token string counts only where the template's author wrote it whole in a string constant. If it also
occurs in data, a guard character inside it breaks it up; tokenisation strips the guard character again.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final, Protocol

from sglbatch.errors import CallError, SglbatchError

GUARD: Final = "\ue0f0"


class Specials(Protocol):
    """The part of an environment that a guard needs."""

    @property
    def parse_special(self) -> bool: ...

    @property
    def specials(self) -> Iterable[str]: ...


@dataclass(frozen=True, slots=True)
class Guard:
    """Breaks up special tokens in data.

    Args:
        specials: the special tokens that the author wrote and that therefore count in constants.
        openings: for each of them, the proper prefixes with which one of the author's strings ends.
    """

    specials: frozenset[str]
    openings: frozenset[tuple[str, str]] = frozenset()

    @staticmethod
    def of(strings: Iterable[str], specials: Iterable[str]) -> Guard:
        """The guard of a template with these string constants, under a tokenizer with these special tokens."""
        constants = tuple(strings)
        written = frozenset(token for token in specials if any(token in text for text in constants))
        openings = {
            (token[:cut], token[cut:])
            for token in written
            for cut in range(1, len(token))
            if any(text.endswith(token[:cut]) for text in constants)
        }
        return Guard(written, frozenset(openings))

    @staticmethod
    def of_template(strings: Iterable[str], environment: Specials) -> Guard:
        """The guard of a template with these string constants, in the run of this environment."""
        return Guard.of(strings, () if environment.parse_special else environment.specials)

    def protect(self, value: Any) -> Any:
        """``value`` with every string in it made harmless; lists, tuples and dicts are copied.

        Raises:
            CallError: ``guard-character`` where the data contains the guard character itself.
        """
        return _map_strings(value, self._protect_text)

    def _protect_text(self, text: str) -> str:
        if GUARD in text:
            raise CallError("guard-character", "the text contains the character U+E0F0, which is reserved")
        if not self.specials:
            return text
        for token in sorted(self.specials, key=len, reverse=True):
            text = text.replace(token, token[0] + GUARD + token[1:])
        if any(text.startswith(rest) for _, rest in self.openings):
            text = GUARD + text
        if any(text.endswith(token[:cut]) for token in self.specials for cut in range(1, len(token))):
            text += GUARD
        return text


def strip_guard(value: Any) -> Any:
    """``value`` with the guard characters taken out again."""
    return _map_strings(value, lambda text: text.replace(GUARD, ""))


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, tuple):
        return tuple(_map_strings(item, change) for item in value)
    if isinstance(value, dict):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    return value


def strings_of_files(files: Iterable[Path]) -> set[str]:
    """Every string constant in these Python files (the constant parts of f-strings too).

    Raises:
        SglbatchError: ``guard-character`` where one contains the guard character, which would be lost.
    """
    strings: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            if GUARD in node.value:
                raise SglbatchError(
                    "guard-character",
                    "a string contains the character U+E0F0, which is reserved",
                    where=f"{file}:{node.lineno}",
                )
            strings.add(node.value)
    return strings


def strings_of_function(function: FunctionType) -> set[str]:
    """The string constants of a function whose source is not in a file, and its module's global strings."""
    strings = {value for value in function.__globals__.values() if isinstance(value, str)}
    codes: list[CodeType] = [function.__code__]
    while codes:
        for constant in codes.pop().co_consts:
            if isinstance(constant, str):
                strings.add(constant)
            elif isinstance(constant, CodeType):
                codes.append(constant)
    return strings
