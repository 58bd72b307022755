"""Constraints: a regex, a JSON Schema or a list of choices becomes a machine over bytes, and that token masks."""

from sglbatch.engine.fsm.automaton import Automaton, automaton_for_choices
from sglbatch.engine.fsm.bitmask import Bitmask
from sglbatch.engine.fsm.compiled import Compiler, compile_constraint
from sglbatch.engine.fsm.guide import Forced, Guide
from sglbatch.engine.fsm.masks import AutomatonGuide, TokenMasks
from sglbatch.engine.fsm.regex import compile_regex
from sglbatch.engine.fsm.schema import SchemaConstraint

__all__ = [
    "Automaton",
    "AutomatonGuide",
    "Bitmask",
    "Compiler",
    "Forced",
    "Guide",
    "SchemaConstraint",
    "TokenMasks",
    "automaton_for_choices",
    "compile_constraint",
    "compile_regex",
]
