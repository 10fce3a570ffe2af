"""Exact match counts what it says, in both modes, in any batch size, and leaves the model as it was."""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import nn

from compactattn.data.batches import Batch
from compactattn.evaluation.exact_match import MODES, Match, evaluate

VOCAB, SEP = 12, 11


class NamedTask(NamedTuple):
    name: str = "double"


class Doubling:
    """Prompts of six digits and <sep>; the answer is each digit doubled modulo 10. The second answer token is not judged."""

    task, length = NamedTask(), 6

    def __init__(self, samples=20):
        self.samples = samples
        source = torch.randint(10, (samples, 6), generator=torch.Generator().manual_seed(1))
        self.tokens = torch.cat([source, torch.full((samples, 1), SEP), source * 2 % 10], 1)
        self.sizes = []

    def batches(self, size):
        for part in self.tokens.split(size):
            self.sizes.append(len(part))
            counted = torch.zeros(part[:, 1:].shape, dtype=torch.bool)
            counted[:, 6:] = True
            judged = counted.clone()
            judged[:, 7] = False
            yield Batch(part[:, :-1], part[:, 1:], counted, judged)

    def checksum(self):
        return "1234"


class Solver(nn.Module):
    """Solves `Doubling` from its input, but adds `slips[source, position]` to the token it predicts there.

    With `carries` an error in the token before makes the next one wrong too, as a model in free running may.
    """

    def __init__(self, slips=None, carries=False, room=10**9):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.inner = nn.Dropout(0.5)
        self.slips, self.carries, self.room = slips or {}, carries, room
        self.rows = []  # how many rows of logits each call of the head gave
        self.modes = set()

    def predict(self, tokens):
        self.modes.add((self.training, torch.is_inference_mode_enabled()))
        if tokens.numel() > self.room:
            raise torch.cuda.OutOfMemoryError("no room")
        doubled = tokens[:, :6] * 2 % 10
        predicted = tokens.new_zeros(tokens.shape)
        for column in range(6, tokens.shape[1]):
            place = column - 6
            predicted[:, column] = doubled[:, place]
            if self.carries and place:
                predicted[:, column] += tokens[:, column] != doubled[:, place - 1]
        for row, sequence in enumerate(tokens[:, :6].tolist()):
            for (sample, column), slip in self.slips.items():
                if tuple(sequence) == sample and column < tokens.shape[1]:
                    predicted[row, column] += slip
        return predicted % 10

    def hidden(self, tokens):
        return nn.functional.one_hot(self.predict(tokens), VOCAB).float()

    def head(self, hidden):
        self.rows.append(len(hidden))
        return hidden

    def prefill(self, tokens):
        return self.hidden(tokens)[:, -1], tokens

    def step(self, token, cache):
        return self.prefill(torch.cat([cache, token[:, None]], 1))


def slip(test_set, *places):
    return {(tuple(test_set.tokens[sample, :6].tolist()), column): 1 for sample, column in places}


@pytest.mark.parametrize("mode", MODES)
def test_a_perfect_model_is_exact_everywhere(mode):
    match = evaluate(Solver(), Doubling(), mode)
    assert match == Match("double", 6, mode, samples=20, exact=20, tokens=100, tokens_right=100, checksum="1234")
    assert (match.exact_match, match.token_accuracy) == (1.0, 1.0)


@pytest.mark.parametrize("mode", MODES)
def test_one_wrong_token_costs_the_sample_and_only_itself(mode):
    test_set = Doubling()
    match = evaluate(Solver(slip(test_set, (3, 6), (3, 9), (11, 11))), test_set, mode)
    assert (match.exact, match.tokens_right) == (18, 97)


def test_a_position_that_is_not_judged_costs_nothing_by_itself():
    test_set = Doubling()
    model = Solver(slip(test_set, (3, 7)), carries=True)
    assert evaluate(model, test_set, "teacher-forced").exact == 20
    free = evaluate(model, test_set, "free-running")
    assert (free.exact, free.tokens_right) == (19, 96)  # but in free running its error is read on, four times


def test_an_error_is_carried_on_in_free_running_only():
    test_set = Doubling()
    model = Solver(slip(test_set, (5, 8)), carries=True)
    forced, free = (evaluate(model, test_set, mode) for mode in MODES)
    assert forced.exact == free.exact == 19  # what is exact is the same: up to the first error both read the same tokens
    assert (forced.tokens_right, free.tokens_right) == (99, 96)


@pytest.mark.parametrize(("mode", "budget"), [*itertools.product(MODES, [1, 12, 25, 10**6])])
def test_no_size_of_batch_changes_the_counts(mode, budget):
    test_set = Doubling()
    match = evaluate(Solver(slip(test_set, (0, 6), (19, 11))), test_set, mode, tokens_per_batch=budget)
    assert (match.samples, match.exact, match.tokens_right) == (20, 18, 98)
    assert max(test_set.sizes) == max(1, min(20, budget // 12))


def test_logits_exist_at_the_judged_positions_only():
    model, test_set = Solver(), Doubling()
    evaluate(model, test_set, tokens_per_batch=24)
    assert model.rows == [10] * 10


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_does_not_fit_is_halved_until_it_does(mode):
    test_set, done = Doubling(), []
    model = Solver(slip(test_set, (0, 6), (19, 11)), room=3 * 12)
    match = evaluate(model, test_set, mode, progress=lambda *counts: done.append(counts))
    assert (match.samples, match.exact) == (20, 18)
    assert done[-1] == (20, 20)
    pieces = [end - start for (start, _), (end, _) in itertools.pairwise([(0, 20), *done])]
    assert set(pieces) == {1, 2}
    assert done == [(sum(pieces[: end + 1]), 20) for end in range(len(pieces))]


def test_a_single_sample_that_does_not_fit_raises():
    with pytest.raises(torch.cuda.OutOfMemoryError):
        evaluate(Solver(room=5), Doubling())


@pytest.mark.parametrize("mode", MODES)
def test_the_model_runs_in_evaluation_mode_and_gets_its_flags_back(mode):
    model = Solver().train()
    model.inner.eval()
    evaluate(model, Doubling(), mode)
    assert model.modes == {(False, True)}
    assert (model.training, model.inner.training) == (True, False)
    model.room = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        evaluate(model, Doubling(), mode)
    assert (model.training, model.inner.training) == (True, False)


def test_a_row_holds_the_counts_and_what_it_is_told():
    row = evaluate(Solver(), Doubling(3)).to_row(seed=7, step=100)
    assert row == {
        "task": "double", "length": 6, "mode": "teacher-forced", "samples": 3, "exact": 3, "tokens": 15, "tokens_right": 15,
        "checksum": "1234", "seed": 7, "step": 100,
    }  # fmt: skip


def test_an_unknown_mode_or_an_empty_budget_is_refused():
    with pytest.raises(ValueError) as error:
        evaluate(Solver(), Doubling(), "greedy")
    assert str(error.value) == "mode 'greedy' is unknown; choose one of 'teacher-forced', 'free-running'"
    with pytest.raises(ValueError) as error:
        evaluate(Solver(), Doubling(), tokens_per_batch=0)
    assert str(error.value) == "tokens_per_batch = 0 must be at least 1"
