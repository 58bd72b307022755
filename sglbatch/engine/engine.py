"""The local backend: requests in, results out, one step of the model at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from sglbatch.engine.choice import Choice
from sglbatch.engine.decision import Output
from sglbatch.engine.fsm.compiled import Compiler
from sglbatch.engine.fsm.finite import FiniteChoices
from sglbatch.engine.fsm.guide import Forced, Guide
from sglbatch.engine.fsm.masks import TokenMasks
from sglbatch.engine.generation import Generation
from sglbatch.engine.input_scores import InputScores
from sglbatch.engine.passes import Passes, Pending, Runner
from sglbatch.engine.radix.order import depth_first_order
from sglbatch.engine.run_order import RequestRows, place_rows
from sglbatch.engine.sampler import GREEDY, Sampling
from sglbatch.engine.scheduler import Ready, Scheduler, SchedulerConfig
from sglbatch.engine.sequence import Action, Sequence, Step
from sglbatch.engine.text import TextBuffer
from sglbatch.errors import ConstraintError
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import (
    BackendStats,
    Constraint,
    ErrorInfo,
    FinishReason,
    Generate,
    Priority,
    Request,
    Result,
    prefill_runs,
    unconditional_runs,
)

MAX_FORCED = 256
"""Constraints whose forced runs are remembered."""

MIN_OVERLAP_TOKENS = 256
"""A step of fewer tokens is not worth a launch of its own: its rows wait for those in flight and join them."""

MIN_RESULTS = 32
"""Results handed on at a time, at least, while there is a step to launch. A cohort often ends as a whole, and what
programs make of a thousand results takes longer than the device takes for a step."""
TOKENS_FOR_RESULT = 16
"""A result more for so many tokens of the step that the device works on meanwhile."""
SHARE_OF_RESULTS = 8
"""One in so many results at least, so that they do not pile up."""


class LocalEngine:
    """A ``Backend`` that runs a model in this process.

    Args:
        runner: a model with its KV pool of ``scheduler_config.num_slots`` slots.
        identity: of the model; part of every call's key.
        context_len: most tokens of a prompt and its answer together.
        overlap: prepare the next step while the device runs one; rows then form two cohorts.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        identity: str,
        context_len: int,
        scheduler_config: SchedulerConfig,
        overlap: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.identity = identity
        self.context_len = context_len
        self.scheduler = Scheduler(scheduler_config)
        self._runner = runner
        self._passes = Passes(runner)
        self._owners: dict[Sequence, Generation | Choice | InputScores] = {}
        self._overlap = overlap
        self._in_flight: tuple[Step, Pending] | None = None
        self._ended: deque[Callable[[], Result]] = deque()
        self.compiler = Compiler()
        """What compiles constraints; the caller's, where automata are to be kept on disk."""
        self._forced: dict[Guide, Forced] = {}
        self._finite: dict[Guide, FiniteChoices] = {}
        self.jump_forward = True
        """Take forced runs in one step; off, the same tokens one a step (to compare)."""
        self.num_jumped_tokens = 0
        """Forced tokens that took no step of their own."""
        self._num_requests = 0
        self._num_generated = 0
        self._num_ordered = 0

    # --- Backend ---

    def submit(self, requests: Seq[Request]) -> None:
        batch = []
        for request, priority in zip(requests, self._priorities(requests), strict=True):
            self._num_requests += 1
            rows = self._rows_of(request, priority)
            if rows:
                batch.append(RequestRows(priority=priority, rows=rows))
        place_rows(batch)
        for placed in batch:
            for row in placed.rows:
                self.scheduler.add(row)
                if row.own_successors:
                    self.scheduler.counters.prompt_tokens -= len(row.ids)  # the same prompt is the generation's

    @property
    def has_unfinished(self) -> bool:
        return bool(self._ended) or self._in_flight is not None or self.scheduler.has_unfinished

    def step(self) -> list[Result]:
        """Launches the next step, then takes what the one before it decided (or, without overlap, this one)."""
        before, self._in_flight = self._in_flight, None
        scheduler = self.scheduler
        ready = self._ready()
        if scheduler.has_unfinished and (before is None or self._is_worth_a_step(ready)):
            self._in_flight = self._launch(ready, before)
        if before is None and not self._overlap:
            before, self._in_flight = self._in_flight, None
        if before is not None:
            self._land(*before)
        return self._hand_on(self._num_results())

    def _num_results(self) -> int:
        """How many of the results to hand on now: all, unless the device would wait for what is made of them."""
        num_ended = len(self._ended)
        if not self._overlap or num_ended <= MIN_RESULTS or not self._is_pressed:
            return num_ended
        num_hidden = 0 if self._in_flight is None else self._in_flight[0].num_tokens // TOKENS_FOR_RESULT
        return min(num_ended, max(MIN_RESULTS, num_hidden, num_ended // SHARE_OF_RESULTS))

    @property
    def _is_pressed(self) -> bool:
        """There is a step to launch now, not only when that in flight has landed."""
        if self._in_flight is None:
            return self.scheduler.has_unfinished
        return self.scheduler.has_unfinished and self._is_worth_a_step(self._ready())

    def _ready(self) -> Ready:
        return self.scheduler.ready(self._runner.most_rows if self._overlap else 0)

    def _hand_on(self, num_results: int) -> list[Result]:
        return [self._ended.popleft()() for _ in range(num_results)]

    def _is_worth_a_step(self, ready: Ready) -> bool:
        """Whether to launch one behind that in flight: a large one, or one that leaves nobody behind."""
        return self.scheduler.num_tokens(ready) >= MIN_OVERLAP_TOKENS or (ready.runs_ahead and ready.leaves_nobody)

    def _launch(self, ready: Ready, before: tuple[Step, Pending] | None) -> tuple[Step, Pending] | None:
        """Schedules and launches a step behind the one in flight."""
        limit = self._max_decode_rows(ready) if self._overlap else None
        step = self.scheduler.schedule(ready, limit)
        if not step.pieces and not step.actions:
            return None
        samplings = [self._sampling(action) for action in step.actions]
        pending = self._passes.launch(step, samplings, None if before is None else before[1])
        if self._passes.max_tokens is not None:
            self.scheduler.max_batch_tokens = min(self.scheduler.max_batch_tokens, self._passes.max_tokens)
        return step, pending

    def _max_decode_rows(self, ready: Ready) -> int | None:
        """At most half of many decoding rows: a step covers the processor's work for the next, which has the others.

        Rows that run ahead need no second cohort: their next step is prepared and launched while they are in flight.
        """
        num_ready, half = len(ready.rows), (len(self.scheduler.running) + 1) // 2
        if not ready.runs_ahead and half >= MIN_OVERLAP_TOKENS:
            num_ready = min(num_ready, half)
        return self._runner.best_rows(num_ready) if num_ready >= MIN_OVERLAP_TOKENS else None

    def _land(self, step: Step, pending: Pending) -> None:
        outputs = pending.result()
        self.scheduler.land(step)
        owners, num_plain = self._owners, 0
        for action, output in zip(step.actions, outputs, strict=True):
            owner = owners.get(action.sequence)
            if isinstance(owner, Generation) and owner.is_plain and isinstance(output, int):  # most rows of most steps
                num_plain += 1
                reason = owner.take_plain(output)
                if reason is not None:
                    self._end(owner, reason)
            else:
                self._take(owner, action, output)
        self._num_generated += num_plain

    def _refuse(self, request: Request, error: ErrorInfo) -> None:
        self._ended.append(lambda: Result(request_id=request.request_id, error=error))

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
            out_of_memory=self._passes.num_out_of_memory,
        )

    def close(self) -> None:
        """Nothing to release: memory goes with the object."""

    # --- beyond Backend, for a plan that comes in parts ---

    @property
    def num_waiting(self) -> int:
        """Submitted rows that have not been begun."""
        return self.scheduler.num_waiting

    def expect_more(self, more: bool) -> None:
        """Whether more requests will come that follow the last one in the plan."""
        self.scheduler.expects_more = more

    # --- beyond Backend, for a run that ends early ---

    def drain(self, seconds: float) -> list[Result]:
        """The results that are there and have not been handed on; nothing is computed for it, so it takes no time."""
        return self._hand_on(len(self._ended))

    # --- beyond Backend, for interactive programs ---

    def partial_texts(self) -> dict[int, str]:
        """For each running generation's request id, the text that it is sure to have."""
        owners = self._owners.values()
        return {o.request.request_id: o.text.certain_text() for o in owners if isinstance(o, Generation)}

    def shutdown(self) -> None:
        """``close`` under the name that programs for SGLang's runtime call at their end."""
        self.close()

    def flush_cache(self) -> None:
        """Forgets every prefix that no running request needs."""
        self.scheduler.tree.evict(self.scheduler.tree.num_cached)

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
            num_slots += sum(map(len, unconditional_runs(request.operation)))
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

    def _rows_of(self, request: Request, priority: Priority) -> list[Sequence]:
        """The rows that answer a request; none where it is refused."""
        error = self._misfit(request)
        if error is not None:
            self._refuse(request, error)
            return []
        if isinstance(request.operation, Generate):
            return self._add_generation(request, request.operation, priority)
        choice = Choice(request, priority)
        self._owners.update(dict.fromkeys(choice.sequences, choice))
        return choice.sequences

    def _add_generation(self, request: Request, operation: Generate, priority: Priority) -> list[Sequence]:
        try:
            guide = self._guide(operation.constraint)
        except ConstraintError as error:
            self._refuse(request, ErrorInfo(code=error.code, message=error.message))
            return []
        scores = InputScores.of(request, (*priority, 0))
        sequence = Sequence(request, request.prompt_ids, priority=priority if scores is None else (*priority, 1))
        generation = Generation(
            sequence,
            TextBuffer(self.tokenizer.token_bytes, sequence.output_ids, operation.stop, operation.stop_regex),
            guide=guide,
            forced=None if guide is None else self._forced_runs(guide),
            finite=None if guide is None or not operation.exact_choices else self._finite_choices(guide),
            jump_forward=self.jump_forward,
            eos_token_ids=self.tokenizer.eos_token_ids,
            end_token_ids=self._special_stops(operation.stop) | frozenset(operation.stop_token_ids),
        )
        self._owners[sequence] = generation
        sequence.may_run_ahead = generation.may_run_ahead
        if scores is None:
            if operation.input_logprobs_from == 0:  # of a single token, which nothing comes before
                generation.input_logprobs = ((None, int(request.prompt_ids[0])),)
            return [sequence]
        scores.generation = generation
        self._owners[scores.sequence] = scores
        return [scores.sequence, sequence]

    def _special_stops(self, stop: tuple[str, ...]) -> frozenset[int]:
        """Stop strings that are a special token's text end at that token, which has no text of its own."""
        specials = self.tokenizer.specials
        return frozenset(specials[s] for s in stop if s in specials)

    def _guide(self, constraint: Constraint | None) -> Guide | None:
        if constraint is None:
            return None
        return TokenMasks.of(self.tokenizer).guide(self.compiler.compile(constraint))

    def _forced_runs(self, guide: Guide) -> Forced:
        if guide not in self._forced:
            if len(self._forced) >= MAX_FORCED:
                self._forced.clear()
            self._forced[guide] = Forced(guide, self.tokenizer.encode)
        return self._forced[guide]

    def _finite_choices(self, guide: Guide) -> FiniteChoices:
        if guide not in self._finite:
            if len(self._finite) >= MAX_FORCED:
                self._finite.clear()
            self._finite[guide] = FiniteChoices(guide, self.tokenizer.encode)
        return self._finite[guide]

    # --- outcomes ---

    def _sampling(self, action: Action) -> Sampling | None:
        owner = self._owners[action.sequence]
        if not isinstance(owner, Generation) or action.targets:
            return None
        if owner.is_plain:
            return GREEDY
        return owner.sampling(action.sequence.num_in_flight - 1)

    def _take(self, owner: Generation | Choice | InputScores | None, action: Action, output: Output) -> None:
        if owner is None:
            assert action.sequence.may_run_ahead, "who has ended has no further step, unless it ran ahead"
            return
        if isinstance(owner, Generation):
            self._take_token(owner, action, output)
            return
        assert isinstance(output, list)
        if isinstance(owner, InputScores):
            self._take_input_score(owner, action.position, output)
            return
        owner.record(action.sequence, action.position, output)
        if action.position == action.sequence.action_positions[-1]:
            self.scheduler.finish_scored(action.sequence)
        if owner.is_scored:
            self._decide(owner)

    def _take_input_score(self, scores: InputScores, position: int, logprobs: list[float]) -> None:
        scores.record(position, logprobs)
        if position == scores.sequence.action_positions[-1]:
            scores.generation.input_logprobs = scores.logprobs()
            self.scheduler.finish_scored(scores.sequence)
            del self._owners[scores.sequence]

    def _take_token(self, generation: Generation, action: Action, output: Output) -> None:
        before = generation.num_sampled
        reason = generation.record(action.node, output) if isinstance(output, list) else generation.accept(output)
        self._num_generated += generation.num_sampled - before
        if reason is not None:
            self._end(generation, reason)

    def _end(self, generation: Generation, reason: FinishReason) -> None:
        self.num_jumped_tokens += generation.num_jumped
        self.scheduler.finish(generation.sequence)
        del self._owners[generation.sequence]
        self._ended.append(partial(generation.result, reason))

    def _decide(self, choice: Choice) -> None:
        result = choice.decide()
        assert result.choice is not None
        self.scheduler.finish_choice(choice.sequences, choice.row_of(result.choice))
        for sequence in choice.sequences:
            del self._owners[sequence]
        self._ended.append(lambda: result)
