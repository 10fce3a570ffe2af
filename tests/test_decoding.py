"""decode is attend for a few queries against a cache, and pages skip nothing that weighs anything."""

import math

import pytest
import torch

from compactattn import ALiBi, Allowed, Bias, Causal, Kernel, Packed, Padding, attend, attention, entmax, parse
from compactattn.decoding import PAGE, Pages, bound_pages, choose_pages, decode
from compactattn.fused.decode_launch import Bounds
from compactattn.kernels import RULES
from compactattn.masks import resolve

KERNELS = ["gaussian", "sparsemax", "biweight", "triweight", "entmax(1.7)", "relumax", "norm_relu", "ball", "margin",
           "topk_softmax(3)", "topk_epanechnikov(5)", "truncated_gaussian"]  # fmt: skip


def draw(batch=2, heads=4, key_heads=2, queries=1, keys=300, dim=20, value_dim=12, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, queries, dim), (batch, key_heads, keys, dim), (batch, key_heads, keys, value_dim)
    return tuple(torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes)


def clustered(dtype=torch.float64, keys=1000, **sizes):
    """A cache where each run of 50 keys lies around a point of its own."""
    q, k, v = draw(keys=keys, dtype=torch.float64, **sizes)
    centre = 3 * k[:, :, :: max(1, keys // 20)].repeat_interleave(max(1, keys // 20), 2)[:, :, :keys]
    return tuple(x.to(dtype) for x in (q, centre + 0.1 * k, v))


@pytest.mark.parametrize("kernel", KERNELS)
def test_decode_is_attend_on_the_filled_part_of_each_sample(kernel):
    q, k, v = draw(queries=3)
    for mask in (None, Causal(), Causal(1) & ALiBi()):
        out = decode(q, k, v, kernel, lengths=torch.tensor([300, 131]), mask=mask)
        for b, length in enumerate((300, 131)):
            part = slice(b, b + 1)
            want = attend(q[part], k[part, :, :length], v[part, :, :length], kernel, mask=mask)
            torch.testing.assert_close(out[part], want, rtol=1e-12, atol=1e-12)
        assert torch.equal(decode(q, k, v, kernel, mask=mask), attend(q, k, v, kernel, mask=mask))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_pages_change_nothing_and_the_skipped_hold_no_support(kernel, dtype):
    for inputs in (clustered(dtype), draw(dtype=dtype)):
        q, k, v = inputs
        lengths = [k.shape[2], k.shape[2] // 2 + 3]
        pages = Pages.of(k, lengths)
        out, skipped = decode(q, k, v, kernel, lengths=lengths, scale=1.0, mask=ALiBi(), pages=pages)
        want = decode(q, k, v, kernel, lengths=lengths, scale=1.0, mask=ALiBi())
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out, want, rtol=16 * eps, atol=16 * eps)
        assert skipped.shape == (2, 2)
        if k.shape[2] == 1000 and kernel not in ("gaussian", "norm_relu", "ball"):  # out of reach of some query
            assert skipped.sum() > 0
        if kernel == "gaussian":
            assert skipped.sum() == 0


@pytest.mark.parametrize("kernel", ["sparsemax", "triweight", "relumax", "topk_softmax(4)", "norm_relu"])
def test_a_planted_key_in_a_page_that_was_skipped_is_found(kernel):
    q, k, v = clustered(heads=2, batch=1)
    q = q / q.norm(dim=-1, keepdim=True)
    view = resolve(None, (1, 2, 1, 1000), q.device)
    kind = parse(kernel)
    wanted, _ = choose_pages(q, k, torch.ones(2, dtype=q.dtype), view, Bounds(*vars(Pages.of(k)).values()), kind.rule, kind.r)
    page = int((~wanted[0, 0, 0]).nonzero()[-1])
    k[0, 0, page * PAGE + 7] = 40 * q[0, 0, 0]
    pages = Pages.of(k)
    out, _ = decode(q, k, v, kernel, scale=1.0, pages=pages)
    torch.testing.assert_close(out, attend(q, k, v, kernel, scale=1.0))
    if kernel in ("sparsemax", "triweight", "relumax"):
        torch.testing.assert_close(out[0, 0, 0], v[0, 0, page * PAGE + 7])


@pytest.mark.parametrize("slopes", [None, [0.5, -0.25]])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_no_score_exceeds_the_bound_of_its_page_not_even_by_rounding(dtype, slopes):
    """Pages of one key 64 times over: there the bound is the score, and only the allowance for rounding separates them."""
    q, k, _ = draw(heads=2, key_heads=1, queries=5, keys=40, dim=256, dtype=dtype)
    k = (30 * k).repeat_interleave(PAGE, 2)
    mask = None if slopes is None else ALiBi(slopes)
    view = resolve(mask, (2, 2, 5, 40 * PAGE), q.device)
    scale = torch.tensor([0.3, 1.7], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    bound = bound_pages(q, scale, view, Bounds(*vars(Pages.of(k)).values()))
    work = scale.dtype
    s = (q.to(work) @ k.to(work).mT) * scale[:, None, None]
    if slopes is not None:
        distance = (view.at[0][:, None] - torch.arange(40 * PAGE)).abs()
        s = s - torch.tensor(slopes, dtype=work)[:, None, None] * distance
    best = s.unflatten(-1, (-1, PAGE)).amax(-1)
    assert (best <= bound).all()
    size = q.to(work).abs().sum(-1, keepdim=True) * k.to(work).abs().max() * 1.7
    assert (bound - best <= 1e4 * torch.finfo(work).eps * size).all() or slopes is not None


def test_more_neighbours_than_keys_read_at_first_skip_nothing():
    q, k, v = clustered(batch=1, heads=2)
    out, skipped = decode(q, k, v, "topk_uniform(700)", scale=1.0, pages=Pages.of(k))
    torch.testing.assert_close(out, attend(q, k, v, "topk_uniform(700)", scale=1.0))
    assert (skipped == 0).all()


def test_appended_keys_have_the_bounds_of_the_whole():
    _, k, _ = draw(keys=200)
    lengths = torch.tensor([70, 3])
    pages = Pages.of(torch.nn.functional.pad(k, (0, 0, 0, 56)), lengths)
    for step in range(3):
        new = torch.stack([k[b, :, n + 40 * step : n + 40 * step + 40] for b, n in enumerate(lengths.tolist())])
        pages.append(new)
    for b, n in enumerate((lengths + 120).tolist()):
        want = Pages.of(k[b : b + 1, :, :n])
        used = want.low.shape[2]
        assert torch.equal(pages.low[b : b + 1, :, :used], want.low)
        assert torch.equal(pages.high[b : b + 1, :, :used], want.high)
    assert pages.filled.tolist() == [190, 123]


@pytest.mark.parametrize("kernel", ["sparsemax", "relumax"])
def test_keys_that_were_not_appended_are_always_read(kernel):
    q, k, v = clustered(batch=1)
    pages = Pages.of(k, [500])
    k[0, :, 900] = 50 * q[0, ::2, 0]
    torch.testing.assert_close(decode(q, k, v, kernel, scale=1.0, pages=pages)[0], attend(q, k, v, kernel, scale=1.0))


def test_keys_taken_back_leave_true_bounds():
    q, k, v = clustered(batch=1)
    pages = Pages.of(k)
    pages.filled.clamp_max_(690)
    k[:, :, 690:] = 10 * torch.randn(1, 2, 310, 20, dtype=k.dtype, generator=torch.Generator().manual_seed(1))
    pages.append(k[:, :, 690:])
    out, _ = decode(q, k, v, "biweight", scale=1.0, pages=pages)
    torch.testing.assert_close(out, attend(q, k, v, "biweight", scale=1.0))


def test_a_key_that_is_not_a_number_is_not_skipped():
    q, k, v = clustered(batch=1, heads=2)
    k[0, 0, 333, 3] = math.nan
    out, _ = decode(q, k, v, "sparsemax", scale=1.0, pages=Pages.of(k))
    assert out[0, 0].isnan().all()
    assert not out[0, 1].isnan().any()


def test_learned_alpha_and_allowed_keys_go_through_the_reference():
    q, k, v = clustered()
    alpha = entmax(torch.tensor([1.2, 1.5, 1.9, 2.0], dtype=torch.float64))
    allowed = Allowed(torch.rand(1000, generator=torch.Generator().manual_seed(0)) > 0.5)
    out, _ = decode(q, k, v, alpha, mask=allowed, pages=Pages.of(k))
    torch.testing.assert_close(out, attend(q, k, v, alpha, mask=allowed))


def test_every_rule_has_a_case():
    assert {type(parse(name).rule) for name in KERNELS} == set(RULES.values())
    assert all(isinstance(parse(name), Kernel) for name in KERNELS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": torch.ones(1, 4, 65, 4)}, "130 queries for each key head"),
        ({"lengths": [4]}, "decode key lengths must lie in 0..3"),
        ({"lengths": [1, 2]}, "decode needs 1 key lengths"),
        ({"lengths": [1.5]}, "decode takes whole lengths"),
        ({"lengths": [2], "mask": Causal(start=1)}, "leave out Packed and the start of Causal"),
        ({"lengths": [2], "mask": Packed([3], queries=[1])}, "leave out Packed and the start of Causal"),
        ({"pages": Pages.of(torch.ones(1, 2, 70, 4))}, "pages are those of another cache: (1, 2, 2, 4)"),
        ({"pages": Pages.of(torch.ones(1, 2, 3, 4)), "mask": Bias(torch.zeros(3))}, "a Bias has no bound"),
        ({"backend": "dense"}, "backend='dense' is unknown; choose one of auto, fused, native, reference"),
        ({"k": torch.ones(1, 3, 3, 4)}, "k and v must share heads"),
    ],
)
def test_an_error_says_what_was_given_and_what_to_do(change, said):
    call = {"q": torch.ones(1, 4, 1, 4), "k": torch.ones(1, 2, 3, 4), "v": torch.ones(1, 2, 3, 4)} | change
    with pytest.raises((ValueError, TypeError)) as error:
        decode(**call)
    assert said in str(error.value)


def test_fp32_of_many_rows_is_refused_where_fused_is_asked_for_and_told_by_auto(monkeypatch):
    """As on a GPU: `choose` is told what the kernels lack."""
    told = []
    monkeypatch.setattr(attention, "_choose", lambda backend, q, fused, natively: told.append(fused))
    for queries, dtype in ((8, torch.float32), (10, torch.float32), (10, torch.float16)):
        k = torch.ones(1, 2, 3, 4, dtype=dtype)
        decode(torch.ones(1, 4, queries, 4, dtype=dtype), k, k, backend="reference")
    assert told == ["", "20 queries for each key head, and in fp32 the kernels take 16 (in fp16 or bf16 64)", ""]


def test_pages_speak_of_themselves_and_not_of_their_numbers():
    with pytest.raises(ValueError, match="Pages needs 1 key lengths"):
        Pages.of(torch.ones(1, 2, 70, 4), [1, 2])
    half = "<float32 of shape (1, 2, 2, 4)>"
    assert repr(Pages.of(torch.ones(1, 2, 70, 4))) == f"Pages(low={half}, high={half}, filled=<int32 of shape (1,)>)"


def test_appending_past_the_end_or_other_shapes_is_refused():
    pages = Pages.of(torch.ones(1, 2, 70, 4))
    with pytest.raises(ValueError, match="room for 128"):
        pages.append(torch.ones(1, 2, 59, 4))
    with pytest.raises(ValueError, match="keys must be"):
        pages.append(torch.ones(1, 1, 2, 4))


def test_padding_and_lengths_agree():
    q, k, v = draw()
    assert torch.equal(decode(q, k, v, lengths=[9, 0]), decode(q, k, v, mask=Padding([9, 0])))
    assert (decode(q, k, v, lengths=[9, 0])[1] == 0).all()


def test_a_batch_may_be_empty():
    q, k, v = draw(batch=0)
    assert decode(q, k, v, lengths=[]).shape == (0, 4, 1, 12)
    pages = Pages.of(k, [])
    pages.append(k)
    out, skipped = decode(q, k, v, lengths=[], pages=pages)
    assert (out.shape, skipped.shape) == ((0, 4, 1, 12), (0, 2))


def test_decode_sends_no_gradient():
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (1, 70, 70))
    scale = torch.ones(2, requires_grad=True)
    assert not decode(q, k, v, "entmax15", scale=scale).requires_grad
    out, _ = decode(q, k, v, "entmax15", scale=scale, pages=Pages.of(k.detach()))
    assert not out.requires_grad
