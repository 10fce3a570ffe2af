"""Dropout in the Triton kernels, interpreted: the mask of the definition to the bit, and every gradient under it."""

import pytest
import torch
from family import Case, check, draw, run

from compactattn import ALiBi, Allowed, Causal, Padding, attend, operators, parse
from compactattn.dropout import Dropout, draw_seed, factors, foresee
from compactattn.fused import launch
from compactattn.kernels import encode
from compactattn.masks import resolve

pytestmark = [pytest.mark.usefixtures("poisoned"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's

KERNELS = [
    "gaussian", "epanechnikov", "biweight", "entmax(1.7)", "norm_relu", "relumax(r=2, b=2)", "topk_epanechnikov(6)", "ball",
]  # fmt: skip
P = 0.3
NORMAL = Case(1, 2, 1, 18, 20, 5, 3, (16, 16), Causal())


@pytest.mark.parametrize(("blocks", "seed"), [((16, 16), 0), ((32, 64), 12345)])
def test_the_mask_is_that_of_the_definition_to_the_bit(blocks, seed, cut):
    """Equal scores and values one at a time show every weight; nothing in reach is uniform, which is another piece of code."""
    cut(*blocks)
    keys = 35
    q = k = torch.zeros(2, 2, keys, 4)
    v = torch.eye(keys).expand(2, 2, keys, keys).contiguous()
    torch.manual_seed(seed)
    drop = Dropout(P, draw_seed(P, torch.device("cpu")))
    wanted = factors(foresee(drop, 2, 2, keys), slice(0, 2), slice(0, 2), slice(0, keys), slice(0, keys), torch.float32)
    for kernel in ("gaussian", "ball", "norm_relu"):
        torch.manual_seed(seed)
        out = attend(q, k, v, kernel, dropout=P, backend="fused")
        assert torch.equal(out > 0, wanted > 0), kernel
        torch.testing.assert_close(out, wanted / keys)


@pytest.mark.parametrize("kernel", KERNELS)
def test_output_and_every_gradient_agree_with_the_reference(kernel, cut):
    cut(*NORMAL.blocks)
    check(*draw(NORMAL), kernel, NORMAL.mask, dropout=P)


@pytest.mark.parametrize("kernel", ["gaussian", "biweight", "norm_relu"])
def test_half_precision_agrees_with_the_reference(kernel, cut):
    """Where a row has two numbers of its own, keys lie along the first axis of a tile."""
    cut(16, 16)
    case = Case(1, 2, 1, 18, 20, 16, 8, (16, 16), Causal())
    check(*draw(case, torch.float16), kernel, case.mask, dropout=P)


@pytest.mark.parametrize("kernel", ["biweight", "relumax"])
def test_a_bias_and_its_gradient_agree_with_the_reference(kernel, cut):
    cut(16, 16)
    case = Case(2, 1, 1, 18, 20, 5, 3, (16, 16), ALiBi())
    allowed = torch.rand((18, 20), generator=torch.Generator().manual_seed(2)) < 0.7
    bias = torch.randn((1, 1, 18, 20), generator=torch.Generator().manual_seed(1))
    check(*draw(case), kernel, case.mask & Allowed(allowed), bias=bias, dropout=P)


def test_a_learned_alpha_and_its_gradient_agree_with_the_reference(cut):
    cut(16, 16)
    case = Case(1, 2, 1, 10, 18, 5, 3, (16, 16), Causal())
    check(*draw(case), None, case.mask, alpha=torch.tensor([1.2, 1.7]), dropout=P)


@pytest.mark.parametrize("kernel", ["biweight", "relumax"])
def test_skipping_tiles_changes_nothing(kernel, cut, monkeypatch):
    """A tile whose weights are all dropped is not one that holds none: its keys have a gradient."""
    cut(16, 16)
    monkeypatch.setattr(launch, "TRACK_FROM", 1)
    (q, k, v, _), do = draw(Case(1, 1, 1, 10, 60, 16, 16, (16, 16), None))
    check((q, k, v, torch.tensor([3.0])), do, kernel, Causal(1), dropout=0.8)


def test_the_answer_does_not_hang_on_the_tiles_or_the_rest_of_the_batch(cut):
    kernel, (inputs, do) = "norm_relu", draw(Case(2, 1, 1, 20, 20, 8, 8, (0, 0), None))
    found = []
    for blocks in ((16, 16), (32, 32)):
        cut(*blocks)
        found.append(run(inputs, do, kernel, Causal(), "fused", dropout=P))
    for other in found[1:]:
        for name, x in other.items():
            torch.testing.assert_close(x, found[0][name], rtol=1e-4, atol=1e-5)
    first = [x[:1] for x in inputs[:3]] + [inputs[3]]
    alone = run(first, do[:1], kernel, Causal(), "fused", dropout=P)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(alone[name], found[-1][name][:1]), name


def test_a_row_with_no_legal_key_is_zero_with_zero_gradient(cut):
    cut(16, 16)
    inputs, do = draw(Case(1, 1, 1, 18, 18, 4, 4, (16, 16), None))
    for kernel in ("gaussian", "biweight", "norm_relu"):
        found = run(inputs, do, kernel, Causal(1) & Padding([5], queries=[5]), "fused", dropout=P)
        for name in ("out", "dq"):
            assert (found[name][:, :, 0] == 0).all()
            assert (found[name][:, :, 5:] == 0).all()


def test_without_dropout_the_kernels_are_told_so(cut, monkeypatch):
    cut(16, 16)
    told = []
    make = launch.Call.__init__

    def watch(self, *arguments):
        make(self, *arguments)
        told.append(self.constants("DROPS")["DROPS"])

    monkeypatch.setattr(launch.Call, "__init__", watch)
    inputs, do = draw(Case(1, 1, 1, 5, 5, 4, 4, (16, 16), None))
    for rate in (0.0, 0.1):
        run(inputs, do, "biweight", None, "fused", dropout=rate)
    assert told == [False, False, True, True]


def test_opcheck_of_the_fused_operator_with_dropout(cut):
    cut(16, 16)
    (q, k, v, scale), _ = draw(Case(1, 2, 1, 5, 6, 4, 3, (16, 16), None))
    view = resolve(Causal(1), (1, 2, 5, 6), q.device)
    inputs = (q, k, v, scale, view.at, view.lo, view.hi, None, None, None, None, *encode(parse("biweight")))
    torch.library.opcheck(operators.attend_operator, (*inputs, True, True, True, P, torch.tensor(5)))
