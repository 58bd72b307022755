"""A runner without a model: it keeps tokens in slots, and checks that every row sees exactly its own prefix."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from sglbatch.engine.batch import FlatBatch, TreeWork, flatten
from sglbatch.engine.decision import Output
from sglbatch.engine.passes import Pending as InFlight
from sglbatch.engine.sampler import Sampling
from sglbatch.engine.sequence import Piece, Step

VOCAB = 50
EOS = 0


def next_token(prefix: tuple[int, ...]) -> int:
    """The stub model's greedy answer: a hash of everything before."""
    return zlib.crc32(repr(prefix).encode()) % VOCAB


def logprob(prefix: tuple[int, ...], token: int) -> float:
    """The stub model's score of a next token: a hash too, exact in single precision."""
    return -float(1 + zlib.crc32(repr((prefix, token)).encode()) % 1024) / 64


def generate(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What a generation must give, computed apart from any engine; ends before EOS."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        token = next_token(tuple(tokens))
        if token == EOS:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


class StubPending:
    def __init__(self, outputs: list[Output]) -> None:
        self._outputs = outputs

    def result(self) -> list[Output]:
        return self._outputs

    def tokens_at(self, places: list[int]) -> torch.Tensor:
        return torch.tensor([self._outputs[place] for place in places])


class StubRunner:
    """Counts the tokens that enter the model; ``num_slots`` as in the scheduler's config."""

    def __init__(self, num_slots: int) -> None:
        self.memory: list[tuple[int, int] | None] = [None] * (num_slots + 1)
        self.num_tokens = 0
        self.max_tokens_in_step = 0

    most_rows = 4
    """Few enough that tests see rows run ahead, and cohorts of more."""

    def best_rows(self, num_ready: int) -> int:
        """Leaves a quarter of the rows to the next step, so that tests see that happen."""
        return num_ready - num_ready // 4

    def launch(self, step: Step, samplings: Sequence[Sampling | None], before: InFlight | None) -> StubPending:
        return StubPending(self.run(step, before))

    def run(self, step: Step, before: InFlight | None) -> list[Output]:
        self.take_tokens(step, before)
        if step.pieces:
            self._forward(step)
        return [
            next_token(a.row.stored) if not a.targets else [logprob(a.row.stored, t) for t in a.targets]
            for a in step.actions
        ]

    @staticmethod
    def take_tokens(step: Step, before: InFlight | None) -> None:
        """Gives the pieces of rows that run ahead the tokens that they stand for."""
        for piece in step.pieces:
            if piece.source is not None:
                assert before is not None
                piece.token_ids = before.tokens_at([piece.source]).tolist()

    def _forward(self, step: Step) -> None:
        batch, offsets = flatten(step, with_positions=True, share_prefill=self.num_tokens % 2 == 0)
        self.num_tokens += len(batch.input_ids)
        self.max_tokens_in_step = max(self.max_tokens_in_step, len(batch.input_ids))
        scratch = len(self.memory) - 1
        written = batch.write_slots[batch.write_slots != scratch]
        assert len(set(written.tolist())) == len(written), "two tokens of a step in one slot"
        for token, position, slot in zip(batch.input_ids, batch.positions, batch.write_slots, strict=True):
            if slot != scratch:
                self.memory[slot] = (int(position), int(token))
        seen = self._contexts(batch)
        for row in (*(a.row for a in step.actions), *step.new_states):
            if row.piece is not None:
                row.stored, row.piece = seen[offsets[id(row.piece)] + row.offset], None
        for piece in step.pieces:
            sequence = piece.sequence
            full = (*sequence.ids.tolist(), *sequence.output_ids[sequence.num_folded :])
            if piece.branches is not None:
                self.check_branches(piece, full[: piece.start], seen[offsets[id(piece)] :])
                continue
            if piece.source is not None:
                full = (*full, *piece.token_ids)
            for i in range(len(piece.token_ids)):
                assert seen[offsets[id(piece)] + i] == full[: piece.start + i + 1], "a row sees another's tokens"

    def check_branches(self, piece: Piece, before: tuple[int, ...], seen: list[tuple[int, ...]]) -> None:
        """Each token sees what is before all of them, and what the one sees that it follows."""
        assert piece.branches is not None
        path: dict[int, tuple[int, ...]] = {-1: before}
        depths = piece.branches.depths[piece.branches.skip :].tolist()
        for token, depth, context in zip(piece.token_ids, depths, seen, strict=False):
            assert context[: piece.start] == before and context[-1] == token
            assert context[:-1] == path.get(depth - 1, context[:-1]), "what is not in this piece was in one before it"
            path = {d: c for d, c in path.items() if d < depth} | {depth: context}

    def _contexts(self, batch: FlatBatch) -> list[tuple[int, ...]]:
        """The tokens that each flat row attends to, which must be each position up to its own exactly once."""
        slots: list[list[int]] = [[] for _ in batch.input_ids]
        for work in batch.shared:
            for q in range(work.q_start, work.q_end):
                slots[q] += work.slots.tolist()
            assert [self.memory[s][0] for s in work.slots] == list(  # type: ignore[index]
                range(work.position, work.position + len(work.slots))
            )
        for causal in batch.causal:
            num_context = len(causal.slots) - (causal.q_end - causal.q_start)
            for i, q in enumerate(range(causal.q_start, causal.q_end)):
                slots[q] += causal.slots[: num_context + i + 1].tolist()
            assert [self.memory[s][0] for s in causal.slots] == causal.positions.tolist()  # type: ignore[index]
        for tree in batch.trees:
            for i, q in enumerate(range(tree.q_start, tree.q_end)):
                slots[q] += seen_in_tree(tree, i).tolist()
            assert [self.memory[s][0] for s in tree.slots] == tree.positions.tolist()  # type: ignore[index]
        singles, ends = batch.singles, np.cumsum(batch.singles.lens)
        for q, end, n in zip(singles.rows, ends, singles.lens, strict=True):
            slots[q] += singles.slots[end - n : end].tolist()
            assert (
                [self.memory[s][0] for s in singles.slots[end - n : end]]
                == singles.positions[  # type: ignore[index]
                    end - n : end
                ].tolist()
            )
        return [self._tokens(s, int(p)) for s, p in zip(slots, batch.positions, strict=True)]

    def _tokens(self, slots: list[int], position: int) -> tuple[int, ...]:
        cells = [self.memory[s] for s in slots]
        assert all(cell is not None for cell in cells), "a slot is read before it is written"
        by_position = dict(cell for cell in cells if cell is not None)
        assert Counter(p for p, _ in cells if p is not None).most_common(1)[0][1] == 1  # type: ignore[misc]
        assert sorted(by_position) == list(range(position + 1))
        return tuple(by_position[p] for p in range(position + 1))


def seen_in_tree(tree: TreeWork, i: int) -> np.ndarray:
    """The slots that a tree's i-th row sees."""
    branches = tree.slots[tree.trunk_len :]
    seen = branches[(tree.seen_from <= i) & (i < tree.seen_until)]
    return np.concatenate([tree.slots[: tree.trunk_len], seen])


class StubTokenizer:
    """Just enough of a tokenizer for the engine: token i is one character."""

    def __init__(self) -> None:
        self.token_bytes = [b"", *(bytes([64 + i]) for i in range(1, VOCAB))]
        self.eos_token_ids = frozenset({EOS})
        self.vocab_size = VOCAB
        self.specials: dict[str, int] = {}


def ids(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)
