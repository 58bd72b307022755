"""A select's alternatives as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sglbatch.errors import ConstraintError
from sglbatch.lang.calls import Choices
from sglbatch.lang.guard import GUARD
from sglbatch.types import Choose, Prompt, Text, TokenIds


def choice_prompts(prompt: Prompt, question: Choices) -> list[Prompt]:
    """One prompt for each choice: what is before it, the choice, the constant text after it, to tokenise jointly.

    The methods that compare tokens need the prompt alone too, which comes last.
    """
    prompts = [(*prompt, Text(choice, question.specials), *question.following) for choice in question.choices]
    return prompts if question.method == "exact" else [*prompts, prompt]


def split_choices(
    encoded: Sequence[TokenIds], question: Choices, token_bytes: Sequence[bytes], specials: Mapping[str, int]
) -> tuple[TokenIds, Choose]:
    """The common prompt and each choice's own ids.

    Args:
        encoded: ids of ``choice_prompts``.

    Raises:
        ConstraintError: ``equal-choices`` where two have the same ids; ``empty-prompt`` where no token comes before.
    """
    if question.method == "exact":
        start, ends = _exact_spans(encoded, question, token_bytes, specials)
        healed_lens: tuple[int, ...] = ()
    else:
        *encoded, alone = encoded
        start, ends, healed_lens = _token_spans(encoded, alone)
    if start < 1:
        raise ConstraintError("empty-prompt", "the prompt before a select is empty: add text before it")
    alternatives = tuple(tuple(ids[start:end].tolist()) for ids, end in zip(encoded, ends, strict=True))
    for i, ids in enumerate(alternatives):
        if ids in alternatives[:i]:
            same = question.choices[alternatives.index(ids)]
            raise ConstraintError(
                "equal-choices",
                f"the choices {same!r} and {question.choices[i]!r} are the same tokens in this place",
            )
    choose = Choose(
        alternatives=alternatives,
        temperature=question.temperature,
        method=question.method,
        healed_lens=healed_lens,
    )
    return encoded[0][:start], choose


def _token_spans(encoded: Sequence[TokenIds], alone: TokenIds) -> tuple[int, list[int], tuple[int, ...]]:
    """Where the alternatives begin and end, and how many of their tokens are the prompt's.

    As in SGLang, a choice's tokens are those of prompt and choice together behind the prompt's own tokens; where the
    choice changes the prompt's last tokens, they are its tokens too.
    """
    kept = [_common_prefix_len([alone, ids]) for ids in encoded]
    start = min(kept)
    healed_lens = tuple(length - start for length in kept)
    return start, [len(ids) for ids in encoded], healed_lens if any(healed_lens) else ()


def _exact_spans(
    encoded: Sequence[TokenIds], question: Choices, token_bytes: Sequence[bytes], specials: Mapping[str, int]
) -> tuple[int, list[int]]:
    """Where the alternatives begin, and where each ends.

    The prompt is the longest common prefix that leaves every choice at least one token; an alternative ends at the
    first token boundary at or beyond the end of its choice's text.
    """
    num_bytes, num_specials = _following_size(question.following, specials)
    ends = [_end(ids, token_bytes, num_bytes, num_specials) for ids in encoded]
    return min(_common_prefix_len(encoded), min(ends) - 1), ends


def _following_size(following: Sequence[Text], specials: Mapping[str, int]) -> tuple[int, int]:
    """Bytes of plain text and number of special tokens in the constant text after a choice."""
    num_bytes = num_specials = 0
    for segment in following:
        text = segment.text
        for token in sorted(segment.specials & specials.keys(), key=len, reverse=True):
            num_specials += text.count(token)
            text = text.replace(token, "")
        num_bytes += len(text.replace(GUARD, "").encode("utf-8", "surrogatepass"))
    return num_bytes, num_specials


def _end(ids: TokenIds, token_bytes: Sequence[bytes], num_bytes: int, num_specials: int) -> int:
    """Number of ids left when every token wholly inside the following text is taken off the end."""
    end = len(ids)
    while end > 0:
        size = len(token_bytes[int(ids[end - 1])])
        if size > num_bytes or (size == 0 and num_specials == 0):
            break
        num_bytes -= size
        num_specials -= size == 0
        end -= 1
    return end


def _common_prefix_len(encoded: Sequence[TokenIds]) -> int:
    shortest = min(len(ids) for ids in encoded)
    first = encoded[0][:shortest]
    common = shortest
    for ids in encoded[1:]:
        different = np.flatnonzero(first != ids[:shortest])
        if len(different):
            common = min(common, int(different[0]))
    return common
