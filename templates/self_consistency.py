"""Think several times and let the answers vote: chain of thought with self-consistency, for questions with a number.

Columns read:   question (text)
Columns made:   reasoning and answer (one of each path), vote (the answer most paths agree on), agreement (0 to 1)
Sample:         samples/sums.jsonl; its column expected holds the right answer, --keep expected puts it beside vote

The examples and the question are read once for all paths. Each path draws its own random numbers, so a run with the
same --seed gives the same votes. More PATHS make a better vote and cost their generated tokens only.
"""

from collections import Counter

import sglbatch as sgl

PATHS = 3

EXAMPLES = """\
Question: Anna has 4 apples and buys 3 more. How many apples does she have?
Reasoning: She starts with 4 apples. 4 + 3 = 7.
Answer: 7

Question: A box holds 6 eggs. How many eggs are in 5 boxes?
Reasoning: Each box holds 6 eggs. 5 times 6 is 30.
Answer: 30

Question: Tom had 12 marbles and lost 5. How many are left?
Reasoning: He had 12 marbles. 12 - 5 = 7.
Answer: 7

"""


@sgl.function(temperature=0.7)
def self_consistency(s, question):
    s += EXAMPLES
    s += f"Question: {question}\nReasoning:"

    paths = s.fork(PATHS)
    paths += sgl.gen("reasoning", max_tokens=40, stop="\n") + "\nAnswer: " + sgl.gen("answer", max_tokens=8, dtype=int)
    paths.join()

    answer, votes = Counter(s["answer"]).most_common(1)[0]
    s["vote"] = int(answer)
    s["agreement"] = votes / PATHS
