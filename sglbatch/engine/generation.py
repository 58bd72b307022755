"""A generating request while it runs: how its next token is drawn, what a token does to it, when it ends."""

from __future__ import annotations

from sglbatch.engine.fsm.masks import Guide
from sglbatch.engine.random import uniform
from sglbatch.engine.sampler import Sampling
from sglbatch.engine.sequence import Sequence
from sglbatch.engine.text import TextBuffer
from sglbatch.types import FinishReason, Generate, Result, Usage


class Generation:
    """One request's answer so far.

    Args:
        text: takes the tokens and finds stop strings.
        guide: the constraint's automaton over tokens, if there is one.
        end_token_ids: tokens that end the answer and are not part of it.
    """

    def __init__(
        self, sequence: Sequence, text: TextBuffer, *, guide: Guide | None, end_token_ids: frozenset[int]
    ) -> None:
        assert isinstance(sequence.request.operation, Generate)
        self.request = sequence.request
        self.operation = sequence.request.operation
        self.end_token_ids = end_token_ids
        self.sequence = sequence
        self.text = text
        self.guide = guide
        self.state = guide.start if guide else 0
        self.num_sampled = 0

    def sampling(self) -> Sampling:
        """How the next token is drawn."""
        operation = self.operation
        return Sampling(
            temperature=operation.temperature,
            top_p=operation.top_p,
            top_k=operation.top_k,
            min_p=operation.min_p,
            uniform=0.0 if operation.greedy else uniform(self.request.seed, self.num_sampled),
            mask_W=self.guide.mask(self.state) if self.guide else None,
        )

    def accept(self, token_id: int) -> FinishReason | None:
        """Takes a sampled token; says why the generation ends, if it does."""
        self.num_sampled += 1
        if token_id in self.end_token_ids:
            return "stop"
        self.sequence.output_ids.append(token_id)
        if self.text.append(token_id):
            return "stop"
        if self.guide:
            self.state = self.guide.advance(self.state, token_id)
            if self.guide.is_final(self.state):
                return "constraint"
        return "length" if len(self.sequence.output_ids) >= self.operation.max_tokens else None

    def result(self, reason: FinishReason) -> Result:
        text, output_ids, tail = self.text.result()
        usage = Usage(prompt_tokens=len(self.request.prompt_ids), generated_tokens=self.num_sampled)
        return Result(
            request_id=self.request.request_id,
            text=text,
            output_ids=output_ids,
            tail=tail,
            finish_reason=reason,
            usage=usage,
        )
