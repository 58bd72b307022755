"""Pull a record out of text: every answer is JSON of one fixed shape, here what somebody ordered.

Columns read:   message (text)
Columns made:   order (a struct: item, count, express)
Sample:         samples/orders.jsonl; its column expected_item holds the right item

The schema is enforced while the model writes, so no answer has to be repaired or thrown away.
"""

import json

import sglbatch as sgl

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "item": {"type": "string", "maxLength": 30},
            "count": {"type": "integer", "minimum": 1, "maximum": 100},
            "express": {"type": "boolean"},
        },
        "required": ["item", "count", "express"],
        "additionalProperties": False,
    }
)

EXAMPLES = """\
Message: Please send me three boxes of green tea. No hurry.
Order: {"item": "boxes of green tea", "count": 3, "express": false}

Message: I need a kettle by tomorrow!
Order: {"item": "kettle", "count": 1, "express": true}

"""


@sgl.function(temperature=0)
def json_extract(s, message):
    s += EXAMPLES
    s += f"Message: {message}\nOrder: " + sgl.gen("order", max_tokens=48, json_schema=SCHEMA)
