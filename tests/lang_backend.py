"""A backend whose answers are a function of the prompt's text: what the language's tests run on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from sglbatch.tokenizer import Tokenizer
from sglbatch.types import BackendStats, Choose, ErrorInfo, Generate, Request, Result, TokenIds, Usage

Answer = Callable[[str, Request], str | int | ErrorInfo]
"""(prompt text, request) -> generated text, index of the choice, or an error."""


class ScriptedBackend:
    """Answers a few requests a step, in an order of its own.

    Args:
        shuffle: seed of the order in which waiting requests are answered; None is first come, first served.
        batch: requests answered in one step.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        answer: Answer,
        *,
        shuffle: int | None = None,
        batch: int = 64,
        context_len: int = 8192,
    ) -> None:
        self.tokenizer = tokenizer
        self.requests: list[Request] = []
        self.ended_programs: list[int] = []
        self._answer = answer
        self._waiting: list[Request] = []
        self._random = None if shuffle is None else random.Random(shuffle)
        self._batch = batch
        self._context_len = context_len
        self._special_texts = {token_id: text for text, token_id in tokenizer.specials.items()}

    @property
    def identity(self) -> str:
        return "scripted"

    @property
    def context_len(self) -> int:
        return self._context_len

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    @property
    def prompts(self) -> list[str]:
        """The prompts of all requests so far, special tokens shown."""
        return [self.show(request.prompt_ids) for request in self.requests]

    def show(self, ids: TokenIds) -> str:
        pieces = [
            self._special_texts[i].encode() if i in self._special_texts else self.tokenizer.token_bytes[i]
            for i in ids.tolist()
        ]
        return b"".join(pieces).decode("utf-8", "replace")

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests += requests
        self._waiting += requests

    def step(self) -> list[Result]:
        if self._random is not None:
            self._random.shuffle(self._waiting)
        now, self._waiting = self._waiting[: self._batch], self._waiting[self._batch :]
        return [self._result(request) for request in now]

    def finish_program(self, program_id: int) -> None:
        self.ended_programs.append(program_id)

    def stats(self) -> BackendStats:
        return BackendStats(requests=len(self.requests))

    def close(self) -> None:
        self._waiting = []

    def _result(self, request: Request) -> Result:
        answer = self._answer(self.show(request.prompt_ids), request)
        if isinstance(answer, ErrorInfo):
            return Result(request_id=request.request_id, error=answer)
        num_prompt = len(request.prompt_ids)
        if isinstance(answer, int):
            assert isinstance(request.operation, Choose)
            number = len(request.operation.alternatives)
            assert 0 <= answer < number
            return Result(
                request_id=request.request_id,
                finish_reason="choice",
                usage=Usage(prompt_tokens=num_prompt, generated_tokens=0),
                choice=answer,
                choice_logprobs=tuple(0.0 if i == answer else -9.0 for i in range(number)),
            )
        assert isinstance(request.operation, Generate)
        ids = tuple(self.tokenizer.encode(answer))
        return Result(
            request_id=request.request_id,
            text=answer,
            output_ids=ids,
            usage=Usage(prompt_tokens=num_prompt, generated_tokens=len(ids)),
        )
