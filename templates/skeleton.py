"""Answer in points, and write all points out at the same time: skeleton of thought.

Columns read:   question (text)
Columns made:   point (the last short one), points (all of them), detail (one text for each), _return (the answer)
Sample:         samples/topics.jsonl

The points are short, so writing them one after another takes little; the long texts behind them run side by side.
"""

import sglbatch as sgl

POINTS = 3


@sgl.function(temperature=0)
def skeleton(s, question):
    s += sgl.system("You answer in short, separate points.")
    s += sgl.user(f"{question} Name {POINTS} points, a few words each.")
    s += sgl.assistant_begin()
    points = []
    for number in range(1, POINTS + 1):
        s += f"{number}." + sgl.gen("point", max_tokens=10, stop="\n") + "\n"
        points.append(s["point"])
    s += sgl.assistant_end()
    s["points"] = points

    branches = s.fork(POINTS)
    branches += [sgl.user(f"Explain point {number} in one sentence.") for number in range(1, POINTS + 1)]
    branches += sgl.assistant(sgl.gen("detail", max_tokens=28, stop="\n"))
    branches.join()
    return "\n".join(f"{point.strip()}: {detail.strip()}" for point, detail in zip(points, s["detail"], strict=True))
