"""Judge an essay from several sides at once and merge the scores: branch, solve, merge.

Columns read:   topic (text), essay (text)
Columns made:   clarity, evidence, structure (1 to 5 each), verdict ("accept" or "revise"), _return (the mean score)
Sample:         samples/essays.jsonl

The essay is read once: all branches, and the verdict after them, start from the same tokens. The scores become numbers
only after the last question, so the whole program can be planned before it runs (`sglbatch plan` says "traced").
"""

import sglbatch as sgl

SCORES = ["1", "2", "3", "4", "5"]

DIMENSIONS = {
    "clarity": "Is it easy to understand what each sentence means?",
    "evidence": "Are claims backed by facts or examples?",
    "structure": "Does each part lead to the next and to a conclusion?",
}


@sgl.function
def judge(s, topic, essay):
    s += "You grade short essays by students. Scores go from 1 (poor) to 5 (excellent).\n\n"
    s += f"Topic: {topic}\nEssay: {essay}\n\n"

    branches = s.fork(len(DIMENSIONS))
    branches += [
        f"{name.capitalize()}: {meaning}\nScore: " + sgl.select("score", choices=SCORES)
        for name, meaning in DIMENSIONS.items()
    ]
    branches.join()

    for name, branch in zip(DIMENSIONS, branches, strict=True):
        s += f"{name.capitalize()}: {branch['score']} of 5\n"
    s += "Verdict (accept or revise): " + sgl.select("verdict", choices=["accept", "revise"])

    scores = {name: int(branch["score"]) for name, branch in zip(DIMENSIONS, branches, strict=True)}
    for name, score in scores.items():
        s[name] = score
    return sum(scores.values()) / len(scores)
