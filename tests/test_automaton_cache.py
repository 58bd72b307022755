"""Automata between runs: as bytes, in a store, on disk, among several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglbatch.engine.automaton_cache import AutomatonCache
from sglbatch.engine.fsm import Automaton, Compiler, SchemaConstraint, compile_regex
from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.stored import MIN_STORED_WORK, Stored, from_bytes, stored_or_built, to_bytes
from sglbatch.errors import ConstraintError
from sglbatch.types import Constraint

LONG = "(a|b)*a(a|b){10}"
"""Takes more work than MIN_STORED_WORK and few bytes."""


class DictStore:
    """A store in memory that counts what it is asked."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.hits = 0

    def load(self, key: str) -> bytes | None:
        self.hits += key in self.kept
        return self.kept.get(key)

    def save(self, key: str, data: bytes) -> None:
        self.kept[key] = data


def _same(a: Automaton, b: Automaton) -> bool:
    return np.array_equal(a.table, b.table) and np.array_equal(a.accepting, b.accepting) and a.start == b.start


@given(
    st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=6).map(lambda words: "|".join(map(_plain, words)))
)
def test_an_automaton_comes_back_from_its_bytes(pattern: str) -> None:
    automaton = compile_regex(pattern)
    stored = from_bytes(to_bytes(Stored(automaton, 7)))
    assert stored is not None and stored.automaton is not None and stored.work == 7
    assert _same(stored.automaton, automaton)
    assert not stored.automaton.table.flags.writeable and not stored.automaton.accepting.flags.writeable


def _plain(word: str) -> str:
    return "".join(f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}" for c in word)


def test_the_empty_language_comes_back_too() -> None:
    assert from_bytes(to_bytes(Stored(None, 3))) == Stored(None, 3)


@given(st.data())
def test_damaged_bytes_are_nothing_or_the_same(data: st.DataObject) -> None:
    """A flipped bit is noticed, or was in a place that carries no content (times, versions of the archive's format)."""
    automaton = compile_regex("[a-c]{2,5}x")
    whole = bytearray(to_bytes(Stored(automaton, 9)))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    stored = from_bytes(bytes(whole))
    if stored is not None:
        assert stored.automaton is not None and stored.work == 9 and _same(stored.automaton, automaton)


@pytest.mark.parametrize(
    "cut",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"\0" * len(data),
        lambda data: np.arange(3).tobytes(),
        lambda data: b"\x80\x04N.",  # a pickle
    ],
)
def test_other_bytes_are_nothing(cut: Callable[[bytes], bytes]) -> None:
    assert from_bytes(cut(to_bytes(Stored(compile_regex("abc"), 1)))) is None


def test_tables_that_are_no_automaton_are_nothing() -> None:
    automaton = compile_regex("ab")
    wide = automaton.table.copy()
    wide[0, ord("a")] = 9  # there are three states
    assert from_bytes(to_bytes(Stored(Automaton(table=wide, accepting=automaton.accepting), 1))) is None
    short = Automaton(table=automaton.table, accepting=automaton.accepting[:2])
    assert from_bytes(to_bytes(Stored(short, 1))) is None


def test_what_took_long_is_stored_and_found_again() -> None:
    store = DictStore()
    first = compile_regex(LONG, store=store)
    assert len(store.kept) == 1 and store.hits == 0
    again = compile_regex(LONG, store=store)
    assert store.hits == 1 and again is not first and _same(again, first) and _same(again, compile_regex(LONG))
    compile_regex("abc", store=store)
    assert len(store.kept) == 1, "what is built at once is not worth a file"


def test_a_damaged_entry_is_built_anew_and_replaced() -> None:
    store = DictStore()
    wanted = compile_regex(LONG, store=store)
    (key,) = store.kept
    whole, store.kept[key] = store.kept[key], store.kept[key][:100]
    assert _same(compile_regex(LONG, store=store), wanted) and store.kept[key] == whole


def test_the_budget_refuses_the_same_with_and_without_a_store() -> None:
    store = DictStore()
    budget = Budget()
    compile_regex(LONG, budget, store=store)
    work = budget.work
    found = Budget()
    compile_regex(LONG, found, store=store)
    assert store.hits == 1 and found.work == work >= MIN_STORED_WORK
    with pytest.raises(ConstraintError, match="steps"):
        compile_regex(LONG, Budget(max_work=work - 1), store=store)
    with pytest.raises(ConstraintError):
        compile_regex(LONG, Budget(max_work=work - 1))


def test_a_language_without_texts_is_stored_as_such() -> None:
    store = DictStore()

    def build(budget: Budget) -> None:
        budget.spend(MIN_STORED_WORK)

    for _ in range(2):
        budget = Budget()
        assert stored_or_built(store, "k", budget, lambda budget=budget: build(budget)) is None
        assert budget.work == MIN_STORED_WORK
    assert store.hits == 1


def test_patterns_of_a_schema_are_stored_as_well() -> None:
    store = DictStore()
    schema = {"type": "object", "patternProperties": {f"^{LONG}$": {"type": "string", "pattern": "c" + LONG}}}
    first = SchemaConstraint(schema, store=store)
    assert len(store.kept) == 2
    second = SchemaConstraint(schema, store=store)
    assert store.hits == 2
    text = '{"' + "a" * 12 + '": "c' + "a" * 11 + '"}'
    assert first.accepts(text) and second.accepts(text)
    assert not second.accepts('{"b": "cb"}') or first.accepts('{"b": "cb"}')
    assert SchemaConstraint(schema).shortest() == second.shortest()


def test_a_regex_and_a_pattern_of_the_same_text_are_different_things() -> None:
    store = DictStore()
    whole = compile_regex(LONG, store=store)
    anywhere = SchemaConstraint({"type": "string", "pattern": LONG}, store=store)
    assert store.hits == 0 and anywhere.accepts('"c' + "a" * 11 + 'c"') and not whole.accepts(b"c" + b"a" * 11 + b"c")


# --- once in a process -------------------------------------------------------------------------


def test_a_constraint_is_compiled_once_and_so_is_one_that_cannot_be() -> None:
    compiler = Compiler()
    good = Constraint(kind="regex", source=LONG)
    assert compiler.compile(good) is compiler.compile(Constraint(kind="regex", source=LONG))
    for bad in (
        Constraint(kind="regex", source="a(?=b)"),
        Constraint(kind="json_schema", source='{"type": "array", "uniqueItems": true}'),
    ):
        errors = []
        for _ in range(3):
            with pytest.raises(ConstraintError) as caught:
                compiler.compile(bad)
            errors.append(caught.value)
        assert [(type(e), e.code, e.message, e.hint, str(e)) for e in errors] == [
            (type(errors[0]), errors[0].code, errors[0].message, errors[0].hint, str(errors[0]))
        ] * 3
        assert len(set(map(id, errors))) == 3, "what one caller adds is not seen by the next"
        assert vars(errors[2]) == vars(errors[0])
        num_frames, trace = 0, errors[2].__traceback__
        while trace is not None:
            num_frames, trace = num_frames + 1, trace.tb_next
        assert num_frames == 2, "it was not compiled again, and frames do not pile up"


def test_what_is_not_used_for_long_is_forgotten() -> None:
    compiler = Compiler(max_remembered=2)
    a, b, c = (Constraint(kind="regex", source=s) for s in "abc")
    first = compiler.compile(a)
    second = compiler.compile(b)
    assert compiler.compile(a) is first
    compiler.compile(c)
    assert compiler.compile(a) is first and compiler.compile(b) is not second


# --- on disk -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache of automata will lie."""
    monkeypatch.setenv("SGLBATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "automata"


def test_another_cache_object_finds_what_one_has_saved(folder: Path) -> None:
    first = Compiler(AutomatonCache()).compile(Constraint(kind="regex", source=LONG))
    (path,) = folder.iterdir()
    assert path.suffix == ".npz" and folder.stat().st_mode & 0o777 == 0o700
    before = path.stat().st_ino
    second = Compiler(AutomatonCache()).compile(Constraint(kind="regex", source=LONG))
    assert isinstance(first, Automaton) and isinstance(second, Automaton) and _same(first, second)
    assert [p.stat().st_ino for p in folder.iterdir()] == [before], "nothing was written again"


def test_a_corrupt_file_is_built_anew(folder: Path) -> None:
    wanted = compile_regex(LONG, store=AutomatonCache())
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-40] + b"\xff" * 40)
    assert _same(compile_regex(LONG, store=AutomatonCache()), wanted)
    assert path.read_bytes() == whole


def test_other_code_finds_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = AutomatonCache()
    cache.save("k", b"data")
    assert AutomatonCache().load("k") == b"data"
    monkeypatch.setattr("sglbatch.engine.automaton_cache.FORMAT_VERSION", 2)
    assert AutomatonCache().load("k") is None


def test_the_version_is_that_of_every_module_that_builds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    AutomatonCache().save("k", b"data")
    read = Path.read_bytes

    def edited(path: Path) -> bytes:
        return read(path) + (b"\n# edited" if path.name == "minimise.py" else b"")

    monkeypatch.setattr(Path, "read_bytes", edited)
    assert AutomatonCache().load("k") is None


def test_the_least_recently_used_files_go(folder: Path) -> None:
    cache = AutomatonCache(max_bytes=10_000, max_files=1000)
    for i in range(9):
        cache.save(str(i), bytes(1000))
        _age(folder, i)
    assert cache.load("0") is not None  # used now
    cache.save("9", bytes(1000))
    cache.save("10", bytes(1000))
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 7500
    assert cache.load("0") is not None and cache.load("10") is not None
    assert cache.load("1") is None and cache.load("2") is None


def test_the_number_of_files_is_bounded(folder: Path) -> None:
    cache = AutomatonCache(max_files=8)
    for i in range(30):
        cache.save(str(i), b"x")
        assert len(list(folder.iterdir())) <= 8
    assert cache.load("29") == b"x"


def _age(folder: Path, seconds: int) -> None:
    """Files without a time of their own get one long ago, later ones later."""
    for path in folder.iterdir():
        if path.stat().st_mtime > 1e9:
            os.utime(path, (1000 + seconds, 1000 + seconds))


def test_without_a_folder_to_write_to_everything_is_built(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file where the folder should be")
    assert _same(compile_regex(LONG, store=AutomatonCache()), compile_regex(LONG))
    assert folder.read_text().startswith("a file")


BUILD = """
import sys
from sglbatch.engine.automaton_cache import AutomatonCache
from sglbatch.engine.fsm import compile_regex
cache = AutomatonCache(max_files=6)
for i in range(12):
    automaton = compile_regex("(a|b)*a(a|b){%d}" % (9 + i % 4), store=cache)
    assert automaton.num_states == 2 ** (10 + i % 4), automaton.num_states
    cache.save(f"{sys.argv[1]} {i}", b"x" * 100)
"""


def test_processes_share_the_folder(folder: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", BUILD, str(i)]) for i in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert len(list(folder.iterdir())) <= 6 + 3
    assert not list(folder.glob("*.partial"))
