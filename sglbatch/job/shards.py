"""One job on several machines: a saved plan, and the pieces that it is cut into.

A piece is a run of the plan's depth-first order, so what its rows share is computed once in it, and pieces are cut
where neighbours share least. It is a job of its own over some of the rows; ``job.merging`` makes one job of all.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sglbatch.data import Row, suffix_of
from sglbatch.errors import SglbatchError
from sglbatch.job.identity import RowKeys, numbered_key
from sglbatch.job.manifest import Manifest, differences
from sglbatch.job.paths import JobPaths, write_atomically
from sglbatch.lang.calls import PendingCall
from sglbatch.lang.row_program import RowKey
from sglbatch.lang.template import Binding
from sglbatch.planner import Plan

PLANNED: Final = (
    *("limit", "params", "mapping", "program", "id_column", "temperature", "max_tokens", "seed", "parse_special"),
    *("max_calls_per_row", "reorder", "schema", "complete", "choice_decoding", "template", "model", "data"),
)
"""Of a job's identity, what a plan depends on."""
CUT_ROUNDS: Final = 3

_AGAIN: Final = "make it again: sglbatch plan TEMPLATE DATA --model M --save FILE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Piece ``number`` (from 1) of ``count``."""

    number: int
    count: int

    @staticmethod
    def parse(text: str) -> Shard:
        """``3/8``.

        Raises:
            SglbatchError: ``bad-option``.
        """
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
        number, count = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= count:
            raise SglbatchError(
                "bad-option",
                f"--shard takes the number of a piece and of all pieces, from 1/n to n/n, not {text!r}",
                hint="for example --shard 3/8; in a Slurm array of 1-8: --shard $SLURM_ARRAY_TASK_ID/8",
            )
        return Shard(number=number, count=count)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def output(self, whole: Path) -> Path:
        """Where the piece goes, beside the output of all pieces."""
        return whole.with_name(f"{self.number}-of-{self.count}".join(around_number(whole)))

    @staticmethod
    def outputs(whole: Path) -> list[tuple[Shard, Path]]:
        """Where the pieces of an output that have a job go, in no particular order."""
        number = "([1-9][0-9]{0,8})-of-([1-9][0-9]{0,8})"
        name = re.compile(number.join(map(re.escape, around_number(whole))) + r"\.job")
        found = []
        for folder in whole.absolute().parent.iterdir():
            output = folder.with_suffix("")
            if (match := name.fullmatch(folder.name)) and JobPaths(output=output).manifest.is_file():
                found.append((Shard(number=int(match[1]), count=int(match[2])), output))
        return found


def around_number(whole: Path) -> tuple[str, str]:
    """The name of a piece of this output before, and behind, what says which piece it is."""
    suffix = suffix_of(whole) or whole.suffix
    return f"{whole.name.removesuffix(suffix)}.shard-", suffix


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedPlan:
    """What ``plan --save`` writes, and each piece reads.

    Args:
        row_places: int64 [rows], place in the plan of a row's first call; -1 where it has none to make.
        occurrences: int32 [rows], which of the rows with equal arguments a row is, from 1; 0 where its key is another.
        identity: of the job, the members named in ``PLANNED``.
    """

    plan: Plan
    row_places: npt.NDArray[np.int64]
    occurrences: npt.NDArray[np.int32]
    identity: Mapping[str, Any]

    @staticmethod
    def of(
        plan: Plan,
        calls: list[PendingCall],
        rows: Iterable[Row],
        *,
        binding: Binding,
        manifest: Manifest,
    ) -> SavedPlan:
        """The plan of ``calls``, for the job of a manifest."""
        places = np.full(manifest.num_rows, -1, dtype=np.int64)
        for place, i in reversed(list(enumerate(plan.order.tolist()))):
            places[calls[i].program_ids] = place  # a row's first place is set last
        occurrences = np.zeros(manifest.num_rows, dtype=np.int32)
        keys = RowKeys(manifest.config.id_column)
        for row in rows:
            if row.values is not None:
                keys.later(row.values, binding.arguments(row.values), where=row.where)
                occurrences[row.index] = keys.occurrence
        return SavedPlan(plan=plan, row_places=places, occurrences=occurrences, identity=_planned(manifest))

    @property
    def id(self) -> str:
        """The same for equal plans alone."""
        digest = hashlib.blake2b(self.plan.fingerprint.encode(), digest_size=16)
        digest.update(json.dumps(self.identity, sort_keys=True).encode())
        for array in (self.row_places.astype("<i8"), self.occurrences.astype("<i4"), self.plan.lcp.astype("<i4")):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Raises SglbatchError: ``plan-not-written``."""
        identity = np.frombuffer(json.dumps(self.identity).encode(), dtype=np.uint8)
        self.plan.save(path, row_places=self.row_places, occurrences=self.occurrences, identity=identity)

    @staticmethod
    def load(path: Path) -> SavedPlan:
        """Raises SglbatchError: as ``Plan.load``; ``plan-unreadable`` for one that does not know its rows."""
        plan, more = Plan.load_more(path, ("row_places", "occurrences", "identity"))
        if len(more) < 3:
            raise _unreadable(path, "this plan does not say which rows it is for")
        places, occurrences = more["row_places"], more["occurrences"]
        try:
            identity = json.loads(more["identity"].tobytes())
        except ValueError as error:
            raise _unreadable(path, "what it says of its job cannot be read") from error
        sound = places.dtype == np.int64 and occurrences.dtype == np.int32 and isinstance(identity, dict)
        sound = sound and places.ndim == 1 and places.shape == occurrences.shape
        if not sound or places.max(initial=-1) >= plan.num_requests or places.min(initial=0) < -1:
            raise _unreadable(path, "its rows do not fit its calls")
        return SavedPlan(plan=plan, row_places=places, occurrences=occurrences, identity=identity)

    def piece(self, shard: Shard, manifest: Manifest, *, where: Path) -> Piece:
        """The piece of a job.

        Args:
            manifest: of the whole job.
            where: the plan's file, for errors.

        Raises:
            SglbatchError: ``plan-mismatch`` where the plan is another job's; ``too-many-shards``.
        """
        different = differences(self.identity, _planned(manifest))
        if different or len(self.row_places) != manifest.num_rows:
            raise SglbatchError(
                "plan-mismatch",
                f"the plan was made for another job: {'; '.join(different) or 'it has another number of rows'}",
                hint=_AGAIN,
                where=str(where),
            )
        if shard.count > manifest.num_rows:
            raise SglbatchError(
                "too-many-shards",
                f"{manifest.num_rows} rows cannot be cut into {shard.count} pieces",
                hint="give a smaller number behind the slash of --shard",
            )
        rows = np.flatnonzero(self._pieces(shard.count) == shard.number - 1)
        return Piece(
            plan=self.id,
            shard=shard,
            num_rows=manifest.num_rows,
            rows=rows,
            occurrences=self.occurrences[rows],
        )

    def _pieces(self, count: int) -> npt.NDArray[np.int64]:
        """int64 [rows]: each row's piece, from 0. No piece is empty where there are as many rows."""
        num_rows = len(self.row_places)
        pieces = np.arange(num_rows) * count // max(1, num_rows)
        planned = self.row_places >= 0
        groups, group_of = np.unique(self.row_places[planned], return_inverse=True)  # rows with the same first call
        if len(groups) >= count:
            ends = np.append(groups[1:], self.plan.num_requests)
            pieces[planned] = (np.searchsorted(self._cuts(groups, ends, count), group_of, side="right")).astype(
                np.int64
            )
        return pieces

    def _cuts(self, groups: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], count: int) -> list[int]:
        """The first group of every piece but the first.

        A cut computes again what the groups beside it share, and makes pieces unequal where it is not at its due place:
        the least of both together, in tokens. What is computed again counts for the piece that does so, and is known
        when the cuts are: so they are made a few times.
        """
        plan = self.plan
        added = plan.lengths.astype(np.int64) - plan.lcp + plan.reserved
        done = np.concatenate(([0], np.cumsum(added)))[ends].astype(np.float64)  # with each group
        shared = plan.lcp[groups].astype(np.float64)  # with the request before the group
        again = np.zeros(count - 1)
        cuts: list[int] = []
        for _ in range(CUT_ROUNDS):
            before = np.concatenate(([0.0], np.cumsum(again)))
            dues = (done[-1] + before[-1]) * np.arange(1, count) / count - before[:-1]
            cuts = _best_cuts(done, shared, dues.tolist())
            again = shared[cuts]
        return cuts


def _best_cuts(done: npt.NDArray[np.float64], shared: npt.NDArray[np.float64], dues: Sequence[float]) -> list[int]:
    """For each due amount of ``done`` the group before which a cut costs least; no two are the same, and none is 0."""
    reach = float(shared.max(initial=0.0)) + 1
    cuts: list[int] = []
    for number, due in enumerate(dues, start=1):
        least, most = (cuts[-1] if cuts else 0) + 1, len(done) - (len(dues) + 1 - number)
        low, high = np.searchsorted(done, [due - reach, due + reach]) + 1
        low, high = int(np.clip(low, least, most)), int(np.clip(high, least, most))
        cost = shared[low : high + 1] + np.abs(done[low - 1 : high] - due)
        cuts.append(low + int(np.argmin(cost)))
    return cuts


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """The rows of one shard.

    Args:
        plan: the plan's id.
        num_rows: of the whole job.
        rows: int64 [rows of the piece], their places in the whole input, ascending.
        occurrences: int32 [rows of the piece], see ``SavedPlan``.
    """

    plan: str
    shard: Shard
    num_rows: int
    rows: npt.NDArray[np.int64]
    occurrences: npt.NDArray[np.int32]

    def key(self, row: Row, binding: Binding) -> RowKey | None:
        """The key that the row has in the whole job; None where it is not a numbered one."""
        number = int(self.occurrences[row.index])
        if row.values is None or not number:
            return None
        return partial(numbered_key, binding.arguments(row.values), number)

    def save_rows(self, paths: JobPaths) -> None:
        """Writes ``rows`` as a .npy file of this plan's; those of a plan before stay with the rows that it finished."""
        content = io.BytesIO()
        np.save(content, self.rows, allow_pickle=False)
        write_atomically(paths.piece_rows(self.plan), content.getvalue())

    def to_json(self) -> dict[str, Any]:
        """What the piece's manifest says of it."""
        return {"plan": self.plan, "shard": str(self.shard), "num_rows": self.num_rows}


def piece_places(paths: JobPaths, manifest: Manifest) -> npt.NDArray[np.int64]:
    """int64 [rows of the piece]: their places in the whole input, of the piece that has this manifest.

    Raises:
        SglbatchError: ``job-damaged``.
    """
    assert manifest.piece is not None
    path = paths.piece_rows(manifest.piece["plan"])
    try:
        places: npt.NDArray[np.int64] = np.load(path, allow_pickle=False)
        sound = places.dtype == np.int64 and places.shape == (manifest.num_rows,)
    except (OSError, ValueError, EOFError):
        sound = False
    if not sound:
        raise SglbatchError(
            "job-damaged",
            "which rows this piece has cannot be read",
            where=str(path),
            hint="run the piece's `sglbatch run` command again: it writes this file anew and repeats no call",
        )
    return places


def _planned(manifest: Manifest) -> dict[str, Any]:
    """Of a job's identity what a plan depends on, as JSON gives it back."""
    identity = manifest.identity()
    planned: dict[str, Any] = json.loads(json.dumps({name: identity[name] for name in PLANNED}))
    return planned


def _unreadable(path: Path, reason: str) -> SglbatchError:
    return SglbatchError("plan-unreadable", reason, hint=_AGAIN, where=str(path))
