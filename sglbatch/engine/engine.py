"""The local backend: requests in, results out, one step of the model at a time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from sglbatch.engine.choice import Choice
from sglbatch.engine.fsm.automaton import Automaton
from sglbatch.engine.fsm.masks import Guide, TokenMasks
from sglbatch.engine.fsm.regex import compile_regex
from sglbatch.engine.generation import Generation
from sglbatch.engine.radix.order import depth_first_order
from sglbatch.engine.sampler import Sampling
from sglbatch.engine.scheduler import Scheduler, SchedulerConfig
from sglbatch.engine.sequence import Action, Sequence, Step
from sglbatch.engine.text import TextBuffer
from sglbatch.errors import ConstraintError
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import (
    BackendStats,
    Constraint,
    ErrorInfo,
    Generate,
    Priority,
    Request,
    Result,
    prefill_runs,
)


class Runner(Protocol):
    """What puts a step through a model; ``ModelRunner``, and a stub in tests of the scheduler."""

    def run(self, step: Step, samplings: Seq[Sampling | None]) -> list[int | list[float]]: ...


class LocalEngine:
    """A ``Backend`` that runs a model in this process.

    Args:
        runner: a model with its KV pool of ``scheduler_config.num_slots`` slots.
        identity: of the model; part of every call's key.
        context_len: most tokens of a prompt and its answer together.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        identity: str,
        context_len: int,
        scheduler_config: SchedulerConfig,
    ) -> None:
        self.tokenizer = tokenizer
        self.identity = identity
        self.context_len = context_len
        self.scheduler = Scheduler(scheduler_config)
        self._runner = runner
        self._owners: dict[Sequence, Generation | Choice] = {}
        self._refused: list[Result] = []
        self._masks: TokenMasks | None = None
        self._automata: dict[Constraint, Automaton] = {}
        self._num_requests = 0
        self._num_generated = 0
        self._num_ordered = 0

    # --- Backend ---

    def submit(self, requests: Seq[Request]) -> None:
        for request, priority in zip(requests, self._priorities(requests), strict=True):
            self._num_requests += 1
            error = self._misfit(request)
            if error is not None:
                self._refused.append(Result(request_id=request.request_id, error=error))
            elif isinstance(request.operation, Generate):
                self._add_generation(request, request.operation, priority)
            else:
                self._add_choice(request, priority)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._refused) or self.scheduler.has_unfinished

    def step(self) -> list[Result]:
        results, self._refused = self._refused, []
        if not self.scheduler.has_unfinished:
            return results
        step = self.scheduler.schedule()
        samplings = [self._sampling(action) for action in step.actions]
        outputs = self._runner.run(step, samplings)
        for action, output in zip(step.actions, outputs, strict=True):
            result = self._take(action, output)
            if result is not None:
                results.append(result)
        return results

    def finish_program(self, program_id: int) -> None:
        self.scheduler.finish_program(program_id)

    def stats(self) -> BackendStats:
        counters = self.scheduler.counters
        return BackendStats(
            requests=self._num_requests,
            prompt_tokens=counters.prompt_tokens,
            computed_prompt_tokens=counters.computed_prompt_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            generated_tokens=self._num_generated,
            steps=counters.steps,
        )

    def close(self) -> None:
        """Nothing to release: memory goes with the object."""

    # --- requests ---

    def _priorities(self, requests: Seq[Request]) -> list[Priority]:
        """The requests' own, or this batch's depth-first order behind everything ordered before."""
        unordered = [r for r in requests if r.priority is None]
        order, _ = depth_first_order([r.prompt_ids for r in unordered])
        places = {id(unordered[i]): self._num_ordered + place for place, i in enumerate(order.tolist())}
        self._num_ordered += len(unordered)
        return [(places[id(r)],) if r.priority is None else r.priority for r in requests]

    def _misfit(self, request: Request) -> ErrorInfo | None:
        """Why a request can never run."""
        prompt_len = len(request.prompt_ids)
        if isinstance(request.operation, Generate):
            num_tokens, num_slots = prompt_len + request.operation.max_tokens, request.operation.max_tokens - 1
            what = f"the prompt's {prompt_len} tokens plus max_tokens {request.operation.max_tokens}"
        else:
            runs = prefill_runs(request.prompt_ids, request.operation)
            num_tokens, num_slots = max(len(run) for run in runs) + 1, sum(len(run) - prompt_len for run in runs)
            what = f"the prompt's {prompt_len} tokens plus its choices"
        assert prompt_len > 0, "an empty prompt is the language's error"
        if num_tokens > self.context_len:
            message = f"{what} are more than the model's context of {self.context_len}"
            return ErrorInfo(code="prompt-too-long", message=message)
        pool = self.scheduler.config.num_slots
        if prompt_len + num_slots > pool:
            message = f"{what} are more than the KV pool of {pool} tokens; give a larger --kv-tokens"
            return ErrorInfo(code="prompt-too-long", message=message)
        return None

    def _add_generation(self, request: Request, operation: Generate, priority: Priority) -> None:
        try:
            guide = self._guide(operation.constraint)
        except ConstraintError as error:
            info = ErrorInfo(code=error.code, message=error.message)
            self._refused.append(Result(request_id=request.request_id, error=info))
            return
        sequence = Sequence(request, request.prompt_ids, priority=priority)
        text = TextBuffer(self.tokenizer.token_bytes, operation.stop)
        ends = self.tokenizer.eos_token_ids | self._special_stops(operation.stop)
        self._owners[sequence] = Generation(sequence, text, guide=guide, end_token_ids=ends)
        self.scheduler.add(sequence)

    def _special_stops(self, stop: tuple[str, ...]) -> frozenset[int]:
        """Stop strings that are a special token's text end at that token, which has no text of its own."""
        specials = self.tokenizer.specials
        return frozenset(specials[s] for s in stop if s in specials)

    def _add_choice(self, request: Request, priority: Priority) -> None:
        choice = Choice(request, priority)
        for sequence in choice.sequences:
            self._owners[sequence] = choice
            self.scheduler.add(sequence)

    def _guide(self, constraint: Constraint | None) -> Guide | None:
        if constraint is None:
            return None
        if self._masks is None:
            tokenizer = self.tokenizer
            self._masks = TokenMasks(tokenizer.token_bytes, tokenizer.eos_token_ids, tokenizer.vocab_size)
        automaton = self._automata.get(constraint)
        if automaton is None:
            automaton = self._automata[constraint] = compile_regex(constraint.source)
        return self._masks.guide(automaton)

    # --- outcomes ---

    def _sampling(self, action: Action) -> Sampling | None:
        owner = self._owners[action.sequence]
        return owner.sampling() if isinstance(owner, Generation) else None

    def _take(self, action: Action, output: int | list[float]) -> Result | None:
        owner = self._owners[action.sequence]
        if isinstance(owner, Generation):
            assert isinstance(output, int)
            return self._take_token(owner, output)
        assert isinstance(output, list)
        owner.record(action.sequence, action.position, action.targets, output)
        return self._decide(owner) if owner.is_scored else None

    def _take_token(self, generation: Generation, token_id: int) -> Result | None:
        self._num_generated += 1
        reason = generation.accept(token_id)
        if reason is None:
            return None
        self.scheduler.finish(generation.sequence)
        del self._owners[generation.sequence]
        return generation.result(reason)

    def _decide(self, choice: Choice) -> Result:
        result = choice.decide()
        assert result.choice is not None
        self.scheduler.finish_choice(choice.sequences, choice.row_of(result.choice))
        for sequence in choice.sequences:
            del self._owners[sequence]
        return result
