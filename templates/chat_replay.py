"""Put recorded users' turns to a model again, each after the model's own answers: multi-turn chat replay.

Columns read:   turns (list of the user's messages, in order)
Columns made:   answer (the last one), answers (one for each turn)
Sample:         samples/conversations.jsonl

Every turn goes on from the tokens of the turns before it; they are not computed again.
"""

import sglbatch as sgl


@sgl.function(temperature=0)
def chat_replay(s, turns):
    s += sgl.system("You are a helpful assistant. You answer in one short sentence.")
    answers = []
    for turn in turns:
        s += sgl.user(turn)
        s += sgl.assistant(sgl.gen("answer", max_tokens=24))
        answers.append(s["answer"])
    s["answers"] = answers
