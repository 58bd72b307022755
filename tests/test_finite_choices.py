"""Exact choices inside constrained texts: where they begin, what they are, and that the engine scores them rightly."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglbatch.engine.decision import Pending, decide
from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.fsm import Forced, SchemaConstraint, TokenMasks, compile_regex
from sglbatch.engine.fsm.bitmask import allowed_ids, single_bit
from sglbatch.engine.fsm.finite import MAX_ALTERNATIVES, Alternative, FiniteChoices
from sglbatch.engine.fsm.guide import Guide, whole_characters
from sglbatch.engine.masses import own_masses
from sglbatch.engine.passes import Pending as InFlight
from sglbatch.engine.sampler import Sampling, sample
from sglbatch.engine.scheduler import SchedulerConfig
from sglbatch.engine.sequence import Step
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Constraint, Generate, Request, Result
from tests.engine_stub import StubRunner

PERSON = {
    "type": "object",
    "properties": {
        "job": {"enum": ["engineer", "teacher", "engine driver", "tea"]},
        "active": {"type": "boolean"},
        "name": {"type": "string", "maxLength": 6},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "reddish"]}, "minItems": 1},
        "grade": {"enum": [1, 12, None]},
    },
    "required": ["job", "active", "name", "colours", "grade"],
    "additionalProperties": False,
}
WIDE = {
    "type": "object",
    "properties": {
        "word": {"enum": [f"{first}{second}ing" for first in ("walk", "drink", "jump", "th") for second in "abcdef"]},
        "why": {"type": "string", "minLength": 9, "maxLength": 12},
    },
    "required": ["word", "why"],
    "additionalProperties": False,
}
OPTIONAL = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"const": "x"}},
    "additionalProperties": False,
}
OPEN = {"type": "object", "properties": {"answer": {"enum": ["A", "B", "AB"]}}, "required": ["answer"]}
SCHEMAS: list[Any] = [PERSON, WIDE, OPTIONAL, OPEN, {"enum": ["no", "nothing", "no one"]}, {"type": "boolean"}]
REGEXES = [
    "(yes|no|maybe)",
    "The answer is (yes|no|perhaps), because [a-z ]{3,9}[.]",
    "yes|no|yes sir",
    "(left|right)( turn)?",
    "(é|è|e), [ab]{2}",
]
CONSTRAINTS = [
    *(Constraint(kind="json_schema", source=json.dumps(schema)) for schema in SCHEMAS),
    *(Constraint(kind="regex", source=source) for source in REGEXES),
]


@pytest.fixture(scope="module")
def masks(smollm2_tokenizer: Tokenizer) -> TokenMasks:
    tokenizer = smollm2_tokenizer
    return TokenMasks(tokenizer.token_bytes, tokenizer.eos_token_ids, tokenizer.vocab_size)


def guide_of(masks: TokenMasks, constraint: Constraint) -> Guide:
    if constraint.kind == "regex":
        return masks.guide(compile_regex(constraint.source))
    return masks.guide(SchemaConstraint(json.loads(constraint.source)))


def choice_texts(masks: TokenMasks, tokenizer: Tokenizer, regex: str) -> list[tuple[str, bool, bool]] | None:
    """(text, open, stops) of each alternative where the regex's first forced run ends."""
    guide = guide_of(masks, Constraint(kind="regex", source=regex))
    state = guide.start
    for token in Forced(guide, tokenizer.encode).tokens(state):
        state = guide.advance(state, token)
    choice = FiniteChoices(guide, tokenizer.encode).at(state)
    if choice is None:
        return None
    spelled = [b"".join(map(guide.bytes_of, (*choice.common, *a.tokens))).decode() for a in choice.alternatives]
    return [(text, a.is_open, a.stops) for text, a in zip(spelled, choice.alternatives, strict=True)]


@pytest.mark.parametrize(
    ("regex", "expected"),
    [
        ("(yes|no|maybe)", [("maybe", False, False), ("no", False, False), ("yes", False, False)]),
        ("yes|no|yes sir", [("no", False, False), ("yes", False, True), ("yes sir", False, False)]),
        ("It is (hot|cold) today", [(" cold", False, False), (" hot", False, False)]),
        # the "!" may be a token of its own or the beginning of a longer one, so it is left to the next token
        ("(aa!|b[?])[!?] x", [("aa", True, False), ("b", True, False)]),
        ('"(red|blue)"[,}] x', [("blue", False, False), ("red", False, False)]),
        ("(yes|no)[a-z]*", None),  # tokens go on behind the choice
        ("[a-z]+", None),
        ("(a|b)*c", None),
        ("[0-9]{2}:", None),
        ("day (" + "|".join(str(day) for day in range(1, 32)) + ")!", None),
        ("(" + "|".join(f"w{chr(97 + i)}{chr(97 + j)}" for i in range(9) for j in range(9)) + ")", None),
    ],
)
def test_where_a_choice_begins(
    masks: TokenMasks, smollm2_tokenizer: Tokenizer, regex: str, expected: list[tuple[str, bool, bool]] | None
) -> None:
    assert choice_texts(masks, smollm2_tokenizer, regex) == expected


WORD = st.text(alphabet='abné "', min_size=1, max_size=6)


class Walk:
    """Everything a constraint can generate, choice by choice, mask by mask."""

    def __init__(self, guide: Guide, tokenizer: Tokenizer) -> None:
        self.guide = guide
        self.encode = tokenizer.encode
        self.forced = Forced(guide, tokenizer.encode)
        self.finite = FiniteChoices(guide, tokenizer.encode)
        self.num_choices = 0

    def texts(self, state: int, ending: Any = None) -> set[bytes]:
        """What can follow a state. The alternatives of a choice must not have any text in common, and their tokens
        must be those of what is sure to follow."""
        guide = self.guide
        if guide.is_final(state):
            return {b""}
        run = self.forced.tokens(state)
        if run and ending is None:
            return self.after(state, run)
        choice = None if ending is not None else self.finite.at(state)
        if choice is None:
            ids = allowed_ids(guide.mask(state) if ending is None else ending).tolist()
            found = {b""} if guide.may_end(state) and ending is None else set()
            return found.union(*(self.after(state, (i,)) for i in ids if guide.bytes_of(i)))
        self.num_choices += 1
        everything: set[bytes] = set()
        for alternative in choice.alternatives:
            tokens = (*choice.common, *alternative.tokens)
            then = alternative.then if alternative.is_open else None
            own = {b"".join(map(guide.bytes_of, tokens))} if alternative.stops else self.after(state, tokens, then)
            assert own and not own & everything
            sure = whole_characters(commonprefix(sorted(own))).decode()  # noqa: RUF071
            assert tuple(self.encode(sure)[: len(tokens)]) == tokens
            everything |= own
        return everything

    def after(self, state: int, tokens: Sequence[int], ending: Any = None) -> set[bytes]:
        data = b"".join(map(self.guide.bytes_of, tokens))
        for token in tokens:
            state = self.guide.advance(state, token)
        return {data + text for text in self.texts(state, ending)}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(WORD, min_size=2, max_size=6, unique=True),
    before=st.text("ab ", max_size=3),
    after=st.sampled_from(["", "; and", "[ab]?", '",[12]']),
)
def test_choices_leave_exactly_what_the_constraint_allows(
    masks: TokenMasks, smollm2_tokenizer: Tokenizer, words: list[str], before: str, after: str
) -> None:
    guide = guide_of(masks, Constraint(kind="regex", source=f"{before}({'|'.join(words)}){after}"))
    ends = {"[ab]?": ["", "a", "b"], '",[12]': ['",1', '",2']}.get(after, [after])
    walk = Walk(guide, smollm2_tokenizer)
    assert walk.texts(guide.start) == {(before + word + end).encode() for word in words for end in ends}


@pytest.mark.parametrize(
    "schema", [OPTIONAL, {"enum": ["no", "nothing", "no one", None, 12, 1, 2]}, {"type": "boolean"}]
)
def test_choices_of_a_schema_are_its_values(masks: TokenMasks, smollm2_tokenizer: Tokenizer, schema: Any) -> None:
    guide = masks.guide(SchemaConstraint(schema))
    walk = Walk(guide, smollm2_tokenizer)
    found = {text.decode() for text in walk.texts(guide.start)}
    candidates: list[Any] = [*schema.get("enum", []), True, False, {}, {"a": True}, {"a": False}, {"b": "x"}]
    candidates += [{"a": True, "b": "x"}, {"a": False, "b": "x"}]
    assert found == {json.dumps(value) for value in candidates if SchemaConstraint(schema).accepts(json.dumps(value))}
    assert walk.num_choices == 1


# --- the engine ------------------------------------------------------------------------------------


def logits_after(prefix: tuple[int, ...], vocab_size: int) -> torch.Tensor:
    """The stub model: normal numbers from a hash of everything before, fp32 [V]."""
    random = np.random.Generator(np.random.PCG64(zlib.crc32(repr(prefix).encode())))
    return torch.from_numpy(random.standard_normal(vocab_size, dtype=np.float32) * 3)


class LogitsRunner(StubRunner):
    """A model of hashes that draws and scores as the real one does."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        super().__init__(num_slots)
        self._vocab_size = vocab_size
        self.num_scored = 0

    def launch(  # type: ignore[override]
        self, step: Step, samplings: Sequence[Sampling | None], before: InFlight | None
    ) -> Pending:
        self.take_tokens(step, before)
        if step.pieces:
            self._forward(step)
        pending = Pending(len(step.actions))
        if step.actions:
            logits_RV = torch.stack([logits_after(a.row.stored, self._vocab_size) for a in step.actions])
            decide(pending, 0, logits_RV, [a.targets for a in step.actions], samplings)
        self.num_scored += sum(1 for s in samplings if s is None)
        pending.seal(torch.device("cpu"))
        return pending


def run(
    tokenizer: Tokenizer, requests: list[Request], *, jump_forward: bool = True, overlap: bool = False, **config: Any
) -> tuple[dict[int, Result], LocalEngine]:
    runner = LogitsRunner(config["num_slots"], tokenizer.vocab_size)
    engine = LocalEngine(
        runner,
        tokenizer,
        identity="hash",
        context_len=10_000,
        scheduler_config=SchedulerConfig(**config),
        overlap=overlap,
    )
    engine.jump_forward = jump_forward
    engine.submit(requests)
    results: dict[int, Result] = {}
    while engine.has_unfinished:
        for result in engine.step():
            results[result.request_id] = result
            engine.finish_program(result.request_id)
        engine.scheduler.check_integrity()
        if config.get("reserve") == "full":
            for row in engine.scheduler.running:
                assert row.num_in_flight or row.reserved + row.num_unused >= row.tail_left, (
                    "its room is promised to others"
                )
    assert engine.scheduler.pool.num_free == engine.scheduler.config.num_slots, "something stayed behind"
    return results, engine


def expected(masks: TokenMasks, tokenizer: Tokenizer, asked: Request) -> list[int]:
    """What a generation must give, token by token over whole prefixes, without any engine."""
    operation = asked.operation
    assert isinstance(operation, Generate) and operation.constraint is not None
    guide = guide_of(masks, operation.constraint)
    forced, finite = Forced(guide, tokenizer.encode), FiniteChoices(guide, tokenizer.encode)
    out: list[int] = []
    state, ending = guide.start, None

    def logits() -> torch.Tensor:
        return logits_after((*asked.prompt_ids.tolist(), *out), tokenizer.vocab_size)

    def drawn(logits_V: torch.Tensor, mask: Any = None) -> int:
        sampling = Sampling(
            temperature=operation.temperature, top_p=operation.top_p, seed=asked.seed, position=len(out), mask_W=mask
        )
        return sample(logits_V[None].clone(), [sampling])[0]

    while len(out) < operation.max_tokens and not guide.is_final(state):
        run = list(forced.tokens(state))
        stops = False
        choice = None if run or ending is not None else finite.at(state)
        if choice is not None and operation.exact_choices and choice.num_tokens <= operation.max_tokens - len(out):
            out += choice.common
            masses = [log_mass(asked, out, a, tokenizer.vocab_size) for a in choice.alternatives]
            if choice.may_stop:
                own = own_masses([a.tokens for a in choice.alternatives], np.exp(masses).tolist())
                masses = np.log(own).tolist()
            chosen = choice.alternatives[drawn(torch.tensor(masses, dtype=torch.float32))]
            for token in choice.common:
                state = guide.advance(state, token)
            run, stops, ending = list(chosen.tokens), chosen.stops, chosen.then if chosen.is_open else None
        elif not run:
            token = drawn(logits(), guide.mask(state) if ending is None else ending)
            if token in tokenizer.eos_token_ids:
                return out
            run, ending = [token], None
        for token in run[: operation.max_tokens - len(out)]:
            out.append(token)
            state = guide.advance(state, token)
        if stops:
            break
    return out


def log_mass(asked: Request, out: list[int], alternative: Alternative, vocab_size: int) -> float:
    total, before = 0.0, (*asked.prompt_ids.tolist(), *out)
    for token in alternative.tokens:
        total += float(torch.log_softmax(logits_after(before, vocab_size), dim=-1)[token])
        before = (*before, token)
    if alternative.then is not None:
        ids = allowed_ids(alternative.then)
        total += float(torch.log_softmax(logits_after(before, vocab_size), dim=-1)[ids].logsumexp(0))
    return total


def request(number: int, prompt: list[int], constraint: Constraint, **options: Any) -> Request:
    return Request(
        request_id=number,
        program_id=number,
        prompt_ids=np.array(prompt, dtype=np.int32),
        operation=Generate(constraint=constraint, **{"exact_choices": True, "temperature": 0.0, **options}),
        seed=number * 7 + 1,
    )


WORK = st.lists(
    st.tuples(
        st.lists(st.integers(1, 9), min_size=1, max_size=6),
        st.sampled_from(CONSTRAINTS),
        st.sampled_from([3, 12, 60]),
        st.sampled_from([0.0, 1.0, 2.5]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    work=WORK,
    extra=st.sampled_from([0, 1, 6, 40, 2000]),
    reserve=st.sampled_from(["soft", "full"]),
    overlap=st.booleans(),
    jump_forward=st.booleans(),
    max_batch_tokens=st.sampled_from([9, 40, 4096]),
)
def test_the_engine_decides_as_whole_prefixes_do(  # noqa: PLR0917
    masks: TokenMasks,
    smollm2_tokenizer: Tokenizer,
    work: list[tuple[list[int], Constraint, int, float]],
    extra: int,
    reserve: str,
    overlap: bool,
    jump_forward: bool,
    max_batch_tokens: int,
) -> None:
    """Whatever the memory, the batch and the order: the same tokens, no slot lost, and nothing computed twice where
    everything is reserved."""
    requests = [
        request(i, prompt, constraint, max_tokens=max_tokens, temperature=temperature)
        for i, (prompt, constraint, max_tokens, temperature) in enumerate(work)
    ]
    num_slots = extra + max(len(prompt) + max_tokens - 1 for prompt, _, max_tokens, _ in work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglbatch.engine.engine.MIN_OVERLAP_TOKENS", 1)
        patch.setattr("sglbatch.engine.expected_use.MIN_FINISHED", 0)
        results, engine = run(
            smollm2_tokenizer,
            requests,
            num_slots=num_slots,
            max_batch_tokens=max_batch_tokens,
            max_rows=4,
            reserve=reserve,
            overlap=overlap,
            jump_forward=jump_forward,
        )
    for asked in requests:
        assert list(results[asked.request_id].output_ids) == expected(masks, smollm2_tokenizer, asked)
    if reserve == "full":
        assert engine.stats().recomputed_tokens == 0


@pytest.mark.parametrize("num_slots", [70, 75, 150])
def test_full_reservation_holds_with_choices(smollm2_tokenizer: Tokenizer, num_slots: int) -> None:
    """Scoring takes slots that nobody is promised, and gives them back: in a tight pool nobody has to pause."""
    requests = [request(i, [i + 3], constraint, max_tokens=60) for i, constraint in enumerate(CONSTRAINTS)]
    limits = {"max_batch_tokens": 4096, "max_rows": 64}
    tight, engine = run(smollm2_tokenizer, requests, num_slots=num_slots, reserve="full", **limits)
    assert engine.stats().recomputed_tokens == 0
    ample, _ = run(smollm2_tokenizer, requests, num_slots=5000, **limits)
    assert {i: r.output_ids for i, r in tight.items()} == {i: r.output_ids for i, r in ample.items()}


@pytest.mark.parametrize("end", ["[a-z]{3,9}", "(walking|walks|walk about|talking|talks|talk about)[.]"])
def test_forced_runs_keep_to_the_budget(masks: TokenMasks, smollm2_tokenizer: Tokenizer, end: str) -> None:
    """Alternatives that are scored behind them too."""
    forced = Constraint(
        kind="regex", source=f"(yes|no): and this is what always has to follow, whatever came before it: {end}"
    )
    requests = [request(i, [i + 1], forced, max_tokens=60) for i in range(9)]
    results, engine = run(smollm2_tokenizer, requests, num_slots=2000, max_batch_tokens=40, max_rows=64)
    for asked in requests:
        assert list(results[asked.request_id].output_ids) == expected(masks, smollm2_tokenizer, asked)
    assert engine.num_jumped_tokens > 9 * 10
    runner = engine._runner
    assert isinstance(runner, LogitsRunner) and 20 < runner.max_tokens_in_step <= 40


FREE = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 20), num_tokens=st.integers(0, 12), free_len=st.sampled_from([0, 5]))
def test_a_followed_run_is_its_tokens_one_by_one(
    masks: TokenMasks, smollm2_tokenizer: Tokenizer, seed: int, num_tokens: int, free_len: int
) -> None:
    guide = guide_of(masks, Constraint(kind="json_schema", source=json.dumps(FREE)))
    rng = np.random.default_rng(seed)
    state, tokens = guide.start, []
    for _ in range(num_tokens):
        legal = allowed_ids(guide.mask(state)).tolist()
        short = [t for t in legal if 0 < len(guide.bytes_of(t)) < 5 and t not in smollm2_tokenizer.eos_token_ids]
        if not short:
            break
        tokens.append(short[int(rng.integers(len(short)))])
        state = guide.advance(state, tokens[-1])
    split = int(rng.integers(len(tokens) + 1))
    state, expected_len = guide.start, free_len
    for token in tokens[:split]:
        state = guide.advance(state, token)
    followed = Forced(guide, smollm2_tokenizer.encode).follow(state, tuple(tokens[split:]))
    for token in tokens[split:]:
        state, data = guide.advance(state, token), guide.bytes_of(token)
        expected_len = (0 if b'"' in data else expected_len) + len(data) if guide.free_text(state) else 0
    assert followed.state == state
    assert (free_len if followed.is_free else 0) + followed.free_len == expected_len


def test_off_is_token_by_token(masks: TokenMasks, smollm2_tokenizer: Tokenizer) -> None:
    requests = [
        request(i, [i + 3], constraint, max_tokens=60, exact_choices=False) for i, constraint in enumerate(CONSTRAINTS)
    ]
    results, _ = run(smollm2_tokenizer, requests, num_slots=2000, max_batch_tokens=4096, max_rows=64)
    for asked in requests:
        assert list(results[asked.request_id].output_ids) == expected(masks, smollm2_tokenizer, asked)


def test_many_draws_have_the_exact_distribution(smollm2_tokenizer: Tokenizer) -> None:
    """3,000 answers at temperature 1: shares within four standard deviations of the alternatives' probabilities."""
    constraint = Constraint(kind="json_schema", source=json.dumps({"enum": ["no", "nothing", "no one", "maybe"]}))
    prompt = np.array([5, 6], dtype=np.int32)
    operation = Generate(max_tokens=20, temperature=1.0, constraint=constraint, exact_choices=True)
    requests = [
        Request(request_id=i, program_id=i, prompt_ids=prompt, operation=operation, seed=zlib.crc32(b"%d" % i))
        for i in range(3000)
    ]
    results, _ = run(smollm2_tokenizer, requests, num_slots=30_000, max_batch_tokens=8192, max_rows=512)
    shares: dict[str, float] = {}
    for result in results.values():
        shares[result.text] = shares.get(result.text, 0) + 1 / len(requests)
    logs = []
    for text in ('"no"', '"nothing"', '"no one"', '"maybe"'):
        before, total = (5, 6), 0.0
        for token in smollm2_tokenizer.encode(text):
            total += float(torch.log_softmax(logits_after(before, smollm2_tokenizer.vocab_size), dim=-1)[token])
            before = (*before, token)
        logs.append(total)
    exact = torch.softmax(torch.tensor(logs), dim=0).tolist()
    for text, p in zip(('"no"', '"nothing"', '"no one"', '"maybe"'), exact, strict=True):
        assert abs(shares.get(text, 0.0) - p) < 4 * (p * (1 - p) / len(requests)) ** 0.5 + 1e-3, (text, p, shares)


def test_log_probabilities_do_not_change_what_is_chosen(smollm2_tokenizer: Tokenizer) -> None:
    plain = [request(i, [i + 3], c, max_tokens=60) for i, c in enumerate(CONSTRAINTS)]
    asked = [request(i, [i + 3], c, max_tokens=60, num_top_logprobs=2) for i, c in enumerate(CONSTRAINTS)]
    limits = {"num_slots": 2000, "max_batch_tokens": 4096, "max_rows": 64}
    without, _ = run(smollm2_tokenizer, plain, **limits)
    with_them, _ = run(smollm2_tokenizer, asked, **limits)
    for i, result in with_them.items():
        assert result.output_ids == without[i].output_ids
        drawn = [token for _, token in result.output_logprobs]
        assert drawn[: len(result.output_ids)] == list(result.output_ids)


def test_a_choice_that_does_not_fit_is_left_to_the_mask(smollm2_tokenizer: Tokenizer) -> None:
    constraint = Constraint(kind="json_schema", source=json.dumps(PERSON))
    for max_tokens in range(1, 30):
        results, _ = run(
            smollm2_tokenizer,
            [request(0, [4], constraint, max_tokens=max_tokens)],
            num_slots=max_tokens + 1,
            max_batch_tokens=64,
            max_rows=4,
            reserve="full",
        )
        assert len(results[0].output_ids) <= max_tokens


def test_with_complete_a_choice_still_ends_in_time(smollm2_tokenizer: Tokenizer, masks: TokenMasks) -> None:
    guide = guide_of(masks, Constraint(kind="json_schema", source=json.dumps(PERSON)))
    needed = len(Forced(guide, smollm2_tokenizer.encode).completion(guide.start))
    for max_tokens in (needed, needed + 1, needed + 2, needed + 5, needed + 9):
        constraint = Constraint(kind="json_schema", source=json.dumps(PERSON))
        asked = request(0, [4], constraint, max_tokens=max_tokens, complete=True)
        results, _ = run(smollm2_tokenizer, [asked], num_slots=200, max_batch_tokens=64, max_rows=4)
        assert results[0].error is None
        assert set(json.loads(results[0].text)) == set(PERSON["properties"])  # type: ignore[arg-type]


def test_limits_hold(masks: TokenMasks, smollm2_tokenizer: Tokenizer) -> None:
    words = [f"w{chr(97 + i // 9)}{chr(97 + i % 9)}" for i in range(MAX_ALTERNATIVES)]
    found = choice_texts(masks, smollm2_tokenizer, "(" + "|".join(words) + ")")
    assert found is not None and len(found) == MAX_ALTERNATIVES
    assert choice_texts(masks, smollm2_tokenizer, "(" + "|".join([*words, "more"]) + ")") is None


@pytest.mark.slow
def test_the_fused_engine_scores_as_the_plain_one() -> None:
    """Alternatives beside their rows through Triton attention and fused layers, with two cohorts."""
    from tests.test_attention_triton import tiny_engine

    rng = np.random.default_rng(1)
    shared = rng.integers(1, 40, size=36).tolist()
    constraint = Constraint(kind="regex", source="(X|YY)(ABC|ABD|DC|G)K(EF|G)[a-d]{2}(HIJ|HIK|L)M")
    requests = [
        request(
            i, [*shared, *rng.integers(1, 40, size=3).tolist()], constraint, max_tokens=30, temperature=float(i % 2)
        )
        for i in range(6)
    ]
    answers = []
    for kernels in ("torch", "triton"):
        engine = tiny_engine(kernels)
        engine.tokenizer.encode = lambda text: [ord(c) - 64 for c in text]  # type: ignore[method-assign]
        engine.submit(requests)
        found: dict[int, Result] = {}
        while engine.has_unfinished:
            found |= {r.request_id: r for r in engine.step()}
            engine.scheduler.check_integrity()
        assert all(r.error is None and re.fullmatch(constraint.source, r.text) for r in found.values())
        answers.append({i: r.output_ids for i, r in found.items()})
    assert answers[0] == answers[1] and len(set(answers[0].values())) > 1


def test_scores_of_masks_are_sums(masks: TokenMasks) -> None:
    from sglbatch.engine.sampler import score

    logits_RV = torch.randn(3, masks.vocab_size, generator=torch.Generator().manual_seed(0))
    mask = guide_of(masks, Constraint(kind="regex", source="[a-z]+ x")).mask(0)
    one = single_bit(77, len(mask))
    scores = score(logits_RV.clone(), [(5, mask, 9), (), (one, 77, mask)])
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    sums_R = logprobs_RV[:, allowed_ids(mask)].logsumexp(-1)
    wanted = [
        [logprobs_RV[0, 5], sums_R[0], logprobs_RV[0, 9]],
        [],
        [logprobs_RV[2, 77], logprobs_RV[2, 77], sums_R[2]],
    ]
    for row, expected_row in zip(scores, wanted, strict=True):
        assert row == pytest.approx([float(value) for value in expected_row], abs=1e-5)
