"""Sampling and scoring of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglbatch.engine.random import uniform
from sglbatch.engine.sampler import Sampling, sample, score

LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.07, 0.03]]))


def frequencies(num: int = 4000, **options: float) -> list[float]:
    samplings = [Sampling(uniform=uniform(7, i), **({"temperature": 1.0} | options)) for i in range(num)]  # type: ignore[arg-type]
    tokens = sample(LOGITS.repeat(num, 1), samplings)
    return (np.bincount(tokens, minlength=5) / num).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.07, 0.03]),
        ({"temperature": 0.5}, [0.7215, 0.1804, 0.0649, 0.0141, 0.0026]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0, 0]),
        ({"top_p": 0.74}, [2 / 3, 1 / 3, 0, 0, 0]),
        ({"top_p": 0.76}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0, 0]),
        ({"min_p": 0.2}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0, 0]),
    ],
)
def test_distribution(options: dict[str, float], expected: list[float]) -> None:
    assert frequencies(**options) == pytest.approx(expected, abs=0.03)


def test_mixed_rows_do_not_disturb_each_other() -> None:
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(size=(6, 40)), dtype=torch.float32)
    mask = np.zeros(2, dtype=np.int32)
    mask[0], mask[1] = 0b101 << 4, 1
    rows = [
        Sampling(temperature=0.0),
        Sampling(temperature=0.7, uniform=0.3),
        Sampling(temperature=0.0, mask_W=mask),
        Sampling(temperature=1.3, top_p=0.8, top_k=9, uniform=0.9),
        Sampling(temperature=1.0, uniform=0.999999, mask_W=mask),
        Sampling(temperature=1.0, min_p=0.3, uniform=0.5),
    ]
    together = sample(logits.clone(), rows)
    alone = [sample(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    assert together == alone
    assert together[2] in (4, 6, 32) and together[4] in (4, 6, 32)


def test_uniform_is_flat_and_keyed() -> None:
    values = np.array([uniform(seed, position) for seed in range(60) for position in range(60)])
    assert ((values >= 0) & (values < 1)).all()
    assert np.histogram(values, bins=10, range=(0, 1))[0] == pytest.approx(360, abs=70)
    assert len(set(values.tolist())) == 3600


def test_the_end_of_the_distribution_is_a_token_with_mass() -> None:
    logits = torch.tensor([[0.0, 0.0, float("-inf"), float("-inf")]])
    assert sample(logits, [Sampling(temperature=1.0, uniform=1 - 2**-53)]) == [1]


def test_score_is_the_log_softmax() -> None:
    assert score(LOGITS, [[4, 0]])[0] == pytest.approx([np.log(0.03), np.log(0.5)], abs=1e-5)
