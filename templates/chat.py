"""Talk to a chat model, and go on depending on what it said: a yes-or-no question, and "Why not?" after a no.

Columns read:   prompt (a question that yes or no answers)
Columns made:   verdict ("yes" or "no"), reason (text; null where the verdict was yes)
Sample:         samples/prompts.jsonl

The roles are put into the model's own chat template. Reading s["verdict"] waits for the answer of this row only; all
other rows go on meanwhile.
"""

import sglbatch as sgl

EXAMPLES = [("Do fish have legs?", "no"), ("Is the sea salty?", "yes")]


@sgl.function(temperature=0)
def chat(s, prompt):
    s += sgl.system("You answer questions briefly and truthfully.")
    for question, answer in EXAMPLES:
        s += sgl.user(f"{question} Answer with yes or no.")
        s += sgl.assistant(answer)
    s += sgl.user(f"{prompt} Answer with yes or no.")
    s += sgl.assistant(sgl.select("verdict", choices=["yes", "no"]))
    if s["verdict"] == "no":
        s += sgl.user("Why not? Explain in one short sentence.")
        s += sgl.assistant(sgl.gen("reason", max_tokens=32, stop=["\n"]))
