"""Think, use a tool, look at what it gave, and think again: ReAct with a calculator.

Columns read:   question (text)
Columns made:   thought, action and expression (of the last step), answer (text), steps (how often the tool was used)
Sample:         samples/sums.jsonl; its column expected holds the right answer, --keep expected puts it beside answer

A tool is a Python function. sgl.call runs it outside of the program: other rows go on meanwhile, its result is kept in
the journal, and a resumed job does not call it again. MAX_STEPS bounds the loop; --max-calls-per-row bounds any other.
"""

from fractions import Fraction

import sglbatch as sgl

MAX_STEPS = 2

EXAMPLES = """\
Question: Anna has 4 apples, buys 3 more and gives 2 away. How many apples does she have?
Thought: I have to add 3 to 4 and take 2 away.
Action: calculate 4 + 3 - 2
Observation: 5
Thought: I know the answer.
Action: finish
Answer: 5

Question: A box holds 6 eggs. How many eggs are in 5 boxes?
Thought: I have to multiply 6 by 5.
Action: calculate 6 * 5
Observation: 30
Thought: I know the answer.
Action: finish
Answer: 30

"""


def calculate(expression):
    """The value of numbers and operators with blanks between them; products come before sums."""
    first, *rest = expression.split()
    terms = [Fraction(first)]
    for operator, number in zip(rest[::2], map(Fraction, rest[1::2]), strict=True):
        if operator in "*/":
            terms[-1] = terms[-1] * number if operator == "*" else terms[-1] / number
        else:
            terms.append(number if operator == "+" else -number)
    return str(sum(terms))


@sgl.function(temperature=0)
def react(s, question):
    s += EXAMPLES
    s += f"Question: {question}\n"
    s["steps"] = 0
    for step in range(1, MAX_STEPS + 1):
        s += "Thought:" + sgl.gen("thought", max_tokens=20, stop="\n")
        s += "\nAction: " + sgl.select("action", choices=["calculate", "finish"])
        if s["action"] == "finish":
            break
        number = "[1-9][0-9]{0,3}"
        s += " " + sgl.gen("expression", max_tokens=16, regex=rf"{number} [-+*/] {number}( [-+*/] {number})?")
        s += f"\nObservation: {sgl.call(calculate, s['expression'])}\n"
        s["steps"] = step
    s += "\nAnswer: " + sgl.gen("answer", max_tokens=8, stop="\n")
