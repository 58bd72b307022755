"""Which part of an answer is reasoning, for the families of models that mark it.

The marks and the names are those of SGLang's reasoning parsers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sglbatch.errors import SglbatchError


@dataclass(frozen=True, slots=True)
class Marks:
    """``always``: the text begins with reasoning even where the opening mark is missing."""

    start: str
    end: str
    always: bool = False


_THINK: Final = Marks("<think>", "</think>")
_ALWAYS_THINK: Final = Marks("<think>", "</think>", always=True)
MARKS: Final = {
    "deepseek-r1": _ALWAYS_THINK,
    "deepseek-v3": _THINK,
    "glm45": _THINK,
    "kimi": Marks("◁think▷", "◁/think▷"),
    "qwen3": _THINK,
    "qwen3-thinking": _ALWAYS_THINK,
    "step3": _ALWAYS_THINK,
}


def check_model_type(model_type: object) -> str:
    """Raises SglbatchError ``invalid-argument`` for a family whose marks are not known."""
    if isinstance(model_type, str) and model_type.lower() in MARKS:
        return model_type.lower()
    raise SglbatchError(
        "invalid-argument",
        f"separate_reasoning knows no model_type {model_type!r}",
        hint=f"choose from: {', '.join(MARKS)}",
    )


def split_reasoning(text: str, model_type: str) -> tuple[str, str]:
    """(reasoning, answer). Reasoning that was cut off before its end has no answer behind it."""
    marks = MARKS[model_type]
    if marks.start not in text and not marks.always:
        return "", text
    reasoning, _, answer = text.replace(marks.start, "", 1).strip().partition(marks.end)
    return reasoning.strip(), answer.strip()
