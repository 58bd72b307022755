"""Answer multiple-choice questions: every row gets one letter, never anything else.

Columns read:   question (text), choices (list of 2 to 26 texts)
Columns made:   choice (the letter: "A" is the first of choices)
Sample:         samples/questions.jsonl; its column answer holds the right letter, --keep answer puts it beside choice

The five worked examples come first and are the same for all rows, so their tokens are computed once for the whole job.
"""

from string import ascii_uppercase

import sglbatch as sgl

EXAMPLES = """\
Each question below has one right answer. Give its letter.

Question: Which gas do plants take in for photosynthesis?
A. Oxygen
B. Carbon dioxide
C. Helium
D. Methane
Answer: B

Question: How many sides does a hexagon have?
A. Six
B. Five
C. Eight
D. Seven
Answer: A

Question: In which country is the city of Kyoto?
A. China
B. South Korea
C. Vietnam
D. Japan
Answer: D

Question: Who wrote the play "Hamlet"?
A. Charles Dickens
B. Jane Austen
C. William Shakespeare
D. John Milton
Answer: C

Question: What is the frozen form of water called?
A. Ice
B. Steam
C. Fog
D. Dew
Answer: A

"""


@sgl.function
def multiple_choice(s, question, choices):
    if not 2 <= len(choices) <= len(ascii_uppercase):
        raise ValueError(f"choices has {len(choices)} entries, 2 to {len(ascii_uppercase)} are possible")
    letters = ascii_uppercase[: len(choices)]
    s += EXAMPLES
    s += f"Question: {question}\n"
    for letter, choice in zip(letters, choices, strict=True):
        s += f"{letter}. {choice}\n"
    s += "Answer: " + sgl.select("choice", choices=list(letters))
