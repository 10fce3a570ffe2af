"""A summary says what the weights say: which words were used, how many, how far away, and what is exactly zero."""

import math

import pytest
import torch

from compactattn.attention import Readout
from compactattn.kernels import parse
from compactattn.masks import Allowed, Bias, Causal
from compactattn.memory.inspection import Look, look, summarise
from compactattn.models.config import ModelConfig
from compactattn.models.language_model import build

WORDS = ["the", "cat", "the", "mat"]


def make_look(weights, legal=(0, 1, 2, 3)):
    """A look at weights (H, Q, K); h is 0.5 for the first head, 1.5 for the second, and so on."""
    w = torch.tensor(weights)[None]
    shape = w.shape[:3]
    h = (torch.arange(shape[1]) + 0.5)[None, :, None].expand(shape)
    return Look(w, Readout(torch.zeros(shape), h, (w != 0).sum(-1)), torch.tensor(legal).expand(shape))


NARROW = [[0.0, 0, 0, 0], [1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0.25, 0.75, 0]]  # uses 0, 1, 2, 2 keys of 0, 1, 2, 3
WIDE = [[0.0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0.2, 0.2, 0.6, 0]]  # uses 0, 1, 1, 3


def test_a_head_tells_the_words_it_used_the_heaviest_first_and_no_exact_zero():
    summary = summarise([make_look([NARROW, WIDE])], WORDS)
    assert summary.position == 3
    first, second = summary.heads
    assert [tuple(used) for used in first.used] == [(2, "the", 0.75), (1, "cat", 0.25)]
    assert [used.position for used in second.used] == [2, 0, 1]
    assert [one.used for one in summarise([make_look([NARROW])], WORDS, 0).heads] == [()]
    assert [used.position for used in summarise([make_look([NARROW])], WORDS, -2).heads[0].used] == [0, 1]


def test_zeros_and_keys_are_counted_over_what_a_query_may_see():
    first, second = summarise([make_look([NARROW, WIDE])], WORDS).heads
    assert (first.zeros, second.zeros) == pytest.approx((1 / 6, 1 / 6))
    assert (first.support, second.support) == pytest.approx((5 / 3, 5 / 3))
    denser = summarise([make_look([NARROW], legal=(1, 2, 3, 4))], WORDS).heads[0]
    assert (denser.zeros, denser.support) == pytest.approx((5 / 10, 5 / 4))
    alone = summarise([make_look([[[0.0]]], legal=(0,))], ["the"])
    assert (alone.heads[0].zeros, alone.heads[0].support) == (0, 0)


def test_bandwidth_is_told_at_each_position_that_sees_a_key():
    summary = summarise([make_look([NARROW, WIDE])], WORDS)
    assert math.isnan(summary.heads[1].bandwidth[0])
    assert summary.heads[1].bandwidth[1:].tolist() == [1.5] * 3


def test_layers_are_the_means_of_their_heads():
    dense = [[0.0, 0, 0, 0], [1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.4, 0.3, 0.3, 0]]
    one, two = summarise([make_look([NARROW, dense]), make_look([dense])], WORDS).layers
    assert (one.layer, one.zeros, one.support) == (0, pytest.approx(1 / 12), pytest.approx(11 / 6))
    assert (two.layer, two.zeros, two.support, two.bandwidth) == (1, 0, 2, 0.5)
    assert 0.5 <= one.bandwidth <= 1.5


@pytest.mark.parametrize(
    ("mask", "legal"),
    [
        (None, [4, 4, 4, 4]),
        (Causal(), [1, 2, 3, 4]),
        (Causal(2), [0, 0, 1, 2]),
        (Causal() & Allowed(torch.tensor([True, False, True, True])), [1, 1, 2, 3]),
        (Causal(1) & Bias(torch.tensor([0.0, -math.inf, 1.0, 0.0])), [0, 1, 1, 2]),
    ],
    ids=str,
)
def test_a_look_counts_the_legal_keys_of_every_mask(mask, legal):
    q = torch.nn.functional.normalize(torch.randn(2, 3, 4, 5), dim=-1)
    seen = look(q, q, parse("sparsemax"), torch.full((3,), 9.0), mask)
    assert seen.legal.shape == (2, 3, 4)
    assert seen.legal[1, 2].tolist() == legal
    assert (seen.readout.support <= seen.legal).all()


@pytest.mark.parametrize(("kernel", "dense"), [("sparsemax", False), ("gaussian", True)])
def test_a_dense_kernel_uses_every_word_and_a_compact_one_does_not(kernel, dense):
    model = build(ModelConfig(vocab=9, layers=2, width=16, heads=2, kernel=kernel)).eval()
    tokens = torch.randint(9, (1, 20))
    with torch.no_grad():
        summary = summarise(model.looks(tokens), [str(token) for token in tokens[0].tolist()], 14)
        weights = model.inspect(tokens)[1].weights[0, 0, 14]
    assert [(head.layer, head.head) for head in summary.heads] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for head in summary.heads:
        assert (head.zeros == 0) == dense
        assert (len(head.used) == 14) == dense
        assert sum(used.weight for used in head.used) == pytest.approx(1)
    assert {used.position: used.weight for used in summary.of(1)[0].used} == {
        key: float(w) for key, w in enumerate(weights) if w != 0
    }


def test_looks_are_taken_one_after_another():
    model = build(ModelConfig(vocab=9, layers=3, width=16, heads=2)).eval()
    made, inspect = [], type(model.blocks[0]).inspect

    def watch():
        for block in model.blocks:
            block.inspect = lambda x, block=block: (made.append(1), inspect(block, x))[1]
        for number, seen in enumerate(model.looks(torch.randint(9, (1, 5))), start=1):
            assert len(made) == number  # none is made before it is asked for
            yield seen

    assert len(summarise(watch(), ["a"] * 5).layers) == 3


def test_looks_that_do_not_fit_the_words_are_refused():
    with pytest.raises(ValueError) as error:
        summarise([make_look([NARROW])], WORDS[:3])
    assert str(error.value).startswith("looks at 1 texts of 4 tokens do not fit 3 words; give one text")
    with pytest.raises(ValueError) as error:
        summarise([make_look([NARROW])], WORDS, 4)
    assert str(error.value) == "position 4 is not in a text of 4 words; choose 0 to 3"
