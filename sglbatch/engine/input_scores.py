"""Log-probabilities of a prompt's own tokens: a scored row that runs just before its generation and shares its KV."""

from __future__ import annotations

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
        self._logprobs: dict[int, float] = {}
        targets = {position: (self._ids[position + 1],) for position in range(max(start - 1, 0), len(self._ids) - 1)}
        self._num_scored = len(targets)
        self.sequence = Sequence(request, request.prompt_ids[:-1], priority=priority, targets=targets)

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
        (self._logprobs[position + 1],) = logprobs

    @property
    def is_scored(self) -> bool:
        return len(self._logprobs) == self._num_scored

    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """One for each token from the first that was asked for."""
        return tuple((self._logprobs.get(i), self._ids[i]) for i in range(self._start, len(self._ids)))
