"""Log-probabilities of a prompt's own tokens: a scored row that runs just before its generation and shares its KV."""

from __future__ import annotations

import math

from sglbatch.engine.generation import Generation
from sglbatch.engine.sequence import Sequence
from sglbatch.types import Generate, Priority, Request, TokenLogprob


class InputScores:
    """The prompt's tokens of one request on their way to log-probabilities.

    Attributes:
        generation: of the same request; it is told the result.
        sequence: the prompt without its last token, whose successor the generation draws.
    """

    generation: Generation

    def __init__(self, request: Request, priority: Priority, start: int) -> None:
        self._ids: list[int] = request.prompt_ids.tolist()
        self._start = start
        self._last_logprob = 0.0
        targets = {position: (self._ids[position + 1],) for position in range(max(start - 1, 0), len(self._ids) - 1)}
        self.sequence = Sequence(
            request, request.prompt_ids[:-1], priority=priority, targets=targets, own_successors=True
        )

    @staticmethod
    def of(request: Request, priority: Priority) -> InputScores | None:
        """The scores of a request that asks for some and whose prompt has some."""
        assert isinstance(request.operation, Generate)
        start = request.operation.input_logprobs_from
        if start is None or max(start, 1) >= len(request.prompt_ids):
            return None
        return InputScores(request, priority, start)

    def record(self, position: int, logprobs: list[float]) -> None:
        """The log-probability of the token behind ``position``."""
        (logprob,) = logprobs
        if position + 1 < len(self.sequence.ids):
            self.sequence.note_logprob(position + 1, logprob)
        else:
            self._last_logprob = logprob

    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """One for each token from the first that was asked for; once the last position is recorded."""
        values = [value for _, part in self.sequence.logprobs for value in part.tolist()]
        values.append(self._last_logprob)
        assert math.inf not in values, "a token of the prompt is still to be scored"
        first = len(self._ids) - len(values)
        unscored: list[TokenLogprob] = [(None, self._ids[i]) for i in range(self._start, first)]
        return (*unscored, *zip(values, self._ids[first:], strict=True))
