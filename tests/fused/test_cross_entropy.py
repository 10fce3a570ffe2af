"""The fused rows of the loss agree with cross-entropy in float64, under Triton's interpreter."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from compactattn.models import head
from compactattn.models.head import head_loss


def outputs_and_gradients(loss, hidden, weight):
    inputs = [x.detach().requires_grad_() for x in (hidden, weight)]
    total = loss(*inputs)
    return [x.detach().double() for x in (total, *torch.autograd.grad(total * 0.5, inputs))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "words", "size"), [(1, 2, 1.0), (9, 33, 1.0), (5, 5000, 1.0), (7, 40, 300.0)])
def test_the_fused_loss_agrees_with_cross_entropy_in_value_and_every_gradient(tokens, words, size, dtype, monkeypatch):
    monkeypatch.setitem(head.CHUNK, "cpu", 4 * words)  # several chunks
    rng = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn((n, 16), generator=rng) for n in (tokens, words))
    hidden, weight = (hidden * size).to(dtype), weight.to(dtype)
    targets, counted = torch.randint(0, words, (tokens,), generator=rng), torch.rand(tokens, generator=rng) < 0.7
    scale = 0.31

    def definition(hidden, weight):
        # row by row: the product of a chunk adds its terms in another order than that of all rows
        rows = [cross_entropy(h[None] @ weight.T * scale, t[None]) for h, t in zip(hidden, targets, strict=True)]
        return (torch.stack(rows) * counted).sum()

    def loss(hidden, weight):
        return head_loss(hidden, weight, targets, counted, scale)

    want, plain = (
        outputs_and_gradients(definition, hidden.double(), weight.double()),
        outputs_and_gradients(definition, hidden, weight),
    )
    monkeypatch.setattr(head, "fused", lambda hidden: True)
    for mine, theirs, right in zip(outputs_and_gradients(loss, hidden, weight), plain, want, strict=True):
        error, allowed = (mine - right).norm(), (theirs - right).norm()
        assert error <= 2 * allowed + 4 * torch.finfo(dtype).eps * right.norm(), f"{error:.1e}, plain {allowed:.1e}"


def test_without_a_gradient_the_fused_loss_is_the_same(monkeypatch):
    hidden, weight, targets = torch.randn(6, 8), torch.randn(20, 8), torch.randint(0, 20, (6,))
    counted = torch.tensor([1, 1, 0, 1, 1, 0], dtype=torch.bool)
    monkeypatch.setattr(head, "fused", lambda hidden: True)
    want = cross_entropy(hidden @ weight.T * 0.5, targets, reduction="none")[counted].sum()
    torch.testing.assert_close(head_loss(hidden, weight, targets, counted, 0.5), want)
