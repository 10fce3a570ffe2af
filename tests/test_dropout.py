"""Dropout of weights: the mask is a hash of its place, uniform and independent, and attend() is its definition under it."""

import math
from itertools import combinations

import pytest
import torch

from compactattn import Bias, Causal, Padding, attend, attention, dropout, entmax, operators, parse, reference, rows
from compactattn.dropout import Dropout, check_rate, draw_seed, factors, foresee
from compactattn.kernels import RULES, Fixed, encode
from compactattn.masks import resolve

ONE_OF_EACH_RULE = ["sparsemax", "biweight", "entmax(1.7)", "norm_relu", "relumax(2)", "topk_softmax(3)", "gaussian", "ball"]
assert {encode(parse(name))[1] for name in ONE_OF_EACH_RULE} == set(RULES)
P = 0.3


def explicit(drop, *sizes):
    """The whole mask."""
    return factors(foresee(drop, *sizes[:3]), *(slice(0, size) for size in sizes), torch.float64)


def fates(seed, *sizes, p=P):
    return explicit(Dropout(p, torch.tensor(seed)), *sizes)


def drawn_mask(seed, p, *sizes):
    """The mask of the first call of attend() after torch.manual_seed(seed)."""
    torch.manual_seed(seed)
    return explicit(Dropout(p, draw_seed(p, torch.device("cpu"))), *sizes)


# -- the hash ------------------------------------------------------------------------------------


def slowly(seed, b, h, q, k):
    """The hash of one place, in Python's own whole numbers."""

    def stir(x, between=0):
        x = (x ^ x >> 16) * 0xB923E45B % 2**32 ^ between
        x = (x ^ x >> 15) * 0x68BCAD69 % 2**32
        return x ^ x >> 16

    low, high = seed % 2**32, seed >> 32
    before, between = stir(stir(low) ^ high), stir(stir(high ^ 0x5157B373) ^ low)
    for place in (b, h, q):
        before, between = stir(before ^ place), stir(between ^ place)
    return stir((before + k * 0x9E3779B9) % 2**32, between)


def test_the_mask_is_the_hash_that_is_written_down():
    seed = 0x1234567890ABCDEF
    found = fates(seed, 2, 3, 5, 7)
    for b, h, q, k in ((b, h, q, k) for b in range(2) for h in range(3) for q in range(5) for k in range(7)):
        kept = slowly(seed, b, h, q, k) / 2**32 >= P
        assert found[b, h, q, k] == (1 / (1 - P) if kept else 0.0)


def test_a_fate_is_decided_by_all_31_bits_of_that_hash():
    """The last fold of the hash is made on the limit, which shows only where the upper halves of both are the same."""
    rng = torch.Generator().manual_seed(0)
    place = [torch.randint(2**16, (200,), generator=rng) for _ in range(4)]
    seed = torch.randint(2**62, (200,), generator=rng)
    wanted = [slowly(*x) >> 1 << 1 for x in zip(seed.tolist(), *(axis.tolist() for axis in place), strict=True)]
    assert hashes(*place, seed).tolist() == wanted


def test_a_hash_is_uniform():
    """χ² over 256 classes of the upper and of the lower bits, for consecutive keys, queries, heads, samples and seeds."""
    count = 2**16
    line = torch.arange(count)
    for axis in range(5):
        place = [torch.tensor(3)] * 5
        place[axis] = line
        x = hashes(*place)
        for shift in (24, 12, 1):
            classes = torch.bincount(x >> shift & 255, minlength=256).double()
            chi = ((classes - count / 256) ** 2 / (count / 256)).sum()
            assert 255 - 5 * math.sqrt(510) < chi < 255 + 5 * math.sqrt(510), (axis, shift)


def hashes(b, h, q, k, seed):
    """The hash itself: the largest limit at which each place is kept, bit by bit."""
    found = torch.zeros(torch.broadcast_shapes(*(x.shape for x in (b, h, q, k, seed))), dtype=torch.int64)

    class Limited(Dropout):
        limit = None

    drop = Limited(0.5, seed)
    for bit in reversed(range(31)):
        Limited.limit = found + 2**bit
        found += dropout.survives(dropout.foresee_at(drop, b, h, q), k).long() << bit
    return found << 1


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_so_many_weights_are_dropped_as_asked_for(p):
    mask = fates(7, 2, 4, 256, 256, p=p)
    dropped = (mask == 0).double()
    assert abs(dropped.mean() - p) < 4 * math.sqrt(p * (1 - p) / mask.numel())
    for axis in range(4):  # and in no row, column, head or sample more than elsewhere
        others = [other for other in range(4) if other != axis]
        spread = (dropped.mean(others) - p) / math.sqrt(p * (1 - p) / (mask.numel() / mask.shape[axis]))
        assert spread.abs().max() < 5
        assert mask.shape[axis] < 100 or 0.8 < spread.var() < 1.2


def test_neighbours_are_dropped_independently():
    """Of keys, queries, heads, samples and seeds, one apart or a power of two."""
    seeds = torch.stack([fates(seed, 2, 4, 130, 130) for seed in (0, 1, 2**32, 2**32 + 1)])
    z = ((seeds == 0).double() - P) / math.sqrt(P * (1 - P))
    for axis in range(5):
        for step in (1, 2, 64, 128):
            if step < z.shape[axis]:
                rest = z.shape[axis] - step
                product = z.narrow(axis, 0, rest) * z.narrow(axis, step, rest)
                assert abs(product.mean()) * math.sqrt(product.numel()) < 4.5, (axis, step)
    for first, second in combinations(range(5), 2):  # one step along one axis is no step along another
        near, far = (z.narrow(first, at, z.shape[first] - 1) for at in (1, 0))
        size = z.shape[second] - 1
        product = near.narrow(second, 0, size) * far.narrow(second, 1, size)
        assert abs(product.mean()) * math.sqrt(product.numel()) < 4.5, (first, second)
    turned = z * z.transpose(-1, -2)  # query and key changed over
    off = turned[..., ~torch.eye(130, dtype=torch.bool)]
    assert abs(off.mean()) * math.sqrt(off.numel() / 2) < 4.5
    triples = z[..., :-2] * z[..., 1:-1] * z[..., 2:]
    assert abs(triples.mean()) * math.sqrt(triples.numel()) < 4.5


def test_one_bit_of_a_place_flips_every_bit_of_the_hash_half_of_the_time():
    rng = torch.Generator().manual_seed(0)
    count = 4096
    place = [torch.randint(2**16, (count,), generator=rng) for _ in range(4)]
    place.append(torch.randint(2**62, (count,), generator=rng))
    before = hashes(*place)
    for axis, bits in ((0, (0, 3)), (1, (0, 5)), (2, (0, 15)), (3, (0, 7, 15)), (4, (0, 31, 32, 61))):
        for bit in bits:
            moved = [x ^ 1 << bit if own == axis else x for own, x in enumerate(place)]
            flipped = (before ^ hashes(*moved))[:, None] >> torch.arange(1, 32) & 1
            assert (flipped.double().mean(0) - 0.5).abs().max() * 2 * math.sqrt(count) < 5, (axis, bit)


def test_a_block_has_the_mask_of_its_place_in_the_whole():
    drop = Dropout(P, torch.tensor(5))
    whole = explicit(drop, 3, 4, 20, 30)
    part = factors(foresee(drop, 5, 6, 23), slice(1, 3), slice(2, 3), slice(5, 20), slice(11, 29), torch.float64)
    assert torch.equal(part, whole[1:3, 2:3, 5:, 11:29])


# -- attend() under it ---------------------------------------------------------------------------


def draw(queries=7, keys=9, heads=4, key_heads=2, dim=6, value_dim=5):
    rng = torch.Generator().manual_seed(queries)
    shapes = ((2, heads, queries, dim), (2, key_heads, keys, dim), (2, key_heads, keys, value_dim))
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=rng).requires_grad_() for shape in shapes)
    return q, k, v, torch.tensor([0.2, 0.7, 1.0, 2.0], dtype=torch.float64, requires_grad=True)


def dense(q, k, v, scale, kernel, mask, multiplied):
    """attend() by the definition: all weights at once, times the explicit mask."""
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    view = resolve(mask, (batch, heads, queries, keys), q.device)
    k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    s = scale[:, None, None] * (q @ k.mT)
    s = s if view.bias is None else s + view.bias
    position = torch.arange(keys)
    s = s.masked_fill((position < view.lo[:, None, :, None]) | (position >= view.hi[:, None, :, None]), -math.inf)
    perfect = scale[:, None].expand(batch, heads, queries).reshape(-1, 1) if isinstance(kernel.rule, Fixed) else None
    orders = attention._orders(kernel, heads, q)
    if orders is not None:
        orders = orders[:, None].expand(batch, heads, queries).reshape(-1, 1)
    w = operators.weights_operator(s.flatten(0, -2), perfect, orders, *encode(kernel))[0].view_as(s)
    return (w * multiplied) @ v


@pytest.mark.parametrize("kernel", [*ONE_OF_EACH_RULE, "learned"])
def test_attend_is_its_definition_under_the_explicit_mask(kernel, monkeypatch):
    monkeypatch.setattr(rows, "CPU_BLOCK", 20)  # many blocks: samples, heads and queries are all cut
    inputs = [*draw(), torch.randn(1, 4, 7, 9, dtype=torch.float64, requires_grad=True)]
    alpha = torch.tensor([1.2, 1.5, 1.7, 1.9], dtype=torch.float64, requires_grad=True)
    if kernel == "learned":
        inputs.append(alpha)
    multiplied = drawn_mask(3, P, 2, 4, 7, 9)
    q, k, v, scale, bias = inputs[:5]
    mask, made = Causal() & Padding([9, 6]) & Bias(bias), entmax(alpha) if kernel == "learned" else parse(kernel)
    torch.manual_seed(3)
    ours = attend(q, k, v, made, scale=scale, mask=mask, dropout=P)
    theirs = dense(q, k, v, scale, made, mask, multiplied)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    do = torch.randn_like(ours)
    for mine, other in zip(*(torch.autograd.grad(out, inputs, do) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kernel", [*ONE_OF_EACH_RULE, "learned"])
def test_gradcheck_of_every_input(kernel):
    q, k, v, scale = draw(3, 4, dim=2, value_dim=1)
    bias = torch.randn(1, 4, 3, 4, dtype=torch.float64, requires_grad=True)
    alpha = torch.tensor([1.2, 1.5, 1.7, 1.9], dtype=torch.float64, requires_grad=kernel == "learned")

    def call(q, k, v, scale, bias, alpha):
        torch.manual_seed(0)
        made = entmax(alpha) if kernel == "learned" else kernel
        return attend(q, k, v, made, scale=scale, mask=Bias(bias), dropout=P)

    torch.autograd.gradcheck(call, (q, k, v, scale, bias, alpha), fast_mode=True)


@pytest.mark.parametrize("kernel", ["biweight", "norm_relu", "gaussian"])
def test_the_mean_over_seeds_is_the_estimate_without_dropout(kernel):
    """To within what chance allows: each number within five standard errors."""
    q, k, v, scale = (x.detach() for x in draw())
    plain, turns = attend(q, k, v, kernel, scale=scale), 400
    torch.manual_seed(0)
    found = torch.stack([attend(q, k, v, kernel, scale=scale, dropout=P) for _ in range(turns)])
    error = found.std(0) / math.sqrt(turns)
    assert ((found.mean(0) - plain).abs() <= 5 * error + 1e-12).all()
    assert error.max() > 0.01


def test_every_call_draws_anew_and_a_seed_brings_it_back():
    q, k, v, _ = draw()
    torch.manual_seed(1)
    first, second = (attend(q, k, v, dropout=P) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(attend(q, k, v, dropout=P), first)
    assert not torch.equal(first, second)


def test_without_dropout_nothing_is_drawn_and_nothing_changes():
    q, k, v, _ = draw()
    before = torch.get_rng_state()
    assert torch.equal(attend(q, k, v, dropout=0), attend(q, k, v))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sample_keeps_its_mask_whatever_else_is_in_the_batch():
    q, k, v, _ = draw()
    found = []
    for batch, queries, keys in ((2, 7, 9), (1, 7, 9), (1, 5, 6)):
        torch.manual_seed(1)
        mask = Padding(torch.full((batch,), 6))
        found.append(attend(q[:batch, :, :queries], k[:batch, :, :keys], v[:batch, :, :keys], mask=mask, dropout=P)[:1, :, :5])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[2], found[0], rtol=1e-12, atol=1e-12)


def test_support_and_threshold_are_those_before_dropout():
    q, k, v, _ = draw()
    (_, plain), (_, thinned) = (attend(q, k, v, dropout=p, return_readout=True) for p in (0.0, 0.9))
    for mine, other in zip(thinned, plain, strict=True):
        assert torch.equal(mine, other)


def test_a_row_with_no_legal_key_stays_zero_and_a_dropped_value_may_hold_anything():
    q, k, v, _ = (x.detach() for x in draw(9, 9))
    torch.manual_seed(2)
    assert (attend(q, k, v, mask=Causal(1), dropout=P)[:, :, 0] == 0).all()
    dropped = drawn_mask(3, 0.8, 2, 4, 9, 9) == 0
    spoilt = v.clone()
    spoilt[:, :, 4] = math.nan
    torch.manual_seed(3)
    out = attend(q, k, spoilt, "gaussian", dropout=0.8)
    assert torch.equal(out.isnan().all(-1), ~dropped[..., 4])


def test_softmax_with_dropout_goes_the_same_way():
    """As PyTorch's own attention has it: weights, then dropout, then values."""
    q, k, v, _ = draw(key_heads=4)
    multiplied = drawn_mask(4, P, 2, 4, 7, 9)
    torch.manual_seed(4)
    found = attend(q, k, v, "softmax", dropout=P)
    torch.testing.assert_close(found, (torch.softmax(q @ k.mT / math.sqrt(6), -1) * multiplied) @ v)


def test_opcheck_and_one_graph():
    q, k, v, scale = (x.detach().float().requires_grad_() for x in draw(5, 6))
    view = resolve(Causal(1), (2, 4, 5, 6), q.device)
    inputs = (q, k, v, scale, view.at, view.lo, view.hi, None, None, None, None, *encode(parse("biweight")))
    torch.library.opcheck(operators.attend_operator, (*inputs, True, False, True, P, torch.tensor(5)))

    def model(q, k, v, scale):
        return attend(q, k, v, "sparsemax", scale=scale, mask=Causal(), dropout=P).square().sum()

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    found = []
    for function in (model, compiled):
        torch.manual_seed(0)
        out = function(q, k, v, scale)
        found.append((out, *torch.autograd.grad(out, (q, k, v, scale))))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)


def test_the_mask_is_never_held_whole(monkeypatch):
    monkeypatch.setattr(rows, "CPU_BLOCK", 2**10)
    largest = 0

    def watch(*arguments):
        nonlocal largest
        found = factors(*arguments)
        largest = max(largest, found.numel())
        return found

    monkeypatch.setattr(reference, "factors", watch)
    q, k, v = (torch.randn(1, 2, 64, 4, requires_grad=True) for _ in range(3))
    attend(q, k, v, dropout=P, backend="reference").sum().backward()
    assert 0 < largest <= 2**10


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan])
def test_a_rate_that_is_no_probability_below_one_is_refused(p):
    q, k, v, _ = draw()
    with pytest.raises(ValueError) as error:
        attend(q, k, v, dropout=p)
    assert f"dropout = {p!r} must be at least 0 and below 1" in str(error.value)
    with pytest.raises(TypeError, match="dropout must be a number, got str"):
        check_rate("dropout", "0.1")
