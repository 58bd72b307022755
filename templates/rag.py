"""Look passages up, then answer from them: retrieval-augmented answering.

Columns read:   question (text)
Columns made:   sources (titles of the passages), answer (text)
Sample:         samples/facts.jsonl; its column expected holds the right answer, --keep expected puts it beside answer

search() is any Python function that gives JSON values: put your own index or database there. It runs through sgl.call,
so slow look-ups of many rows run side by side and are not repeated when the job is resumed. The passages come in the
order of PASSAGES, not of their scores, so that rows that found the same ones share their tokens.
"""

import re

import sglbatch as sgl

TOP = 2

PASSAGES = {
    "Danube": "The Danube rises in the Black Forest and flows through ten countries into the Black Sea.",
    "Nile": "The Nile flows north through Sudan and Egypt and is about 6,650 kilometres long.",
    "Amber": "Amber is the hardened resin of ancient trees. Much of it is found on the coast of the Baltic Sea.",
    "Copper": "Copper conducts electricity well. It melts at 1,085 degrees Celsius and turns green in moist air.",
    "Bees": "A honey bee colony has one queen. Worker bees show the way to flowers by dancing.",
    "Owls": "Owls hunt at night. They can turn their heads by 270 degrees because their eyes do not move.",
    "Tea": "Tea has been drunk in China for thousands of years. Green and black tea come from the same plant.",
    "Coffee": "Coffee was first grown in Ethiopia and Yemen. Brazil grows the most coffee today.",
}


def search(question):
    """Titles of the passages that have most words in common with the question, and their texts."""
    words = set(re.findall(r"\w{3,}", question.lower()))
    scores = {
        title: len(words & set(re.findall(r"\w{3,}", f"{title} {text}".lower()))) for title, text in PASSAGES.items()
    }
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:TOP]
    return [{"title": title, "text": text} for title, text in PASSAGES.items() if title in best]


@sgl.function(temperature=0)
def rag(s, question):
    found = sgl.call(search, question)
    s["sources"] = [passage["title"] for passage in found]
    s += sgl.system("You answer questions in a few words, only from the passages you are given.")
    passages = "\n".join(f"{passage['title']}: {passage['text']}" for passage in found)
    s += sgl.user(f"{passages}\n\n{question}")
    s += sgl.assistant(sgl.gen("answer", max_tokens=24, stop="\n"))
