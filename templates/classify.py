"""Sort short texts into a fixed set of classes: here, what a customer thought of a product.

Columns read:   review (text)
Columns made:   label ("positive", "negative" or "mixed")
Sample:         samples/reviews.jsonl; its column expected holds a person's label, --keep expected puts it beside label

For classes of your own, change LABELS and the examples. Each label should occur in the examples.
"""

import sglbatch as sgl

LABELS = ["positive", "negative", "mixed"]

EXAMPLES = """\
Label each customer review as positive, negative or mixed.

Review: The kettle boils in two minutes and the handle never gets hot. Best purchase this year.
Label: positive

Review: Stopped charging after a week, and nobody answers my messages.
Label: negative

Review: Lovely sound, but the ear pads hurt after an hour.
Label: mixed

Review: Bought it for my daughter and she uses it every single day.
Label: positive

Review: The tent let in water on the very first night.
Label: negative

Review: The screen is beautiful. The battery, sadly, barely lasts until noon.
Label: mixed

"""


@sgl.function
def classify(s, review):
    s += EXAMPLES
    s += f"Review: {review}\nLabel: " + sgl.select("label", choices=LABELS)
