"""One job on several machines: a saved plan, and the pieces that it is cut into.

A piece is a run of the plan's depth-first order, so what its rows share is computed once in it, and pieces are cut
where neighbours share least. It is a job of its own over some of the rows; ``job.merging`` makes one job of all.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sglbatch.data import Row
from sglbatch.errors import SglbatchError
from sglbatch.job.identity import RowKeys, numbered_key
from sglbatch.job.manifest import Manifest, differences
from sglbatch.job.paths import write_atomically
from sglbatch.lang.calls import PendingCall
from sglbatch.lang.row_program import RowKey
from sglbatch.lang.template import Binding
from sglbatch.planner import Plan

PLANNED: Final = (
    *("limit", "params", "mapping", "program", "id_column", "temperature", "max_tokens", "seed", "parse_special"),
    *("max_calls_per_row", "reorder", "schema", "complete", "choice_decoding", "template", "model", "data"),
)
"""Of a job's identity, what a plan depends on."""

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
        return whole.with_name(f"{whole.stem}.shard-{self.number}-of-{self.count}{whole.suffix}")


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
        rows: Iterator[Row],
        *,
        binding: Binding,
        manifest: Manifest,
    ) -> SavedPlan:
        """The plan of ``calls``, for the job of a manifest."""
        places = np.full(manifest.num_rows, -1, dtype=np.int64)
        for place, i in reversed(list(enumerate(plan.order.tolist()))):
            places[calls[i].program_ids] = place  # a row's first place is set last
        identity = json.loads(json.dumps({name: manifest.identity()[name] for name in PLANNED}))
        occurrences = np.zeros(manifest.num_rows, dtype=np.int32)
        keys = RowKeys(manifest.config.id_column)
        for row in rows:
            if row.values is not None:
                keys.later(row.values, binding.arguments(row.values), where=row.where)
                occurrences[row.index] = keys.occurrence
        return SavedPlan(plan=plan, row_places=places, occurrences=occurrences, identity=identity)

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
        plan = Plan.load(path)
        with np.load(path, allow_pickle=False) as saved:
            if not {"row_places", "occurrences", "identity"} <= set(saved.files):
                raise SglbatchError(
                    "plan-unreadable", "this plan does not say which rows it is for", hint=_AGAIN, where=str(path)
                )
            return SavedPlan(
                plan=plan,
                row_places=saved["row_places"],
                occurrences=saved["occurrences"],
                identity=json.loads(saved["identity"].tobytes()),
            )

    def piece(self, shard: Shard, manifest: Manifest, *, where: Path) -> Piece:
        """The piece of a job.

        Args:
            manifest: of the whole job.
            where: the plan's file, for errors.

        Raises:
            SglbatchError: ``plan-mismatch`` where the plan is another job's; ``too-many-shards``.
        """
        mine = json.loads(json.dumps({name: manifest.identity()[name] for name in PLANNED}))
        different = differences(self.identity, mine)
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
        the least of both together, in tokens.
        """
        plan = self.plan
        added = plan.lengths.astype(np.int64) - plan.lcp + plan.reserved
        done = np.concatenate(([0], np.cumsum(added)))[ends].astype(np.float64)  # with each group
        shared = plan.lcp[groups]  # with the request before the group
        reach = float(shared.max(initial=0)) + 1
        cuts: list[int] = []
        for number in range(1, count):
            due = done[-1] * number / count
            least, most = (cuts[-1] if cuts else 0) + 1, len(groups) - (count - number)
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

    def save_rows(self, path: Path) -> None:
        """Writes ``rows`` as a .npy file."""
        content = io.BytesIO()
        np.save(content, self.rows, allow_pickle=False)
        write_atomically(path, content.getvalue())

    def to_json(self) -> dict[str, Any]:
        """What the piece's manifest says of it."""
        return {"plan": self.plan, "shard": str(self.shard), "num_rows": self.num_rows}
