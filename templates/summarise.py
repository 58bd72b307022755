"""Summarise a text, grade the summary, and write a second one where the grade is poor: control flow on a result.

Columns read:   text
Columns made:   summary (the one to use), grade ("good" or "poor", of the first one), retried (true or false)
Sample:         samples/articles.jsonl

A row whose first summary is good makes two calls, the others make three; no row waits for another.
"""

import sglbatch as sgl


@sgl.function(temperature=0)
def summarise(s, text):
    s += "Read the text and sum it up in one sentence.\n\n"
    s += f"Text: {text}\nSummary:" + sgl.gen("summary", max_tokens=32, stop="\n")

    judge = s.copy()
    judge += "\nIs this summary good or poor? It is " + sgl.select("grade", choices=["good", "poor"])
    s["grade"] = judge["grade"]
    s["retried"] = judge["grade"] == "poor"
    if s["retried"]:
        s += "\nA shorter and clearer summary:" + sgl.gen("summary", max_tokens=24, stop="\n")
