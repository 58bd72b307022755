"""Pull fields out of text: a name, a year and a field of work from short biographies.

Columns read:   text
Columns made:   name (text up to the end of the line), born (a year), field (one of FIELDS)
Sample:         samples/people.jsonl; its columns expected_name, expected_born and expected_field hold the right values

Three ways to hold an answer in shape: a stop string ends the name, a regular expression allows nothing but a year, and
select scores the fields and takes the likeliest.
"""

import sglbatch as sgl

FIELDS = ["science", "music", "literature", "art", "politics", "sport"]

EXAMPLES = """\
Read each text and fill in the name of the person, the year of birth and the field of work.

Text: Michael Faraday, who was born near London in 1791, discovered how a moving magnet makes a current flow.
Name: Michael Faraday
Born: 1791
Field: science

Text: The novels of Virginia Woolf, born in London in 1882, follow the thoughts of the people in them.
Name: Virginia Woolf
Born: 1882
Field: literature

Text: Born in 1940, Pelé won the football World Cup three times with Brazil.
Name: Pelé
Born: 1940
Field: sport

"""


@sgl.function(temperature=0)
def extract(s, text):
    s += EXAMPLES
    s += f"Text: {text}\nName: " + sgl.gen("name", max_tokens=16, stop="\n")
    s += "\nBorn: " + sgl.gen("born", max_tokens=8, regex=r"1[0-9]{3}|20[0-9]{2}")
    s += "\nField: " + sgl.select("field", choices=FIELDS)
    s["born"] = int(s["born"])  # the column holds integers
