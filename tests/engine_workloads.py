"""Prompts for engine tests: real questions where the shared data is there, else the shipped sample's."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


def mixed_prompts(*, num_each: int, shots: int) -> list[str]:
    """``num_each`` MMLU questions of two subjects and as many GSM8K ones, few-shot, interleaved."""
    if not DATA.is_dir():
        pytest.skip("needs the MMLU and GSM8K tables in ../shared/data")
    import pyarrow.parquet as pq

    dev = pq.read_table(DATA / "mmlu_dev.parquet").to_pylist()
    test = pq.read_table(DATA / "mmlu_test.parquet").to_pylist()
    gsm = pq.read_table(DATA / "gsm8k_train.parquet").to_pylist()
    subjects = ["anatomy", "world_religions"]
    mmlu = []
    for i in range(num_each):
        subject = subjects[i % 2]
        rows = [r for r in test if r["subject"] == subject]
        few = "".join(_mc(r, r["answer"]) for r in [r for r in dev if r["subject"] == subject][:shots])
        mmlu.append(few + _mc(rows[i // 2], ""))
    few = "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in gsm[:shots])
    maths = [f"{few}Question: {r['question']}\nAnswer:" for r in gsm[shots : shots + num_each]]
    return [p for pair in zip(mmlu, maths, strict=True) for p in pair]


def mmlu_prompts(*, num_rows: int, num_subjects: int, shots: int) -> list[str]:
    """``num_rows`` MMLU questions, as many of each of the first subjects, few-shot under the subject's headline."""
    if not DATA.is_dir():
        pytest.skip("needs the MMLU tables in ../shared/data")
    import pyarrow.parquet as pq

    dev = pq.read_table(DATA / "mmlu_dev.parquet").to_pylist()
    test = pq.read_table(DATA / "mmlu_test.parquet").to_pylist()
    texts = []
    for subject in sorted({row["subject"] for row in dev})[:num_subjects]:
        head = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        head += "".join(_mc(r, r["answer"]) for r in [r for r in dev if r["subject"] == subject][:shots])
        rows = [r for r in test if r["subject"] == subject][: num_rows // num_subjects]
        texts += [head + _mc(row, "") for row in rows]
    assert len(texts) == num_rows
    return texts


def _mc(row: dict[str, str], answer: str) -> str:
    options = "\n".join(f"{letter}. {row[letter]}" for letter in "ABCD")
    return f"{row['question']}\n{options}\nAnswer:{' ' + answer + chr(10) + chr(10) if answer else ''}"
