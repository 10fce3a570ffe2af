"""The loss at each position is the mean over windows, whatever the batches, and no large logits are made for it."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from compactattn.data.batches import Batch
from compactattn.evaluation import loss_by_position
from compactattn.evaluation.loss_by_position import PositionLoss, evaluate_positions
from compactattn.models.config import ModelConfig
from compactattn.models.language_model import build

VOCAB, WIDTH = 23, 12


class Windows:
    """Fixed windows; the last positions of every third one do not count, and position 4 never does."""

    def __init__(self, samples=11, width=WIDTH):
        self.samples = samples
        self.tokens = torch.randint(0, VOCAB, (samples, width + 1), generator=torch.Generator().manual_seed(3))
        self.counted = torch.ones(samples, width, dtype=torch.bool)
        self.counted[::3, 7:] = False
        self.counted[:, 4] = False
        self.sizes = []

    def batch(self, first, end):
        tokens, counted = self.tokens[first:end], self.counted[first:end]
        return Batch(tokens[:, :-1], tokens[:, 1:], counted, counted)

    def batches(self, size):
        for first in range(0, self.samples, size):
            batch = self.batch(first, first + size)
            self.sizes.append(len(batch.inputs))
            yield batch

    def __iter__(self):
        raise AssertionError("windows are asked for in batches")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build(ModelConfig(vocab=VOCAB, layers=1, width=16, heads=2, kernel="sparsemax", dropout=0.5)).double()


def expected(model, windows):
    batch = windows.batch(0, windows.samples)
    with torch.no_grad():
        model.eval()
        losses = cross_entropy(model(batch.inputs).transpose(1, 2), batch.targets, reduction="none")
    return (losses * batch.counted).sum(0), batch.counted.sum(0)


@pytest.mark.parametrize("tokens", [1, 3 * WIDTH + 5, None], ids=["one window", "three windows", "all"])
@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "as they come"])
def test_sums_and_counts_are_those_of_the_cross_entropy_in_any_batches(model, tokens, fixed, monkeypatch):
    windows = Windows()
    sums, counts = expected(model, windows)
    monkeypatch.setitem(loss_by_position.CHUNK, "cpu", 5 * VOCAB)
    rows, head = [], model.head
    monkeypatch.setattr(model, "head", lambda hidden: (rows.append(len(hidden)), head(hidden))[1])
    seen = []
    given = windows if fixed else iter([windows.batch(0, 4), windows.batch(4, 11)])
    found = evaluate_positions(model.train(), given, tokens, lambda done, total: seen.append((done, total)))
    np.testing.assert_allclose(found.sums, sums, rtol=1e-12)
    assert found.counts.tolist() == counts.tolist()
    assert (found.windows, found.tokens) == (11, int(counts.sum()))
    assert found.sums.dtype == np.float64
    assert max(rows) == 5  # logits of five tokens at a time
    assert seen[-1] == (11, 11 if fixed else 0)
    if tokens:
        assert max(seen[0]) <= 11
        assert seen[0][0] == max(1, tokens // WIDTH)
    assert model.training  # as it was before


def test_the_loss_is_the_mean_over_tokens_and_not_over_positions(model):
    found = evaluate_positions(model, Windows())
    assert found.loss == pytest.approx(found.sums.sum() / found.counts.sum())
    assert found.loss != pytest.approx(np.nanmean(found.losses), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert math.isnan(found.losses[4])
    assert np.isfinite(np.delete(found.losses, 4)).all()


def test_single_precision_losses_are_summed_in_double():
    model = build(ModelConfig(vocab=VOCAB, layers=1, width=16, heads=2)).eval()
    windows = Windows(samples=64)
    batch = windows.batch(0, 64)
    with torch.no_grad():
        losses = cross_entropy(model(batch.inputs).transpose(1, 2), batch.targets, reduction="none").double()
    found = evaluate_positions(model, windows)
    np.testing.assert_allclose(found.sums, (losses * batch.counted).sum(0), rtol=1e-6)
    assert found.sums.dtype == np.float64


def test_bits_per_byte_are_nats_over_ln_2_and_bytes():
    found = PositionLoss(2, np.array([math.log(2) * 6, math.log(2) * 4]), np.array([2, 2]))
    assert found.bits_per_byte(5) == pytest.approx(2.0)
    with pytest.raises(ValueError) as error:
        found.bits_per_byte(0)
    assert str(error.value) == "text_bytes = 0 must be at least 1: the bytes of the text of all 4 tokens"


def test_smoothing_is_the_moving_average_of_the_tokens_so_far():
    found = PositionLoss(4, np.array([40.0, 8.0, 0.0, 6.0]), np.array([4, 4, 0, 2]))  # means 10, 2, none, 3
    assert found.smoothed(0.0)[:2].tolist() == [10, 2]
    d = 0.5
    expected = [10, (d * 40 + 8) / (d * 4 + 4), (d * 40 + 8) / (d * 4 + 4)]
    expected.append((d**3 * 40 + d**2 * 8 + 6) / (d**3 * 4 + d**2 * 4 + 2))
    assert found.smoothed(d).tolist() == pytest.approx(expected)
    flat = PositionLoss(3, np.full(600, 6.0), np.full(600, 3))
    assert flat.smoothed().tolist() == pytest.approx([2.0] * 600)
    assert found.sums.tolist() == [40, 8, 0, 6]
    for decay in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError):
            found.smoothed(decay)


@pytest.mark.parametrize(("width", "points"), [(1, 1), (128, 128), (129, 65), (512, 128), (1000, 125)])
def test_a_row_holds_at_most_128_points_that_add_up_to_the_whole(width, points):
    counts = np.arange(1, width + 1)
    found = PositionLoss(width, counts * np.linspace(5, 1, width), counts)
    row = json.loads(json.dumps(found.to_row(task="lm", split="simplewiki", step=7)))
    curve = row["by_position"]
    assert len(curve["loss"]) == len(curve["tokens"]) == len(curve["edges"]) - 1 == points
    assert sum(curve["tokens"]) == row["tokens"] == counts.sum()
    assert np.dot(curve["tokens"], curve["loss"]) == pytest.approx(found.total)
    first, end = curve["edges"][-2:]
    assert end == width
    assert curve["loss"][-1] == pytest.approx(found.sums[first:].sum() / counts[first:].sum())
    assert (row["task"], row["split"], row["step"], row["samples"]) == ("lm", "simplewiki", 7, width)
    assert row["loss"] == pytest.approx(found.loss)


def test_a_stretch_without_tokens_has_no_loss_in_the_row():
    row = PositionLoss(1, np.array([2.0, 0.0]), np.array([1, 0])).to_row()
    assert row["by_position"]["loss"] == [2.0, None]


def test_a_loss_beyond_all_numbers_has_an_infinite_perplexity():
    assert PositionLoss(1, np.array([1e4]), np.array([1])).perplexity == math.inf


def test_windows_that_make_no_curve_are_refused(model):
    one, other = Windows(2), Windows(2, width=WIDTH + 1)
    with pytest.raises(ValueError) as error:
        evaluate_positions(model, iter([one.batch(0, 2), other.batch(0, 2)]))
    assert str(error.value) == "a window of 13 tokens came after one of 12; all must be of one width"
    nothing = Windows(2)
    nothing.counted[:] = False
    for given, count in ((nothing, 2), (iter([]), 0)):
        with pytest.raises(ValueError) as error:
            evaluate_positions(model, given)
        assert str(error.value) == f"no token of {count} windows counts; a loss needs at least one"
    with pytest.raises(ValueError) as error:
        evaluate_positions(model, Windows(), tokens_per_batch=0)
    assert "tokens_per_batch = 0" in str(error.value)
