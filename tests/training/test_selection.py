"""The best validation is kept, and training stops when no better one comes; also after a kill."""

from __future__ import annotations

import shutil

import pytest
import torch
from training_stand_in import Failing, Tiny, lines, result, run

from compactattn.experiments.runs import find_best
from compactattn.training import checkpoint as checkpoints
from compactattn.training.config import TrainingConfig
from compactattn.training.loop import Loop
from compactattn.training.selection import BEST, Selection


def script(losses, weights=None):
    """A validation that returns the given losses in turn, and notes the weights it saw."""
    given = iter(losses)

    def validate(model):
        if weights is not None:
            weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return {"loss": next(given)}

    return validate


def test_the_weights_of_the_lowest_validation_loss_are_kept(tmp_path):
    weights = []
    summary = run(tmp_path, validate=script([3.0, 1.0, 2.0, 1.0], weights), validate_every=3)
    best = checkpoints.load(tmp_path / BEST)
    assert (summary.step, summary.best_step, best.step) == (12, 6, 6)  # of two that are equal the first
    assert all(torch.equal(best.weights[name], weights[1][name]) for name in best.weights)
    assert find_best(tmp_path) == tmp_path / BEST
    assert checkpoints.load(tmp_path).step == 12


def test_a_run_that_keeps_the_last_weights_writes_no_best_ones_and_is_judged_by_the_last(tmp_path):
    summary = run(tmp_path, validate=script([3.0, 1.0, 2.0, 1.0]), validate_every=3, keep="last")
    assert (summary.step, summary.best_step) == (12, 0)
    assert not (tmp_path / BEST).exists()
    assert find_best(tmp_path) == tmp_path
    assert run(tmp_path, resume=True, validate=script([]), validate_every=3, keep="last").best_step == 0
    assert not (tmp_path / BEST).exists()


def test_a_validation_without_a_loss_selects_nothing(tmp_path):
    summary = run(tmp_path, validate=lambda model: {"accuracy": 1.0}, validate_every=3)
    assert summary.best_step == 0
    assert find_best(tmp_path) == tmp_path


def test_training_stops_after_as_many_worse_validations_as_patience_says(tmp_path):
    summary = run(tmp_path, steps=40, validate=script([3.0, 1.0, 2.0, 2.0, 2.0]), validate_every=3, patience=3)
    assert (summary.step, summary.best_step) == (15, 6)
    assert checkpoints.load(tmp_path).step == 15
    again = run(tmp_path, steps=40, resume=True, validate=script([]), validate_every=3, patience=3)  # nothing is left to do
    assert (again.step, again.best_step) == (15, 6)


@pytest.mark.parametrize("killed_at", [4, 6, 7, 9, 14])
def test_a_run_killed_anywhere_selects_as_if_it_had_not_been(tmp_path, killed_at):
    losses = {3: 3.0, 6: 1.0, 9: 2.0, 12: 0.5, 15: 2.0, 18: 2.0, 21: 0.1}
    settings = {"steps": 21, "validate_every": 3, "patience": 2, "checkpoint_every": 4}

    def validate_from(step):
        return script([loss for at, loss in losses.items() if at > step])

    run(tmp_path / "whole", validate=validate_from(0), **settings)
    with pytest.raises(RuntimeError, match="the machine broke"):
        run(tmp_path / "cut", validate=validate_from(0), stream=Failing(8 * killed_at), **settings)
    step = checkpoints.load(tmp_path / "cut").step
    run(tmp_path / "cut", resume=True, validate=validate_from(step), **settings)
    assert result(tmp_path / "cut") == result(tmp_path / "whole")
    assert result_of_best(tmp_path / "cut") == result_of_best(tmp_path / "whole")
    assert lines(tmp_path / "whole")[-1] == {"step": 18, "validation": {"loss": 2.0}}


def test_a_run_killed_between_its_checkpoint_and_the_best_still_has_the_best(tmp_path, monkeypatch):
    settings = {"validate_every": 6, "steps": 12}
    run(tmp_path / "whole", validate=script([1.0, 2.0]), **settings)

    def die(loop):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "save_best", die)
        with pytest.raises(RuntimeError, match="killed"):
            run(tmp_path / "cut", validate=script([1.0]), **settings)
    shutil.rmtree(tmp_path / "cut" / BEST, ignore_errors=True)
    assert find_best(tmp_path / "cut") == tmp_path / "cut"  # for whoever looks before it is resumed
    (tmp_path / "cut" / BEST).mkdir()  # nor is a folder without a checkpoint taken for one
    assert find_best(tmp_path / "cut") == tmp_path / "cut"
    run(tmp_path / "cut", resume=True, validate=script([2.0]), **settings)
    assert find_best(tmp_path / "cut") == tmp_path / "cut" / BEST
    assert result_of_best(tmp_path / "cut") == result_of_best(tmp_path / "whole")


def result_of_best(folder):
    return (folder / BEST / "checkpoint.json").read_bytes()


def test_selection_follows_from_the_metrics_up_to_a_step():
    written = [{"step": 1, "loss": 9.0}, {"step": 2, "validation": {"loss": 2.0}}, {"step": 4, "validation": {"loss": 1.0}}]
    assert Selection.of(written, patience=1, last=3) == Selection(1, 2.0, 2, 0)
    assert not Selection.of(written, patience=1, last=4).exhausted
    for worse in (1.5, None):  # null stands for a loss that was not finite
        later = [*written, {"step": 6, "validation": {"loss": worse}}]
        assert Selection.of(later, patience=1, last=6).exhausted
    assert not Selection.of(later, patience=0, last=6).exhausted


def test_patience_without_validations_is_refused():
    with pytest.raises(ValueError, match="patience = 2 counts validations, but validate_every = 0"):
        TrainingConfig(steps=10, batch=1, patience=2)


def test_dropout_of_the_model_is_the_same_with_and_without_selection(tmp_path):
    run(tmp_path / "without", Tiny())
    run(tmp_path / "with", Tiny(), validate=script([1.0] * 12), validate_every=1)
    without, selected = (checkpoints.load(tmp_path / name).weights for name in ("without", "with"))
    assert all(torch.equal(without[name], selected[name]) for name in without)
