"""A generating request while it runs: how its next token is drawn, what a token does to it, when it ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

import torch

from sglbatch.engine.fsm.bitmask import Bitmask, single_bit
from sglbatch.engine.fsm.finite import Alternative, FiniteChoice, FiniteChoices
from sglbatch.engine.fsm.guide import Followed, Forced, Guide, follow
from sglbatch.engine.probe import Probe
from sglbatch.engine.sampler import Drawn, Sampling, sample
from sglbatch.engine.sequence import Sequence
from sglbatch.engine.text import TextBuffer
from sglbatch.types import ErrorInfo, FinishReason, Generate, Result, TokenLogprob, Usage

MAX_FREE_TEXT_BYTES: Final = 1000
"""A string that its schema does not bound is led to its end from here on; maxLength sets another limit."""


class Generation:
    """One request's answer so far.

    Args:
        text: takes the tokens and finds where they stop.
        guide: the constraint's automaton over tokens, if there is one.
        forced: the guide's forced runs.
        finite: the guide's finite choices, where those are decided by whole alternatives.
        jump_forward: take a forced run in one step; else the same tokens one a step.
        eos_token_ids: the ends of the sequence.
        end_token_ids: further tokens that end the answer and are not part of it.
    """

    def __init__(
        self,
        sequence: Sequence,
        text: TextBuffer,
        *,
        guide: Guide | None,
        forced: Forced | None = None,
        finite: FiniteChoices | None = None,
        jump_forward: bool = True,
        eos_token_ids: frozenset[int],
        end_token_ids: frozenset[int],
    ) -> None:
        assert isinstance(sequence.request.operation, Generate)
        self.request = sequence.request
        self.operation = sequence.request.operation
        self.sequence = sequence
        self.text = text
        self.guide = guide
        self.state = guide.start if guide else 0
        self.num_sampled = 0
        """Tokens of the answer, its end among them; forced ones count like others."""
        self.num_jumped = 0
        """Forced tokens that took no step of their own."""
        self._forced = forced
        # Log-probabilities are asked for each token, so each has its step then.
        self._jumps = jump_forward and self.operation.num_top_logprobs is None
        self._run: tuple[int, ...] = ()
        operation = self.operation
        penalised = bool(operation.frequency_penalty or operation.presence_penalty)
        # Exact scores are the model's own, and know of no penalty.
        self._finite = None if penalised else finite
        self._choice: FiniteChoice | None = None
        self._chosen: Alternative | None = None
        self._ending: Bitmask | None = None
        self._stops = False
        self._is_completing = False
        self._free_len = 0
        self.input_logprobs: tuple[TokenLogprob, ...] = ()
        self._end_token_ids = end_token_ids if self.operation.ignore_eos else end_token_ids | eos_token_ids
        # The constraint may leave nothing but a stop token, never nothing but the end of the sequence.
        self._banned_early = tuple(sorted(eos_token_ids if guide else end_token_ids | eos_token_ids))
        # A constrained text ends where its automaton does, so there the end of the sequence has no other meaning.
        self._banned_always = tuple(sorted(eos_token_ids)) if guide and self.operation.ignore_eos else ()
        self.may_run_ahead = guide is None and not penalised and operation.num_top_logprobs is None
        """A token can be drawn before the one before it is known here."""
        self.is_plain = self.may_run_ahead and operation.greedy and not operation.min_tokens
        """Every token is the most probable one (``GREEDY`` for ``sampling``), and nothing but the end, stop strings and
        max_tokens matters (``take_plain`` for ``accept``)."""
        self._takes_whole_runs = text.never_stops and not penalised and not operation.complete
        """Nothing needs a look between the tokens of a forced run."""
        self._counts: Counter[int] = Counter()
        if forced is not None:
            self._look_ahead(forced)
        self._logprobs: list[TokenLogprob] = []
        self._top_logprobs: list[tuple[TokenLogprob, ...]] = []

    def sampling(self, num_ahead: int = 0) -> Sampling:
        """How the next token is drawn, or one after ``num_ahead`` others that are not known yet."""
        operation, position = self.operation, self.num_sampled + num_ahead
        return Sampling(
            temperature=operation.temperature,
            top_p=operation.top_p,
            top_k=operation.top_k,
            min_p=operation.min_p,
            seed=self.request.seed,
            position=position,
            mask_W=self._mask(),
            penalties=self._penalties(),
            banned=self._banned_early if position < operation.min_tokens else self._banned_always,
            num_top_logprobs=operation.num_top_logprobs,
        )

    def _mask(self) -> Bitmask | None:
        if self.guide is None:
            return None
        if self._run:
            return single_bit(self._run[0], len(self.guide.mask(self.state)))
        if self._ending is not None:
            return self._ending
        if self._free_len >= MAX_FREE_TEXT_BYTES:
            return self.guide.completing_mask(self.state)
        return self.guide.mask(self.state)

    def _penalties(self) -> dict[int, float]:
        often, ever = self.operation.frequency_penalty, self.operation.presence_penalty
        if not often and not ever:
            return {}
        return {token_id: often * count + ever for token_id, count in self._counts.items()}

    def accept(self, drawn: int | Drawn) -> FinishReason | None:
        """Takes a sampled token; says why the generation ends, if it does."""
        token_id = drawn if isinstance(drawn, int) else drawn.token_id
        if isinstance(drawn, Drawn):
            self._logprobs.append((drawn.logprob, token_id))
            self._top_logprobs.append(drawn.top)
        return self._take_run(self._accept(token_id))

    def _take_run(self, reason: FinishReason | None) -> FinishReason | None:
        """What must follow, where it is taken at once."""
        while self._jumps and self._run and reason is None:
            before = self.num_sampled
            is_whole = self._takes_whole_runs and self._end_token_ids.isdisjoint(self._run)
            reason = self._take_whole_run() if is_whole else self._accept(self._run[0])
            self.num_jumped += self.num_sampled - before
        return reason

    def _take_whole_run(self) -> FinishReason | None:
        """``_take`` of all the run's tokens, where only their number and the last one can end the answer."""
        assert self.guide is not None and self._forced is not None
        output_ids, max_tokens = self.sequence.output_ids, self.operation.max_tokens
        run = self._run[: max_tokens - len(output_ids)]
        self._run = self._run[len(run) :]
        self.num_sampled += len(run)
        output_ids.extend(run)
        self._move(self._forced.follow(self.state, run))
        if not self._run:
            self._go_on(self._forced)
            if self.guide.is_final(self.state) or self._stops:
                return "constraint"
        return "length" if len(output_ids) >= max_tokens else None

    def _accept(self, token_id: int) -> FinishReason | None:
        if token_id in self._end_token_ids:
            self.num_sampled += 1
            return "stop"
        return self._take(self._within_reach(token_id))

    # --- finite choices ---

    def _look_ahead(self, forced: Forced) -> None:
        """What must follow the state, or which few texts can."""
        self._run = forced.tokens(self.state)
        choice = None if self._run or self._finite is None else self._finite.at(self.state)
        if choice is None or not self._takes(choice):
            return
        if choice.common:
            self._choice, self._run = choice, choice.common
        else:
            self.sequence.probe = Probe(choice)

    def _takes(self, choice: FiniteChoice) -> bool:
        """Near ``max_tokens``, and where the answer may not end yet, the mask decides."""
        operation = self.operation
        if choice.may_stop and (operation.ignore_eos or self.num_sampled < operation.min_tokens):
            return False
        return choice.num_tokens <= operation.max_tokens - len(self.sequence.output_ids)

    def record(self, node: tuple[int, ...], logprobs: list[float]) -> FinishReason | None:
        """Takes scores of the sequence's probe; with the last ones the choice is made, which may end the answer."""
        probe = self.sequence.probe
        assert probe is not None
        probe.record(node, logprobs)
        if not probe.is_scored:
            return None
        self.sequence.probe = None
        self._chosen = probe.alternatives[self._draw(probe.log_masses())]
        self._run = self._chosen.tokens
        return self._take_run(None)

    def _draw(self, logprobs: list[float]) -> int:
        """One of the alternatives, as one of so many tokens would be drawn."""
        if self.operation.greedy:
            return max(range(len(logprobs)), key=logprobs.__getitem__)
        own = replace(self.sampling(), mask_W=None, penalties={}, banned=(), num_top_logprobs=None)
        (number,) = sample(torch.tensor([logprobs]), [own])
        return number

    # --- tokens ---

    def take_plain(self, token_id: int) -> FinishReason | None:
        """``accept``, of a generation that ``is_plain``."""
        self.num_sampled += 1
        if token_id in self._end_token_ids:
            return "stop"
        output_ids = self.sequence.output_ids
        output_ids.append(token_id)
        if self.text.stops():
            return "stop"
        return "length" if len(output_ids) >= self.operation.max_tokens else None

    def _within_reach(self, token_id: int) -> int:
        """The token, or with ``complete`` the first of the shortest completion where the token would leave no room."""
        if not self.operation.complete or self._is_completing or self.guide is None or self._forced is None:
            return token_id
        left = self.operation.max_tokens - len(self.sequence.output_ids) - 1
        after = self.guide.advance(self.state, token_id)
        if self.guide.cost(after) <= left or len(self._forced.completion(after)) <= left:
            return token_id
        completion = self._forced.completion(self.state)
        if not completion or len(completion) > left + 1:
            return token_id  # there never was room
        self._is_completing = True
        self._choice = self._chosen = self._ending = None
        self._run = completion
        return completion[0]

    def _take(self, token_id: int) -> FinishReason | None:
        """One more token of the answer."""
        self.num_sampled += 1
        self._counts[token_id] += 1
        self.sequence.output_ids.append(token_id)
        if self.text.stops(may_stop=self.num_sampled > self.operation.min_tokens):
            return "stop"
        if self.guide:
            self._advance(self.guide, token_id)
            if self.guide.is_final(self.state) or (self._is_completing and not self._run) or self._stops:
                return "constraint"
        return "length" if len(self.sequence.output_ids) >= self.operation.max_tokens else None

    def _advance(self, guide: Guide, token_id: int) -> None:
        self._move(follow(guide, self.state, (token_id,)))
        if self._run:
            assert token_id == self._run[0], "a forced run leaves no choice"
            self._run = self._run[1:]
        if not self._run and not self._is_completing and self._forced is not None:
            self._go_on(self._forced)

    def _move(self, followed: Followed) -> None:
        self.state = followed.state
        self._free_len = (self._free_len if followed.is_free else 0) + followed.free_len

    def _go_on(self, forced: Forced) -> None:
        """The last token ended a run, or had a choice of its own."""
        choice, chosen = self._choice, self._chosen
        self._choice = self._chosen = self._ending = None
        if choice is not None:
            self.sequence.probe = Probe(choice)
        elif chosen is not None and chosen.is_open:
            self._ending = chosen.then
        elif chosen is not None and chosen.stops:
            self._stops = True
        else:
            self._look_ahead(forced)

    def _incomplete(self, reason: FinishReason, text: str) -> ErrorInfo | None:
        """A text that max_tokens or a stop string cut inside its constraint is no value; the error keeps it."""
        if self.guide is None or reason == "constraint" or self.guide.may_end(self.state):
            return None
        what = f"max_tokens ({self.operation.max_tokens})" if reason == "length" else "a stop string or token"
        message = f"{what} ended the text inside its constraint; the text so far: {text}"
        return ErrorInfo(code="constraint-incomplete", message=message)

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
            error=self._incomplete(reason, text),
            output_logprobs=tuple(self._logprobs),
            output_top_logprobs=tuple(self._top_logprobs) if self.operation.num_top_logprobs else (),
            input_logprobs=self.input_logprobs,
            cached_tokens=min(self.sequence.num_cached, len(self.request.prompt_ids)),
        )
