"""Constraints: a regex or a list of choices becomes a byte automaton, and the automaton token masks."""

from sglbatch.engine.fsm.automaton import Automaton, automaton_for_choices
from sglbatch.engine.fsm.masks import Bitmask, Guide, TokenMasks
from sglbatch.engine.fsm.regex import compile_regex

__all__ = ["Automaton", "Bitmask", "Guide", "TokenMasks", "automaton_for_choices", "compile_regex"]
