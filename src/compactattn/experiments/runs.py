"""Runs on disk: opened, evaluated, and worked through one after another."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compactattn.evaluation.exact_match import Match, Mode, evaluate
from compactattn.experiments import length_generalisation as length_gen
from compactattn.models.language_model import LanguageModel, build
from compactattn.training.checkpoint import load, load_config, restore_weights
from compactattn.training.config import FREE, RunConfig, RunError, differences
from compactattn.training.distributed import choose_device
from compactattn.training.files import replace_durably

EVALUATION = "evaluation.jsonl"


class Trained(NamedTuple):
    """A model as a run left it."""

    config: RunConfig
    model: LanguageModel
    step: int


def open_run(folder: Path, device: str = "auto") -> Trained:
    """The model of a run with the weights of its checkpoint, in evaluation mode."""
    where = choose_device(device)
    config, saved = load_config(folder), load(folder)
    if changed := differences(config, saved.config, ignore=FREE):
        raise RunError(f"{folder}/config.json is not the config of its checkpoint ({'; '.join(changed)}); restore it")
    try:
        length_gen.Data.of(config).make_task()
    except ValueError as error:
        raise RunError(f"{folder}/config.json: {error}") from error
    model = build(config.model)
    restore_weights(model, saved.weights)
    return Trained(config, model.to(where).eval(), saved.step)


Progress = Callable[[int, int, int], None]  # length, samples done, samples in all


def evaluate_run(
    folder: Path,
    lengths: Sequence[int] | None = None,
    mode: Mode = "teacher-forced",
    samples: int = 1000,
    device: str = "auto",
    progress: Progress | None = None,
) -> list[Match]:
    """Exact match of a run at each length, also written to its evaluation.jsonl, where it takes the place of older lines.

    On a GPU the model computes in the precision that it was trained in, on a CPU in fp32.
    """
    trained = open_run(folder, device)
    where = next(trained.model.parameters()).device.type
    precision = trained.config.training.precision if where == "cuda" else "fp32"
    found = []
    for length in lengths or length_gen.default_lengths(trained.config):
        try:
            test_set = length_gen.open_test_set(trained.config, length, samples)
        except ValueError as error:
            raise RunError(str(error)) from error
        watch = None if progress is None else (lambda done, total, length=length: progress(length, done, total))
        with torch.autocast(where, torch.bfloat16, enabled=precision == "bf16"):
            found.append(evaluate(trained.model, test_set, mode, progress=watch))
        if test_set.published not in (None, found[-1].checksum):
            raise RunError(f"the test set of length {length} is not the published one: its checksum is {found[-1].checksum}")
        _write_rows(folder, [found[-1].to_row(seed=trained.config.seed, step=trained.step, precision=precision)])
    return found


def read_evaluation(folder: Path) -> list[dict[str, Any]]:
    """The lines of evaluation.jsonl; none where the run has not been evaluated."""
    path = folder / EVALUATION
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for row in rows:
            _ = [row[name] for name in ("task", "mode", "length", "samples", "exact", "step")]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is malformed ({error!r}); remove it and evaluate again") from None
    return rows


def _write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Adds lines to evaluation.jsonl in place of older ones for the same task, mode and length.

    A line on more samples of the same model stays: a quick look must not cost a thorough one.
    """

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["task"], row["mode"], row["length"]

    kept = {key(row): row for row in read_evaluation(folder)}
    for row in rows:
        older = kept.get(key(row))
        if older is None or older["step"] != row["step"] or older["samples"] <= row["samples"]:
            kept[key(row)] = row
    text = "".join(json.dumps(kept[place]) + "\n" for place in sorted(kept))
    replace_durably(folder / EVALUATION, text.encode())
