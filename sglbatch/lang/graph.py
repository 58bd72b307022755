"""A traced program as a graph: what it adds to its text, in which order, and what depends on what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

NodeKind: TypeAlias = Literal["ConstantText", "Argument", "Gen", "Select", "Variable", "Fork", "GetForkItem", "Join"]
GRAPH_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Args:
    stream: which branch it is on; 0 is the program's own.
    value: the text of a ConstantText, the name of an Argument, Gen, Select or Variable (its source node is among
        ``after``), the number of branches of a Fork, the index of a GetForkItem, the mode of a Join.
    details: of a Gen or Select: what it asks for.
    after: nodes that come before it: on its stream first, then those of other streams that it needs.
    """

    id: int
    kind: NodeKind
    stream: int
    value: str | int
    after: tuple[int, ...] = ()
    details: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        value = {"id": self.id, "kind": self.kind, "stream": self.stream, "value": self.value}
        return value | {"after": list(self.after)} | ({"details": self.details} if self.details else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """Args:
    stopped: why the trace ends before the program does ("branches on the answer 'x' (chat.py:26)"), or None.
    """

    name: str
    nodes: tuple[Node, ...]
    stopped: str | None = None

    def to_json(self) -> dict[str, Any]:
        nodes = [node.to_json() for node in self.nodes]
        return {"version": GRAPH_VERSION, "program": self.name, "stopped": self.stopped, "nodes": nodes}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Graph:
        """The inverse of ``to_json``."""
        assert value["version"] == GRAPH_VERSION, value["version"]
        nodes = tuple(
            Node(**{**node, "after": tuple(node["after"]), "details": node.get("details")}) for node in value["nodes"]
        )
        return Graph(name=value["program"], nodes=nodes, stopped=value["stopped"])

    def __str__(self) -> str:
        """One line a node: ``%3 = %2 + Gen('answer')``."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for node in self.nodes:
            before = " + ".join(f"%{i}" for i in node.after)
            yield f"%{node.id} = {before + ' + ' if before else ''}{_label(node)}"
        if self.stopped:
            yield f"stopped: the program {self.stopped}"

    def to_dot(self) -> str:
        """The graph for Graphviz; branches are clusters."""
        lines = ["digraph program {", "  node [shape=box, fontname=monospace];"]
        for stream in sorted({node.stream for node in self.nodes}):
            own = [f"    n{node.id} [label={_quoted(_label(node))}];" for node in self.nodes if node.stream == stream]
            lines += [f"  subgraph cluster_{stream} {{", f"    label={_quoted(f'stream {stream}')};", *own, "  }"]
        for node in self.nodes:
            lines += [f"  n{before} -> n{node.id};" for before in node.after]
        return "\n".join([*lines, "}"])


def _label(node: Node) -> str:
    value = repr(_shortened(node.value)) if isinstance(node.value, str) else str(node.value)
    details = "".join(f", {name}={_shortened(str(item))}" for name, item in (node.details or {}).items())
    return f"{node.kind}({value}{details})"


def _shortened(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 20]} … {text[-17:]}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
