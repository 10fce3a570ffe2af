"""Accuracy and TVD count what they say, at the positions they say, whatever the batch."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from compactattn.data.automata import RegularLanguages
from compactattn.data.regbench import load_regbench
from compactattn.evaluation.predictors import predict_exactly, predict_uniformly
from compactattn.evaluation.regbench import BIN, Score, Tally, evaluate, evaluate_predictor, score

SMALL = RegularLanguages(states=(4, 6), letters=(3, 5), edges=(1, 3), strings=(3, 6), string_length=(1, 20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def small(folder):
    return load_regbench(5, SMALL, validation=5, test=30, folder=folder).test


class Answering(nn.Module):
    """Gives the logits it was built with, one row per example, whatever the batch; finds an example by its tokens."""

    def __init__(self, examples, logits, room=10**9):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.inner = nn.Dropout(0.5)
        self.rows = {row.tobytes(): place for place, row in enumerate(examples.batch(0, examples.samples).inputs.numpy())}
        self.logits, self.room, self.modes = logits, room, set()

    def hidden(self, tokens):
        self.modes.add((self.training, torch.is_inference_mode_enabled()))
        if tokens.numel() > self.room:
            raise torch.cuda.OutOfMemoryError("no room")
        return self.logits[[self.rows[row.tobytes()] for row in tokens.numpy()]]

    def head(self, hidden):
        return hidden


def guess(examples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(examples.samples, examples.width, examples.vocab, generator=generator)


def count_slowly(examples, probabilities):
    """Every position of every example in a loop: (bins, inside, last) as [positions, right, tvd], and the loss."""
    bins = [[0, 0, 0.0] for _ in range(math.ceil(examples.width / BIN))]
    inside, last, loss = [0, 0, 0.0], [0, 0, 0.0], 0.0
    for which in range(examples.samples):
        legal, length = examples.legal(which, 1)[0], int(examples.lengths[which])
        for time in range(length - 1):
            p = [float(x) for x in probabilities[which, time]]
            may = [letter for letter in range(examples.vocab) if int(legal[time]) >> letter & 1]
            q = [1 / len(may) if token in may else 0.0 for token in range(examples.vocab)]
            right = p.index(max(p)) in may
            tvd = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
            target = int(examples.tokens[which, time + 1])
            tallies = [bins[time // BIN]]
            if target != examples.languages.separator:
                tallies.append(inside)
                loss -= math.log(p[target])
            if time == length - 2:
                tallies.append(last)
            for tally in tallies:
                tally[0] += 1
                tally[1] += right
                tally[2] += tvd
    return bins, inside, last, loss / inside[0]


def agrees(tally, expected):
    return [tally.positions, tally.right, pytest.approx(tally.tvd_sum, rel=1e-9)] == expected


def test_the_score_of_a_model_is_that_of_counting_position_by_position(small):
    logits = guess(small)
    found = evaluate(Answering(small, logits), small)
    bins, inside, last, loss = count_slowly(small, logits.double().softmax(-1))
    assert len(found.by_position) == len(bins) > 2
    assert all(agrees(*pair) for pair in zip(found.by_position, bins, strict=True))
    assert agrees(found.inside, inside)
    assert agrees(found.last, last)
    assert agrees(found.every, [sum(column) for column in zip(*bins, strict=True)])
    assert found.loss == pytest.approx(loss, rel=1e-9)
    assert found.every.positions == (small.lengths - 1).sum()
    assert found.last.positions == found.samples == 30
    separators = (small.tokens == small.languages.separator).sum()
    assert found.every.positions - found.inside.positions == separators > 0
    assert (found.split, found.checksum) == ("test", small.checksum())


@pytest.mark.parametrize("kind", ["default", "small"])
def test_the_oracle_is_always_right_and_exactly_on_the_distribution(kind, small, folder):
    examples = small if kind == "small" else load_regbench(5, folder=folder).test
    found = evaluate_predictor(predict_exactly, examples)
    for tally in (found.every, found.inside, found.last, *found.by_position):
        assert (tally.accuracy, tally.tvd) == (1.0, 0.0)
    assert 0 < found.loss < math.log(examples.languages.edges[1])


def test_a_uniform_predictor_has_its_known_score(small):
    found = evaluate_predictor(predict_uniformly, small)
    legal = small.legal(0, small.samples)
    sizes = np.array([int(mask).bit_count() for mask in legal[legal > 0]])
    assert found.every.tvd == pytest.approx(1 - sizes.mean() / small.vocab, rel=1e-12)
    assert found.every.right == (legal & 1).sum()  # a tie goes to letter 0
    assert found.loss == pytest.approx(math.log(small.vocab), rel=1e-12)


@pytest.mark.parametrize("token", ["separator", "padding"])
def test_a_separator_or_padding_is_never_right(small, token):
    logits = torch.zeros(small.samples, small.width, small.vocab)
    logits[:, :, getattr(small.languages, token)] = 50.0
    found = evaluate(Answering(small, logits), small)
    assert found.every.right == found.inside.right == found.last.right == 0
    assert found.every.tvd == pytest.approx(1.0)


@pytest.mark.parametrize("budget", [1, 200, 777, 10**6])
def test_no_size_of_batch_changes_the_score(small, budget):
    logits, done = guess(small), []
    whole = evaluate(Answering(small, logits), small)
    parts = evaluate(Answering(small, logits), small, budget, lambda *counts: done.append(counts))
    assert [(t.positions, t.right) for t in parts.by_position] == [(t.positions, t.right) for t in whole.by_position]
    assert (parts.inside.right, parts.last.right, parts.samples) == (whole.inside.right, whole.last.right, 30)
    assert parts.every.tvd == pytest.approx(whole.every.tvd, rel=1e-12)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    assert done[-1] == (30, 30)


def test_a_batch_that_does_not_fit_is_halved_and_no_example_is_mixed_up(small):
    logits = guess(small)
    model = Answering(small, logits, room=4 * small.width)
    found, whole = evaluate(model, small), evaluate(Answering(small, logits), small)
    assert (found.every.right, found.samples) == (whole.every.right, 30)
    assert found.every.tvd == pytest.approx(whole.every.tvd, rel=1e-12)


def test_the_model_runs_in_evaluation_mode_and_gets_its_flags_back(small):
    model = Answering(small, guess(small)).train()
    model.inner.eval()
    evaluate(model, small)
    assert model.modes == {(False, True)}
    assert (model.training, model.inner.training) == (True, False)


def test_scores_of_parts_add_up_even_if_one_is_longer(small):
    probabilities = guess(small).softmax(-1)
    legal, batch = torch.from_numpy(small.legal(0, 30).astype("int64")), small.batch(0, 30)
    order = np.argsort(small.lengths)
    halves = []
    for rows in (order[:3], order[3:]):
        picked = type(batch)(*(part[rows] for part in batch))
        halves.append(score(probabilities[rows], legal[rows], picked))
    assert len(halves[0].by_position) < len(halves[1].by_position)
    for total in (halves[0] + halves[1], halves[1] + halves[0]):
        whole = score(probabilities, legal, batch)
        assert total.samples == whole.samples
        assert [t.right for t in total.by_position] == [t.right for t in whole.by_position]
        assert total.loss == pytest.approx(whole.loss)


def test_a_row_holds_counts_means_and_what_it_is_told():
    tallies = (Tally(4, 3, 1.0), Tally(2, 0, 1.5))
    found = Score(2, Tally(5, 3, 2.0), Tally(2, 1, 0.5), tallies, 7.5, "test", "1234")
    row = found.to_row(examples=1000, seed=3)
    assert json.loads(json.dumps(row)) == {
        "task": "regbench", "split": "test", "examples": 1000, "samples": 2, "positions": 6, "right": 3, "tvd": 2.5 / 6,
        "inside": {"positions": 5, "right": 3, "tvd": 0.4}, "last": {"positions": 2, "right": 1, "tvd": 0.25},
        "by_position": {"edges": [0, 32, 64], "positions": [4, 2], "right": [3, 0], "tvd": [0.25, 0.75]},
        "loss": 1.5, "checksum": "1234", "seed": 3,
    }  # fmt: skip


def test_an_empty_budget_is_refused(small):
    with pytest.raises(ValueError) as error:
        evaluate(Answering(small, guess(small)), small, tokens_per_batch=0)
    assert str(error.value) == "tokens_per_batch = 0 must be at least 1"
