"""Propose several plans, judge each, go on with the best: a small tree of thought.

Columns read:   question (text)
Columns made:   plan (the chosen one), promising (its probability, 0 to 1), solution (text), answer (a whole number)
Sample:         samples/sums.jsonl; its column expected holds the right answer, --keep expected puts it beside answer

A plan's worth is not a text that the model writes but the probability it gives to "yes", which every select reports.
Only the best plan is solved, so what is computed beyond the plans does not grow with their number.
"""

from math import exp

import sglbatch as sgl

PLANS = 3


@sgl.function(temperature=0.8)
def tree_of_thought(s, question):
    s += "Solve the question in two steps: first a plan of one sentence, then the calculation.\n\n"
    s += f"Question: {question}\n"

    plans = s.fork(PLANS)
    plans += "Plan:" + sgl.gen("plan", max_tokens=24, stop="\n")
    plans += "\nDoes this plan lead to the answer (yes or no)? " + sgl.select("promising", choices=["yes", "no"])
    worth = [exp(plan.get_meta_info("promising")["choice_logprobs"]["yes"]) for plan in plans]

    best = max(range(PLANS), key=worth.__getitem__)
    plans[best] += "\nCalculation:" + sgl.gen("solution", max_tokens=32, stop="\n", temperature=0)
    plans[best] += "\nAnswer: " + sgl.gen("answer", max_tokens=8, dtype=int)

    s["plan"] = plans[best]["plan"]
    s["promising"] = worth[best]
    s["solution"] = plans[best]["solution"]
    s["answer"] = int(plans[best]["answer"])
