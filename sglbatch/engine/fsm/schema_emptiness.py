"""Whether a node surely has no value, looked for a few levels down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sglbatch.engine.fsm.schema_node import ArraySpec, Conj, Node, ObjectSpec

MAX_DEPTH: Final = 4
"""Levels looked into."""


class Emptiness:
    """Answers for nodes, each conjunction below them once; ``node`` is what satisfies a conjunction."""

    def __init__(self, node: Callable[[Conj], Node]) -> None:
        self._node = node
        self._known: dict[tuple[Conj, int], bool] = {}

    def holds(self, node: Node, depth: int = MAX_DEPTH) -> bool:
        """Surely no value; False where that takes a deeper look."""
        if node.null or node.bools or node.numbers or node.strings:
            return False
        arrays = all(self._of_array(spec, depth) for spec in node.arrays)
        return arrays and all(self._of_object(spec, depth) for spec in node.objects)

    def _of_array(self, spec: ArraySpec, depth: int) -> bool:
        return any(self._of_conj(spec.item(i), depth - 1) for i in range(min(spec.least, 16)))

    def _of_object(self, spec: ObjectSpec, depth: int) -> bool:
        return any(self._of_conj(spec.props[name], depth - 1) for name in spec.required)

    def _of_conj(self, conj: Conj, depth: int) -> bool:
        if not conj or depth <= 0:
            return False
        key = (conj, depth)
        if key not in self._known:
            self._known[key] = self.holds(self._node(conj), depth)
        return self._known[key]
