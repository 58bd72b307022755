"""Which places of a function are taken for ones where it may know more of a row than a trace sees."""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import FunctionType

import pytest

from sglbatch.lang.looks import first_look
from tests.test_lang_replay import HEAD, loaded

HELPERS = """
def other(x):
    return ord(x)

def plain(x, y="", *, items=()):
    return f"{x}: {y}" + "".join(f"- {item}" for item in items)

def looking(x):
    return f"{x}!" if len(f"{x}") > 3 else x

def writing(state, x):
    state += sgl.user(plain(x)) + sgl.assistant(sgl.gen("x"))
    return state["x"]

def changing(items, x):
    items.append(f"{x}")

def again(x):
    return again(f"{x}.")

def many(*values):
    return "".join(values)

def counted():
    BASE[0] += 1
    return "!" if BASE[0] > 100 else ""

import functools

def stripping(function):
    @functools.wraps(function)
    def outer(x):
        return function(f"{x}".strip())
    return outer

@stripping
def wrapped(x):
    return x

BASE = [0]
"""

HARMLESS = [
    "s += plain(a)",
    "s += plain(a, y=b, items=c) + 'x'",
    "s += plain(x=writing(s, a))",
    "s += a",
    "s += f'{a}: {b}'",
    "t = f'{a}'\nt += b\ns += t + 'x' + t",
    "s += 'a' if c else 'b'",
    "s += sgl.user(f'{a}') + sgl.assistant(sgl.gen('x'))",
    "with s.user():\n    s += f'{a}'",
    "parts = [f'{i}. {item}' for i, item in enumerate(c)]\ns += '\\n'.join(parts)",
    "for letter, item in zip('ABC'[: len(c)], c):\n    s += f'{letter}. {item}'",
    "f = s.fork(2)\nf += [f'{a} {i}' for i in range(2)]\nfor name, branch in zip(['x', 'y'], f):\n    s += branch['v']",
    "branch = s.copy()\nbranch += f'{a}'\nbranch['x'] = f'{b}'\ns += branch['x']",
    "if len(c) > 3:\n    raise ValueError(f'{a} has {len(c)}')",
    "got = []\ngot.append(s['x'])\ns['got'] = got",
    "s['x'] = str(a)",
    "if a == 'x' or a.startswith('y'):\n    s += 'dynamic: the value itself refuses'",
    "s['n'] = int(a)",
    "return {'a': a, 'text': f'{a} {b}'}",
    "s += 'has' if 'x' in s else 'has not'",
    "s += '{} and {}'.format(a, b)",
    "d = []\nd += [f'{a}']\nd.append(f'{b}')\ne = d\ns += ', '.join(e)",
    "n = 0\nfor x in c:\n    n += 1\n    s += f'{n}. {x}'",
    "d = {}\nd['k'] = f'{a}'\ns += 'x'\nreturn d",
    "s += 'none' if a is None else a",
]
LOOKS = {
    "t = f'{a}!'\ns += t if len(t) > 9 else 'short'": (2, "gives a row's values to len"),
    "s += f'{a}'.strip()": (1, "looks into text made of a row's values"),
    "t = a + f'{b}'\nif t:\n    s += t": (2, "branches on text made of a row's values"),
    "s += 'x' if f'{a}{b}' == 'ab' else 'y'": (1, "compares text made of a row's values"),
    "s += 'one'\nif 'http' in f'{a}':\n    s += 'link'": (2, "compares text made of a row's values"),
    "if a in 'xyz':\n    s += 'letter'": (1, "looks for a row's value"),
    "s += re.sub('x', 'y', a)": (1, "gives a row's values to re.sub"),
    "s += json.dumps(c)": (1, "gives a row's values to json.dumps"),
    "s += f'{c!r}'": (1, "puts a row's values into text as Python writes them"),
    "t = f'{a}{b}'\ns += f'{t:>5}'": (2, "formats text made of a row's values"),
    "s += f'{1:>{a}}'": (1, "formats text made of a row's values"),
    "s += '%s' % a": (1, "computes with text made of a row's values"),
    "s += f'{a}' * 2": (1, "computes with text made of a row's values"),
    "for x in f'{a}{b}':\n    s += x": (1, "goes through text made of a row's values"),
    "try:\n    s += s['x']\nexcept ValueError:\n    s += 'none'": (1, "catches errors"),
    "import contextlib\nwith contextlib.suppress(TypeError):\n    s += a": (
        2,
        "enters a context that is none of its state's",
    ),
    "def inner():\n    return f'{a}'\ns += inner()": (1, "has a statement that is not followed (functiondef)"),
    "match a:\n    case 'x':\n        s += 'x'": (1, "has a statement that is not followed (match)"),
    "global SEEN\nSEEN = a": (1, "has a statement that is not followed (global)"),
    "s += '' if {f'{a}': 1} else 'x'": (1, "has an expression that is not followed (dict)"),
    "for item in c:\n    s += 'x'\n    s += 'y' if len(f'{item}') else 'z'": (3, "gives a row's values to len"),
    "f = s.fork(2)\nf = [f'{a}']\ns += f[0]": (2, "has f for a state and for something else"),
    "g = lambda x: x\ns += g(a)": (2, "calls g"),
    "t = f'{a}'\nn = len(locals()['t'])": (2, "calls locals"),
    "s += looking(a)": (1, "gives a row's values to len in looking"),
    "s += looking(*c)": (1, "calls looking with a star"),
    "changing(c, a)\ns += c[0]": (1, "changes something in place (append) in changing"),
    "t = plain(a)\nif len(t) > 3:\n    s += t": (2, "gives a row's values to len"),
    "s += again(a)": (1, "gives a row's values to again in again"),
    "d = []\ne = d\ne.append(f'{a}')\ns += d[0].strip()": (3, "changes something in place (append)"),
    "d = []\ne = d\ne += [f'{a}']\ns += d[0].strip()": (3, "adds to something that may have another name"),
    "d = {'k': []}\nfor k, v in d.items():\n    v.append(f'{a}')\ns += d['k'][0].strip()": (
        3,
        "changes something in place (append)",
    ),
    "d = [[]]\nlast = d[-1]\nlast.append(f'{a}')\ns += d[0][0].strip()": (3, "changes something in place (append)"),
    "d = [[]]\nlast = d[0]\nlast[0] = f'{a}'\ns += d[0][0].strip()": (
        3,
        "sets a part of something that may have another name",
    ),
    "base = BASE\nbase.append(f'{a}')\ns += BASE[0].strip()": (2, "changes something in place (append)"),
    "c.sort(key=str.lower)\ns += c[0]": (1, "changes something in place (sort)"),
    "s += a + counted()": (1, "adds to something that may have another name in counted"),
    "s += 'same' if a is b else 'other'": (1, "asks whether two names stand for the same object"),
    "f = s.fork(2)\nf += lambda i, *, t=f'{a}': t.strip()": (2, "looks into text made of a row's values"),
    "s += wrapped(a)": (1, "gives a row's values to wrapped"),
    "s += many(a, b)": (1, "calls many, which takes any number of arguments"),
}


def function(body: str, folder: Path) -> FunctionType:
    source = f"{HEAD}def program(s, a, b, c):\n{textwrap.indent(body, '    ')}\n\n{HELPERS}"
    return loaded(source, folder).function


@pytest.mark.parametrize("body", HARMLESS)
def test_what_a_trace_sees_is_no_look(body: str, tmp_path: Path) -> None:
    assert first_look(function(body, tmp_path)) is None


@pytest.mark.parametrize("body", LOOKS)
def test_what_a_trace_does_not_see_is_one(body: str, tmp_path: Path) -> None:
    program = function(body, tmp_path)
    look = first_look(program)
    assert look is not None
    assert (look.at - program.__code__.co_firstlineno - 1, look.reason) == LOOKS[body]


def test_a_look_in_a_loop_counts_from_its_head(tmp_path: Path) -> None:
    program = function("s += 'one'\nfor item in c:\n    s += 'x'\n    s += item if f'{item}' else 'z'", tmp_path)
    look = first_look(program)
    assert look is not None and (look.line, look.at) == (program.__code__.co_firstlineno + 3, look.line + 2)


@pytest.mark.parametrize(
    ("body", "reads"),
    [
        ("n = other(s['x'])", True),
        ("n = [other(branch['x']) for branch in f]", True),
        ("n = other(a) + s['x']", False),
        ("n = other(a) if s['x'] else s['y']", False),
        ("n = [other(branch['x']) for branch in f if other(a)]", False),
        ("n = other(s[a])", False),
    ],
)
def test_a_statement_may_read_before_it_looks(body: str, reads: bool, tmp_path: Path) -> None:
    look = first_look(function(f"f = s.fork(2)\n{body}", tmp_path))
    assert look is not None and look.reads_first is reads


def test_a_function_without_source_is_looked_at_as_a_whole() -> None:
    names: dict[str, object] = {}
    exec("def program(s, a):\n    s += a\n", names)
    look = first_look(names["program"])  # type: ignore[arg-type]
    assert look is not None and look.reason == "has no source that could be read"
