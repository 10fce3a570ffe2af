"""A gap to the paper is of code, of the recipe, of steps, or open: the first that applies."""

import dataclasses

import pytest
from regbench_examples import make_run

from compactattn.report import regbench_status
from compactattn.report.regbench_status import KINDS, REASONS, Status, explain

TRANSFORMER = {"architecture": "transformer", "kernel": "gaussian"}
REPOSITORY = {"rate": 1e-4, "final_rate": 1e-5, "decay": 0.01}


def mosaic(**changes):
    """A run of a Memory Mosaic by the recipe of the paper's repository."""
    return make_run(**REPOSITORY | changes)


def stop(run):
    return dataclasses.replace(run, steps=1000)


def lose_patience(*losses):
    run = mosaic(patience=4)
    return dataclasses.replace(run, steps=155, validations=[(31 * n, loss) for n, loss in enumerate(losses, 1)])


@pytest.mark.parametrize(
    ("run", "kind", "words"),
    [
        (mosaic(), "open", ""),
        (make_run(architecture="mamba"), "open", ""),
        (make_run(architecture="mamba", model={"form": "own"}), "code", regbench_status.BARE),
        (make_run(architecture="gla", model={"form": "own"}), "code", regbench_status.OWN),
        (make_run(architecture="gla"), "open", ""),
        (mosaic(kernel="norm_relu"), "code", "2β⁴cos + 1 − 2β²"),
        (mosaic(kernel="norm_relu", model={"as_released": "efficient"}), "code", "plain path"),
        (mosaic(kernel="norm_relu", model={"as_released": "plain"}), "open", ""),
        (mosaic(model={"start": "former"}), "recipe", "former start"),
        (make_run(**TRANSFORMER), "open", ""),
        (make_run(**TRANSFORMER, model={"attention_dropout": 0.0}), "recipe", "176 and 194"),
        (mosaic(model={"attention_dropout": 0.0}), "open", ""),
        (mosaic(model={"persistent_dropout": 0.0}), "recipe", "persistent weights (0.05"),
        (make_run(), "recipe", "the paper's repository names 0.0001 and 0.01"),
        (mosaic(decay=0.1), "recipe", "(0.0005 and 0.1, 0.0001 and 0.01)"),
        (mosaic(rate=3e-4), "recipe", "no named recipe"),
        (stop(mosaic()), "steps", "stopped"),
        (lose_patience(1.5, 1.9, 1.8, 1.7, 1.6), "steps", "falling"),
        (lose_patience(1.5, 1.9, 1.8, 1.7, 1.75), "open", ""),
        (stop(mosaic(model={"start": "former"})), "recipe", "former start"),
        (stop(mosaic(kernel="norm_relu", model={"start": "former"})), "code", "plain path"),
    ],
)
def test_every_reason_has_its_kind_and_the_first_counts(run, kind, words):
    status = explain([run])
    assert status.kind == kind
    assert words in status.reasons
    assert bool(words) is bool(status.reasons)


def test_all_reasons_of_the_kind_are_told_and_one_seed_is_enough():
    status = explain([mosaic(), mosaic(seed=1, model={"start": "former", "persistent_dropout": 0.0})])
    assert status == Status(
        "recipe", "the former start of the tied embedding; no dropout on persistent weights (0.05 in the paper)"
    )


def test_the_reasons_stand_in_the_order_of_the_kinds_and_marks_differ():
    order = [list(KINDS).index(kind) for _, kind, _ in REASONS]
    assert order == sorted(order)
    assert len({mark for mark, _ in KINDS.values()}) == 4
    assert {"†", "‡", "§"} < {mark for mark, _ in KINDS.values()}
