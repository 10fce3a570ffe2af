"""Runs on disk, of any experiment: opened, and the lines that their evaluation leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compactattn.models.language_model import LanguageModel, build
from compactattn.training import checkpoint
from compactattn.training.checkpoint import load, load_config, restore_weights
from compactattn.training.config import FREE, RunConfig, RunError, differences
from compactattn.training.distributed import choose_device
from compactattn.training.files import replace_durably
from compactattn.training.records import read_metrics
from compactattn.training.selection import BEST, Selection

EVALUATION = "evaluation.jsonl"


class Trained(NamedTuple):
    """A model as a run left it, or as it was at the best validation."""

    config: RunConfig
    model: LanguageModel
    step: int

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def precision(self) -> str:
        """What an evaluation computes in: on a GPU the precision of training, on a CPU fp32."""
        return self.config.training.precision if self.device.type == "cuda" else "fp32"

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            yield


def open_run(folder: Path, device: str = "auto") -> Trained:
    """The model of a run with the weights of its best validation, or else of its checkpoint, in evaluation mode."""
    where = choose_device(device)
    config, saved = load_config(folder), load(find_best(folder))
    if changed := differences(config, saved.config, ignore=FREE):
        raise RunError(f"{folder}/config.json is not the config of its checkpoint ({'; '.join(changed)}); restore it")
    model = build(config.model)
    restore_weights(model, saved.weights)
    return Trained(config, model.to(where).eval(), saved.step)


def find_best(folder: Path) -> Path:
    """Where the weights of the lowest validation loss are; a run that keeps none, or has no such loss, has only its last ones.

    The run's own checkpoint may be the best, where it was killed before it could copy it to best/.
    """
    best = Selection.of(read_metrics(folder), 0, checkpoint.step_of(folder)).step
    if not best or load_config(folder).training.keep == "last":
        return folder
    for place in (folder / BEST, folder):
        if checkpoint.exists(place) and checkpoint.step_of(place) == best:
            return place
    raise RunError(f"{folder} has no weights of step {best}, its best; restore a copy of the run, or train again")


def read_failure(folder: Path) -> str:
    """What ended a run before its last step, as in "diverged at step 412, loss nan"; nothing where it may go on."""
    lines = read_metrics(folder)
    return str(lines[-1].get("failed", "")) if lines else ""


def check_same(folder: Path, config: RunConfig) -> None:
    """A RunError names the fields in which the run in a folder differs from a config."""
    if changed := differences(load_config(folder), config, ignore=FREE):
        raise RunError(f"{folder} holds a run with another config ({'; '.join(changed)}); choose another folder")


def read_data(kind: type, config: RunConfig, experiment: str) -> Any:
    """The data of a config as a dataclass whose fields are `task: str` and the like; a ValueError names what is wrong."""
    if config.experiment != experiment:
        raise ValueError(f"the run is of the experiment {config.experiment!r}, not {experiment!r}")
    known = {"str": str, "int": int, "Mapping[str, Any]": dict}
    kinds = {entry.name: known[str(entry.type)] for entry in fields(kind)}
    for name, value in config.data.items():
        if name not in kinds:
            raise ValueError(f"data.{name} is unknown; {experiment} has {', '.join(kinds)}")
        if type(value) is not kinds[name]:
            raise ValueError(f"data.{name} = {value!r} must be of type {kinds[name].__name__}")
    for entry in fields(kind):
        if entry.default is MISSING and entry.name not in config.data:
            raise ValueError(f"data.{entry.name} is missing")
    return kind(**config.data)


# -- evaluation.jsonl ----------------------------------------------------------------------------


def read_evaluation(folder: Path) -> list[dict[str, Any]]:
    """The lines of evaluation.jsonl; none where the run has not been evaluated."""
    path = folder / EVALUATION
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line] if path.exists() else []
        for row in rows:
            _ = [row[name] for name in ("task", "samples", "step")]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is malformed ({error!r}); remove it and evaluate again") from None
    return rows


def write_evaluation(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Adds lines to evaluation.jsonl in place of older ones for the same task, split, mode and length.

    A line on more samples of the same model and text stays: a quick look must not cost a thorough one.
    """
    kept = {_place(row): row for row in read_evaluation(folder)}
    for row in rows:
        older = kept.get(_place(row))
        same = older is not None and all(older.get(name) == row.get(name) for name in ("step", "text_checksum"))
        if older is None or not same or older["samples"] <= row["samples"]:
            kept[_place(row)] = row
    text = "".join(json.dumps(kept[place]) + "\n" for place in sorted(kept))
    replace_durably(folder / EVALUATION, text.encode())


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["task"], row.get("split", ""), row.get("mode", ""), row.get("length", 0)
