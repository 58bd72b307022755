"""The types of a program's variables, as the output columns need them."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from sglbatch.types import VarType

DTYPE_REGEX: Final = MappingProxyType(
    {
        "int": r"-?(0|[1-9][0-9]{0,17})",
        "float": r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?",
        "bool": r"(True|False)",
        "str": r'"[^"\\\n\r\t]{0,200}"',
    }
)
"""What ``gen(dtype=...)`` constrains the text to. Integers fit 64 bits; a str is in quotes and has none inside."""

CHOICELESS: Final = frozenset(DTYPE_REGEX[name] for name in ("int", "float", "str"))
"""Those of them that never leave a choice among few texts."""


def list_of(item: VarType) -> VarType:
    """The type of a list of ``item``; a list of lists is plain JSON."""
    return VarType(kind="json") if item.is_list else replace(item, is_list=True)


def type_of_value(value: Any) -> VarType:
    """The type of a value that the program itself assigned."""
    if isinstance(value, bool):
        return VarType(kind="bool")
    if isinstance(value, int):
        return VarType(kind="int")
    if isinstance(value, float):
        return VarType(kind="float")
    if isinstance(value, str):
        return VarType(kind="text")
    return VarType(kind="json")


def merge_types(left: VarType, right: VarType) -> VarType:
    """The type of a column that holds both; a text keeps its quotes beside one that may have none."""
    if left != right:
        left, right = replace(left, quoted=False), replace(right, quoted=False)
    return left if left == right else VarType(kind="json", is_list=left.is_list and right.is_list)
