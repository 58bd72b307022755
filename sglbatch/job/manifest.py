"""The manifest of a job: what was asked, what it depends on, and how the last finished run ended."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from sglbatch.errors import SglbatchError
from sglbatch.job.config import NOT_IDENTITY, RunConfig
from sglbatch.job.paths import write_atomically
from sglbatch.version import __version__

MANIFEST_VERSION: Final = 1

_MAX_SHOWN: Final = 60


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How the last run that reached the end ended.

    Args:
        rows_file: name of the rows file that holds every row.
        output_stat: [bytes, time of change in ns] of the output as written.
    """

    rows_file: str
    num_rows: int
    num_failed: int
    output_stat: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One job as it is on disk.

    Args:
        config: the options of the latest run.
        template_hash: of the template's source and the modules it imports from its own folder.
        model_identity: as ``LocalModel.identity``.
        data: [path, bytes, ns] of each file; None when the data cannot be looked at twice (stdin).
        num_rows: input rows.
        created, updated: seconds since the epoch.
        piece: where the job is a piece of another one: as ``shards.Piece.to_json``.
    """

    config: RunConfig
    template_hash: str
    model_identity: str
    data: list[list[Any]] | None
    num_rows: int
    created: float
    updated: float
    finished: Finished | None = None
    piece: Mapping[str, Any] | None = None

    def identity(self) -> dict[str, Any]:
        """Everything that can make a call, or the output, new."""
        options = {k: v for k, v in self.config.to_json().items() if k not in NOT_IDENTITY | {"data", "model"}}
        whole = {**options, "template": self.template_hash, "model": self.model_identity, "data": self.data}
        return whole if self.piece is None else {**whole, "piece": dict(self.piece)}

    def save(self, path: Path) -> None:
        value = {
            "version": MANIFEST_VERSION,
            "sglbatch": __version__,
            "created": self.created,
            "updated": time.time(),
            "options": self.config.to_json(),
            "not_identity": sorted(NOT_IDENTITY),
            "template_hash": self.template_hash,
            "model_identity": self.model_identity,
            "data": self.data,
            "num_rows": self.num_rows,
            "finished": self.finished and asdict(self.finished),
            "piece": self.piece,
        }
        write_atomically(
            path, json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n"
        )

    @staticmethod
    def load(path: Path) -> Manifest:
        """Raises SglbatchError: ``job-version`` for another version's, ``job-damaged`` when it cannot be read."""
        try:
            value = json.loads(path.read_bytes())
            if value["version"] != MANIFEST_VERSION:
                raise SglbatchError(
                    "job-version",
                    f"this job is of version {value['version']}, which sglbatch {__version__} does not know",
                    where=str(path),
                    hint="use the sglbatch that made it, or start over with --restart (the old job is kept aside)",
                )
            finished = value["finished"]
            return Manifest(
                config=RunConfig.from_json(value["options"]),
                template_hash=value["template_hash"],
                model_identity=value["model_identity"],
                data=value["data"],
                num_rows=value["num_rows"],
                created=value["created"],
                updated=value["updated"],
                finished=finished and Finished(**{**finished, "output_stat": tuple(finished["output_stat"])}),
                piece=value.get("piece"),
            )
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise SglbatchError(
                "job-damaged",
                f"the manifest cannot be read ({type(error).__name__}: {error})",
                where=str(path),
                hint="start over with --restart (the old job is kept aside, its journal is not lost)",
            ) from error


def changes(old: Manifest, new: Manifest) -> list[str]:
    """What is different from last time, one line a field, identity first; [] when nothing is."""
    lines = differences(old.identity(), new.identity(), note="")
    old_options, new_options = old.config.to_json(), new.config.to_json()
    shown = NOT_IDENTITY - {"template", "output", "schema_file", "shard", "plan"}
    lines += differences(
        {k: old_options[k] for k in sorted(shown)},
        {k: new_options[k] for k in sorted(shown)},
        note=" (changes no result)",
    )
    return lines


def differences(old: Mapping[str, Any], new: Mapping[str, Any], *, note: str = "") -> list[str]:
    """One line for each member of ``new`` that is other than in ``old``."""
    lines = []
    for name in new:
        if old.get(name) == new[name]:
            continue
        if name == "data":
            lines.append("data: files added, removed or changed")
        elif name == "template":
            lines.append("template: its source changed")
        else:
            lines.append(f"{name}: {_shown(old.get(name))} -> {_shown(new[name])}{note}")
    return lines


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
