"""Exact match of real models on real test sets."""

import pytest
import torch

from compactattn.data.sequences import Sequences, TestSet, choose_task
from compactattn.evaluation.exact_match import MODES, evaluate
from compactattn.models.config import ModelConfig
from compactattn.models.language_model import build

MODELS = {
    "mosaic": {"architecture": "mosaic", "kernel": "sparsemax"},
    "mosaic, alibi": {"architecture": "mosaic", "kernel": "relumax(r=2)", "positions": "alibi"},
    "transformer": {"architecture": "transformer", "kernel": "gaussian", "positions": "alibi"},
}


def make(task, kind):
    config = ModelConfig(vocab=task.vocab, layers=2, width=32, heads=2, slots=8, **MODELS[kind])
    return build(config, seed=3).double()


@pytest.mark.parametrize("kind", MODELS)
def test_teacher_forcing_is_the_arg_max_of_the_full_logits(kind):
    task = choose_task("mqmtar", layout="shared", symbols=4, words=8, queries=2)
    test_set = TestSet(task, 32, samples=40)
    model = make(task, kind)
    batch = next(test_set.batches(40))
    with torch.no_grad():
        right = (model(batch.inputs).argmax(-1) == batch.targets) | ~batch.judged
    match = evaluate(model, test_set, tokens_per_batch=300)
    assert (match.samples, match.tokens) == (40, 40 * 2 * task.width)
    assert match.exact == int(right.all(1).sum())
    assert match.tokens_right == int((right & batch.judged).sum()) > 0


@pytest.mark.parametrize("kind", MODELS)
def test_both_modes_agree_on_what_is_exact_where_every_token_is_judged(kind):
    task = choose_task("reverse", symbols=4)
    stream, test_set = Sequences(task, 0, 2, 4), TestSet(task, 3, samples=100)
    model = make(task, kind)
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    for step in range(80):  # enough to get some answers right, not all
        total, count = model.loss(*stream.batch(32 * step, 32)[:3])
        optimiser.zero_grad()
        (total / count).backward()
        optimiser.step()
    forced, free = (evaluate(model, test_set, mode) for mode in MODES)
    assert 0 < forced.exact < 100
    assert forced.exact == free.exact
    assert forced.tokens_right != free.tokens_right  # one mistake leads to the next in free running alone
    assert forced.checksum == free.checksum == test_set.checksum()
