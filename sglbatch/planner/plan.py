"""The plan of one job: its first requests in depth-first order, and what that order can share."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sglbatch.errors import SglbatchError
from sglbatch.planner.estimate import answer_tokens, unique_alone_tokens, unique_run_tokens
from sglbatch.planner.order import depth_first_order
from sglbatch.types import Operation, TokenIds

PLAN_VERSION: Final = 1

_ARRAYS: Final[Mapping[str, type[np.generic]]] = {
    "order": np.int64,
    "lcp": np.int32,
    "lengths": np.int32,
    "reserved": np.int32,
}
_HEADER: Final[Mapping[str, type]] = {"num_tokens": int, "unique_tokens": int, "fingerprint": str}


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """All first requests of a job, depth-first over the radix tree of their prompts.

    Every array is read-only and in plan order.

    Args:
        order: int64 [N], input index of the i-th request.
        lcp: int32 [N], tokens that request i has in common with request i - 1; 0 for the first.
        lengths: int32 [N], prompt tokens of request i.
        reserved: int32 [N], KV slots that request i may need behind its prompt.
        num_tokens: prompt tokens of all requests, those of a choice's alternatives included: every run of
            ``types.prefill_runs`` counts whole.
        unique_tokens: tokens of the radix tree of all those runs: what is computed when every edge is computed once.
        fingerprint: hash of the prompts in order, so that a saved plan is known to belong to them.
        version: of the saved form.
    """

    order: npt.NDArray[np.int64]
    lcp: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    reserved: npt.NDArray[np.int32]
    num_tokens: int
    unique_tokens: int
    fingerprint: str
    version: int = PLAN_VERSION

    def __post_init__(self) -> None:
        for name, dtype in _ARRAYS.items():
            array: npt.NDArray[Any] = getattr(self, name)
            assert array.dtype == dtype, f"{name}: {array.dtype}"
            assert array.shape == self.order.shape and array.ndim == 1, f"{name}: {array.shape}"
            array.flags.writeable = False

    @property
    def num_requests(self) -> int:
        return len(self.order)

    @property
    def best_hit_rate(self) -> float:
        """Share of prompt tokens, 0 to 1, not computed when every edge is computed once; 0 without tokens."""
        return 1.0 - self.unique_tokens / self.num_tokens if self.num_tokens else 0.0

    def positions(self) -> npt.NDArray[np.int64]:
        """int64 [N]: place in the order of each request by its input index (the inverse of ``order``)."""
        places = np.empty_like(self.order)
        places[self.order] = np.arange(self.num_requests)
        return places

    def kv_tokens(self, num_running: int) -> int:
        """KV slots with which any ``num_running`` requests that follow one another in the order fit in memory together.

        Their prompts count as the radix tree of just these requests, plus all they may generate. 1 gives the smallest
        pool that can finish the job; ``num_requests`` the pool that never has to let anything go.
        """
        if not self.num_requests or num_running < 1:
            return 0
        width = min(num_running, self.num_requests)
        # A window holds its first prompt whole and, of each later one, what its neighbour does not have.
        added = self.lengths.astype(np.int64) - self.lcp + self.reserved
        sums = np.concatenate(([0], np.cumsum(added)))
        windows = sums[width:] - sums[:-width]
        return int((windows + self.lcp[: len(windows)]).max())

    @property
    def kv_tokens_minimum(self) -> int:
        """The smallest pool that can finish the job: the largest request alone, prompt and answer."""
        return self.kv_tokens(1)

    @property
    def kv_tokens_whole(self) -> int:
        """The pool that holds everything at once: all unique tokens and every answer at its longest."""
        return self.kv_tokens(self.num_requests)

    def matches(self, prompts: Sequence[TokenIds]) -> bool:
        """Whether this is the plan of exactly these prompts, in this input order."""
        return len(prompts) == self.num_requests and _fingerprint(prompts, self.order) == self.fingerprint

    def save(self, path: Path, **more: npt.NDArray[Any]) -> None:
        """Write to ``path`` (``.npz``, no pickle inside), replacing it in one step.

        Args:
            more: further arrays for the file, which ``load`` leaves alone.

        Raises:
            SglbatchError: ``plan-not-written``.
        """
        header = json.dumps({"version": self.version} | {name: getattr(self, name) for name in _HEADER}).encode()
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _ARRAYS} | more
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                np.savez(file, header=np.frombuffer(header, dtype=np.uint8), **arrays)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise SglbatchError(
                "plan-not-written",
                f"the plan cannot be saved: {error.strerror or error}",
                hint="give a file in a folder that exists and that you may write to",
                where=str(path),
            ) from error

    @staticmethod
    def load(path: Path) -> Plan:
        """Read a saved plan. Raises SglbatchError when it is missing, damaged or of another version."""
        return Plan.load_more(path, ())[0]

    @staticmethod
    def load_more(path: Path, names: Sequence[str]) -> tuple[Plan, dict[str, npt.NDArray[Any]]]:
        """As ``load``, and those of the arrays of these names that ``save`` was given."""
        header, arrays = _read(path, (*_ARRAYS, *names))
        more = {name: arrays.pop(name) for name in names if name in arrays}
        version = header.get("version") if isinstance(header, dict) else None
        if version != PLAN_VERSION:
            raise SglbatchError(
                "plan-version",
                f"the plan has version {version}, this program reads version {PLAN_VERSION}",
                hint="make it again: sglbatch plan TEMPLATE DATA --save FILE",
                where=str(path),
            )
        if fault := _fault(arrays) or _header_fault(header):
            raise _unreadable(path, fault)
        plan = Plan(
            order=arrays["order"],
            lcp=arrays["lcp"],
            lengths=arrays["lengths"],
            reserved=arrays["reserved"],
            **{name: header[name] for name in _HEADER},
        )
        return plan, more


def make_plan(prompts: Sequence[TokenIds], operations: Sequence[Operation] | None = None) -> Plan:
    """Plan calls.

    Args:
        prompts: N arrays of token ids, int32 [prompt_len].
        operations: what each call asks for; None plans the prompts alone, with nothing behind them.
    """
    order, lcp = depth_first_order(prompts)
    lengths = np.fromiter((len(prompts[index]) for index in order.tolist()), dtype=np.int32, count=len(prompts))
    num_tokens = int(lengths.sum(dtype=np.int64))
    unique_tokens = num_tokens - int(lcp.sum(dtype=np.int64))
    reserved = np.zeros(len(prompts), dtype=np.int32)
    if operations is not None:
        assert len(operations) == len(prompts), f"{len(operations)} operations for {len(prompts)} prompts"
        answers = answer_tokens(operations)
        reserved = np.array([answers[index].kv for index in order.tolist()], dtype=np.int32)
        num_tokens += sum(
            (answer.num_runs - 1) * len(prompt) + answer.run_tokens + answer.alone_tokens
            for answer, prompt in zip(answers, prompts, strict=True)
        )
        unique_tokens += unique_run_tokens(prompts, operations, order, lcp)
        unique_tokens += unique_alone_tokens(operations)
    return Plan(
        order=order,
        lcp=lcp,
        lengths=lengths,
        reserved=reserved,
        num_tokens=num_tokens,
        unique_tokens=unique_tokens,
        fingerprint=_fingerprint(prompts, order),
    )


def _fingerprint(prompts: Sequence[TokenIds], order: npt.NDArray[np.int64]) -> str:
    digest = hashlib.blake2b(order.astype("<i8").tobytes(), digest_size=16)
    for index in order.tolist():
        prompt = prompts[index]
        digest.update(len(prompt).to_bytes(4, "little"))
        digest.update(np.ascontiguousarray(prompt, dtype="<i4").data)
    return digest.hexdigest()


def _read(path: Path, names: Sequence[str]) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
    """The header and those of the arrays that are there, unchecked."""
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise _unreadable(path, "it is not a saved plan, or it was cut short")
            file.seek(0)
            with np.load(file, allow_pickle=False) as saved:
                return json.loads(saved["header"].tobytes()), {name: saved[name] for name in names if name in saved}
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except (ValueError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise _unreadable(path, "it is not a saved plan, or it is damaged") from error


def _fault(arrays: Mapping[str, npt.NDArray[Any]]) -> str | None:
    """What is wrong with loaded arrays, None when they are a plan's."""
    missing = _ARRAYS.keys() - arrays.keys()
    if missing:
        return f"it lacks {', '.join(sorted(missing))}"
    if any(arrays[name].dtype != dtype or arrays[name].ndim != 1 for name, dtype in _ARRAYS.items()):
        return "an array in it has another type or shape"
    size = len(arrays["order"])
    if any(len(array) != size for array in arrays.values()):
        return "its arrays differ in length"
    if not np.array_equal(np.sort(arrays["order"]), np.arange(size)):
        return "its order does not name every request once"
    lcp, lengths = arrays["lcp"], arrays["lengths"]
    if size and (lcp[0] != 0 or lcp.min() < 0 or np.any(lcp > lengths) or np.any(lcp[1:] > lengths[:-1])):
        return "its shared lengths do not fit its prompts"
    return None


def _header_fault(header: Mapping[str, Any]) -> str | None:
    wrong = [name for name, kind in _HEADER.items() if type(header.get(name)) is not kind]
    return f"its header lacks {', '.join(wrong)}" if wrong else None


def _unreadable(path: Path, reason: str) -> SglbatchError:
    return SglbatchError(
        "plan-unreadable",
        f"the plan cannot be read: {reason}",
        hint="make it again: sglbatch plan TEMPLATE DATA --save FILE",
        where=str(path),
    )
