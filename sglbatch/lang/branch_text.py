"""The text of one branch: as a prompt's segments, as pieces for reading, as messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from sglbatch.lang.guard import strip_guard
from sglbatch.types import Ids, Prompt, Result, Segment, Text


@dataclass(frozen=True, slots=True)
class Message:
    """Which pieces are a message's content; ``end`` is None while it is open."""

    role: str
    start: int
    end: int | None = None


@dataclass(slots=True)
class BranchText:
    """Grows at its end; what a branch had when it was forked stays as it is.

    Attributes:
        pieces: one entry for each stretch of text, (text, generated). Constants are guarded, generated text is not.
        segments: the same as a prompt's segments, generated text as its token ids.
        answers: which pieces are answers, of a gen or a select.
        fork_segment, fork_piece: where the branch's own begin.
        answer_segment: where the last answer begins.
    """

    pieces: list[tuple[str, bool]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    fork_segment: int = 0
    fork_piece: int = 0
    answer_segment: int = 0

    @staticmethod
    def forked(parent: BranchText) -> BranchText:
        """A branch that begins where ``parent`` stands now."""
        return BranchText(
            pieces=list(parent.pieces),
            segments=list(parent.segments),
            messages=list(parent.messages),
            answers=list(parent.answers),
            fork_segment=len(parent.segments),
            fork_piece=len(parent.pieces),
        )

    @property
    def prompt(self) -> Prompt:
        return tuple(self.segments)

    def append(self, text: Text) -> None:
        """Constant text; neighbours of the branch's own are one segment."""
        if not text.text:
            return
        self.pieces.append((text.text, False))
        last = self.segments[-1] if self.segments else None
        own = len(self.segments) > self.fork_segment
        if own and isinstance(last, Text) and last.specials == text.specials:
            text = Text(last.text + text.text, text.specials)
            self.segments.pop()
        self.segments.append(text)

    def append_choice(self, text: Text) -> None:
        """A select's answer, which is text like the author's."""
        self.answers.append(len(self.pieces))
        self.append(text)

    def append_ids(self, ids: tuple[int, ...]) -> None:
        """What has no text."""
        self.segments.append(Ids(ids))

    def append_generated(self, result: Result) -> None:
        self.answer_segment = len(self.segments)
        self.answers.append(len(self.pieces))
        self.segments.append(Ids(result.output_ids))
        if result.tail:
            self.segments.append(Text(result.tail))
        self.pieces.append((result.text, True))

    def replace_generated(self, text: str) -> None:
        """Puts ``text`` in place of the last answer: as text, since its tokens need not be the answer's."""
        del self.segments[self.answer_segment :]
        self.segments.append(Text(text))
        self.pieces[-1] = (text, True)

    def append_branch(self, branch: BranchText) -> None:
        """What a branch has added since it was forked."""
        self.segments += branch.segments[branch.fork_segment :]
        self.answers += [len(self.pieces) + i - branch.fork_piece for i in branch.answers if i >= branch.fork_piece]
        self.pieces += branch.pieces[branch.fork_piece :]

    def mark(self, role: str | None) -> None:
        """A message's content begins (a role) or ends (None) here."""
        if role is not None:
            self.messages.append(Message(role, len(self.pieces)))
        else:
            last = self.messages[-1]
            self.messages[-1] = Message(last.role, last.start, len(self.pieces))

    def plain(self, start: int = 0, end: int | None = None) -> str:
        """Some pieces' text as it was meant, without guard characters."""
        return "".join(text if generated else strip_guard(text) for text, generated in self.pieces[start:end])

    def answer_spans(self) -> tuple[tuple[int, int], ...]:
        """Where ``plain()`` has each answer: its first character, and the one behind its last."""
        ends = list(accumulate(len(self.plain(i, i + 1)) for i in range(len(self.pieces))))
        return tuple((ends[i - 1] if i else 0, ends[i]) for i in self.answers)
