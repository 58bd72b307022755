"""The program language: expressions, program state, the interpreter that runs programs, templates."""

from sglbatch.lang.calls import CallMemo, PendingCall
from sglbatch.lang.driver import Driver
from sglbatch.lang.outcome import Outcome
from sglbatch.lang.program import Program
from sglbatch.lang.template import Binding, Template
from sglbatch.lang.template_file import load_template

__all__ = ["Binding", "CallMemo", "Driver", "Outcome", "PendingCall", "Program", "Template", "load_template"]
