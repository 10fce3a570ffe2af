"""What a query may not see has no effect: empty rows, the future, padding, packed sequences, whatever is masked."""

import math

import pytest
import torch

from attention_cases import KERNELS, draw, gradients
from compactattn import Allowed, Bias, Causal, Packed, Padding, attend, rows, weights


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "mask",
    [
        Padding([0, 0]),
        Padding([5, 5], queries=[0, 0]),
        Causal(offset=99),
        Allowed(torch.zeros(5, dtype=torch.bool)),
        Bias(torch.full((5, 5), -math.inf)),
        Packed([0, 5], queries=[5, 0]),
    ],
    ids=["no keys", "no queries", "out of reach", "forbidden", "-inf bias", "other sequence"],
)
def test_a_row_with_no_legal_key_is_zero_with_zero_gradient(kernel, mask):
    q, k, v = draw(5, 5)
    out, readout = attend(q, k, v, kernel, mask=mask, return_readout=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert (readout.support == 0).all()
    assert (readout.threshold == math.inf).all()
    assert (readout.bandwidth == 0).all()
    for gradient in gradients(out, (q, k, v)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("kernel", KERNELS)
def test_padded_and_first_rows_are_zero_among_live_ones(kernel):
    q, k, v = draw(6, 6)
    out = attend(q, k, v, kernel, mask=Causal(1) & Padding([6, 3], queries=[6, 3]))
    assert (out[:, :, 0] == 0).all()
    assert (out[1, :, 3:] == 0).all()
    assert (out[1, :, 1:3] != 0).any(-1).all()
    dq, dk, dv = gradients(out, (q, k, v))
    assert (dq[:, :, 0] == 0).all()
    for gradient in (dq, dk, dv):
        assert (gradient[1, :, 3:] == 0).all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 3, 4, 0), (0, 5)])
def test_zero_length_rows_give_empty_weights(shape):
    for kernel in KERNELS:
        s = torch.randn(shape, requires_grad=True)
        w = weights(s, kernel)
        assert w.shape == shape
        w.sum().backward()
        assert s.grad.shape == shape


@pytest.mark.parametrize("kernel", KERNELS)
def test_attend_to_no_keys_or_no_queries_at_all(kernel):
    q, k, v = draw(3, 0)
    assert torch.equal(attend(q, k, v, kernel), torch.zeros(2, 4, 3, 5, dtype=torch.float64))
    q, k, v = draw(0, 3)
    assert attend(q, k, v, kernel).shape == (2, 4, 0, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_future_is_invisible_and_the_newest_legal_key_is_not(kernel, offset, dtype, monkeypatch):
    monkeypatch.setattr(rows, "CPU_BLOCK", 600)
    q, k, v = (x.detach() for x in draw(31, 31, dtype=dtype))
    before = attend(q, k, v, kernel, mask=Causal(offset))
    t = 17
    q2, k2, v2 = q.clone(), k.clone(), v.clone()
    q2[:, :, t + 1 :] += 5
    k2[:, :, t + 1 - offset :] *= -7
    v2[:, :, t + 1 - offset :] += 100
    assert torch.equal(attend(q2, k2, v2, kernel, mask=Causal(offset))[:, :, : t + 1], before[:, :, : t + 1])
    k3, v3 = k.clone(), v.clone()
    newest = t - offset
    k3[:, :, newest] = 50 * torch.sign(q[:, ::2, t])  # for one head of each group it is now the best key
    v3[:, :, newest] += 100
    after = attend(q, k3, v3, kernel, mask=Causal(offset))[:, ::2, t]
    assert ((after - before[:, ::2, t]).abs() > 2).all()


@pytest.mark.parametrize("kernel", [*KERNELS, "entmax(1.9)", "entmax(1.3)"])
def test_the_past_is_bit_identical_however_hard_the_future_is(kernel):
    q, k, v = (torch.randn(1, 2, 200, 8) for _ in range(3))
    before = attend(q, k, v, kernel, mask=Causal())[:, :, :151]
    for factor in (0.0, 0.01, 30.0):
        later = [x.clone() for x in (q, k, v)]
        for x in later:
            x[:, :, 151:] *= factor
        assert torch.equal(attend(*later, kernel, mask=Causal())[:, :, :151], before)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_what_is_masked_may_hold_anything(kernel, junk):
    """As in padding that nobody has written to: no output and no gradient may notice."""
    lengths = torch.tensor([3, 7])
    mask = Causal() & Padding(lengths, queries=lengths)
    clean = draw(7, 7)
    dirty = [x.detach().clone() for x in clean]
    for x in dirty:
        x[0, :, 3:] = junk
    dirty = [x.requires_grad_() for x in dirty]
    ours, theirs = attend(*dirty, kernel, mask=mask), attend(*clean, kernel, mask=mask)
    assert torch.equal(ours, theirs)
    for a, b in zip(gradients(ours, dirty), gradients(theirs, clean), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kernel", ["softmax", "sparsemax", "relumax"])
def test_a_value_that_is_not_a_number_shows_in_the_rows_that_use_it_and_no_other(kernel):
    q, k, v = (x.detach() for x in draw(9, 9))
    spoilt = v.clone()
    spoilt[0, 0, 5, 2] = math.nan
    out = attend(q, k, spoilt, kernel, mask=Causal())
    used = torch.zeros(2, 4, 9, dtype=torch.bool)
    used[0, :2] = (
        weights(
            (q @ k.repeat_interleave(2, 1).mT).masked_fill(~torch.ones(9, 9).tril().bool(), -math.inf),
            kernel,
            scale=1 / math.sqrt(6),
        )[0, :2, :, 5]
        > 0
    )
    assert torch.equal(out.isnan().any(-1), used)
    assert torch.equal(out[~used], attend(q, k, v, kernel, mask=Causal())[~used])


@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_sequences_equal_a_loop_over_them(kernel):
    lengths = [5, 1, 0, 9]
    q, k, v = draw(15, 15)
    out = attend(q, k, v, kernel, mask=Causal(1) & Packed(lengths))
    parts = [attend(*part, kernel, mask=Causal(1)) for part in zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)]
    loop = torch.cat(parts, 2)
    torch.testing.assert_close(out, loop, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(gradients(out, (q, k, v)), gradients(loop, (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
