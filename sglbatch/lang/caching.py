"""Computing what all runs of a program begin with, before they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglbatch.lang.abstract import has_placeholder, parts
from sglbatch.lang.dialect import BringsDialect, environment_of
from sglbatch.lang.environment import LanguageBackend
from sglbatch.lang.operations import Append, Mark
from sglbatch.lang.trace import Trace, trace_program
from sglbatch.types import Generate, Request, Text

if TYPE_CHECKING:
    from sglbatch.lang.function import SglFunction


def cache_prefix(function: SglFunction, backend: LanguageBackend) -> None:
    """Puts the program's constant beginning through a backend that is not busy, which may keep it for later runs."""
    prefix = constant_prefix(trace_program(function, {}, environment_of(backend)))
    if isinstance(backend, BringsDialect):
        return  # nothing can be put into the memory of such a backend
    (prompt_ids,) = backend.tokenizer.encode_prompts([prefix])
    if not 0 < len(prompt_ids) < backend.context_len:
        return
    operation = Generate(max_tokens=1, temperature=0.0)
    backend.submit([Request(request_id=-1, program_id=-1, prompt_ids=prompt_ids, operation=operation, seed=0)])
    while backend.has_unfinished:
        backend.step()


def constant_prefix(trace: Trace) -> tuple[Text, ...]:
    """The text before the first thing that is not known in advance."""
    prefix: list[Text] = []
    for operation in trace.streams[0].log or []:
        if isinstance(operation, Append):
            text = operation.text.text
            first = next(iter(parts(text)))
            if not first[0]:
                prefix.append(Text(first[1], operation.text.specials))
            if has_placeholder(text):
                break
        elif not isinstance(operation, Mark):
            break
    return tuple(prefix)
