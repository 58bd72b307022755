"""What ``fork`` gives: branches that are written to together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast, get_args

from sglbatch.errors import SglbatchError
from sglbatch.lang.operations import JoinMode

if TYPE_CHECKING:
    from sglbatch.lang.state import ProgramState


class ForkGroup:
    """The branches of one fork."""

    def __init__(self, states: list[ProgramState], join: Callable[[JoinMode], None]) -> None:
        self._states = states
        self._join = join

    def __getitem__(self, index: int) -> ProgramState:
        return self._states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        """Only for ``forks[i] += ...``, which ends in putting the same state back."""
        if self._states[index] is not state:
            raise SglbatchError("invalid-argument", "a branch of a fork cannot be replaced", hint="use forks[i] += ...")

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._states)

    def __iadd__(self, value: object) -> ForkGroup:
        """Add to every branch: the same expression, one of a list each, or what a function of the index gives."""
        count = len(self._states)
        if callable(value):
            values = [value(i) for i in range(count)]
        elif isinstance(value, (list, tuple)):
            if len(value) != count:
                raise SglbatchError(
                    "invalid-argument", f"a list of {len(value)} expressions was added to {count} branches"
                )
            values = list(value)
        else:
            values = [value] * count
        for state, item in zip(self._states, values, strict=True):
            state += item  # noqa: PLW2901  a state is changed in place
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """Bring the branches together on the state they came from, without waiting.

        gather_variable: each variable that a branch set becomes a list with one entry for each branch (None where it
        set none); a list from an earlier join of the same name is extended. concate_and_append: the branches' texts
        are appended one after the other.

        Raises:
            SglbatchError: ``invalid-argument``, ``joined-branch``.
        """
        if mode not in get_args(JoinMode):
            raise SglbatchError("invalid-argument", f"join takes gather_variable or concate_and_append, not {mode!r}")
        self._join(cast(JoinMode, mode))
