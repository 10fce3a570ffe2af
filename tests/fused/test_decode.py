"""The decode kernels agree with the float64 reference, under Triton's interpreter and with few scores at once.

Tolerances are measured: an output may err twice as much as the reference in the same dtype, and a few ulp of itself, or
of the fp32 scores where those are large.
"""

import math
from typing import NamedTuple

import pytest
import torch
from family import KERNELS as EVERY_KERNEL
from family import ONE_OF_EACH_RULE

from compactattn import ALiBi, Causal, Mask, Packed, Padding, decoding, parse
from compactattn.decoding import Pages, decode
from compactattn.fused import decode_launch
from compactattn.fused.decode_launch import PAGE
from compactattn.kernels import encode
from compactattn.masks import resolve

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of log2(0) and inf − inf

KERNELS = [*EVERY_KERNEL, "topk_uniform(70)", "topk_rectified(9, r=1.5)"]  # neighbours of several pages


class Case(NamedTuple):
    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    lengths: list[int] | None = None
    mask: Mask | None = None


CASES = {
    "one key": Case(1, 1, 1, 1, 1, 5, 3),
    "one query": Case(2, 1, 1, 1, 197, 16, 5),
    "grouped heads": Case(1, 6, 2, 1, 130, 40, 7, None, ALiBi()),
    "a cache half full": Case(3, 2, 1, 2, 200, 5, 16, [0, 65, 200], Causal() & ALiBi()),
    "strictly past": Case(1, 2, 1, 3, 64, 16, 16, [2], Causal(1)),
    "a window": Case(1, 1, 1, 4, 150, 8, 4, None, Packed([70, 80], queries=[2, 2]) & Padding([140])),
}
# masks and profiles meet in few places: every kernel in two cases, and one of each kind in all
EVERYWHERE = ["gaussian", "biweight", "entmax(1.7)", "norm_relu", "relumax", "topk_softmax(3)"]
PAIRS = [(kernel, case) for kernel in KERNELS for case in CASES if kernel in EVERYWHERE or case in ("one query", "a window")]


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    """Few scores and pages at once, so that small caches take several turns of every loop."""
    monkeypatch.setattr(decode_launch, "SCORES_AT_ONCE", 512)
    monkeypatch.setattr(decode_launch, "PAGES_AT_ONCE", 16)


def draw(case, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    b, h, hk, t, n, d, dv, *_ = case
    q, k, v = (torch.randn(shape, generator=rng).to(dtype) for shape in ((b, h, t, d), (b, hk, n, d), (b, hk, n, dv)))
    return q, k, v, 0.3 + torch.rand(h, generator=rng)


def clustered(case, dtype=torch.float32, seed=0):
    """The keys of a page lie around a point of their own."""
    q, k, v, scale = draw(case, torch.float32, seed)
    centre = 3 * k[:, :, ::PAGE].repeat_interleave(PAGE, 2)[:, :, : k.shape[2]]
    return q.to(dtype), (centre + 0.1 * k).to(dtype), v.to(dtype), scale


def run(inputs, kernel, case, backend, dtype=None, pages=False):
    q, k, v, scale = (x.to(dtype or x.dtype) for x in inputs)
    given = Pages.of(k, case.lengths) if pages else None
    return decode(q, k, v, kernel, scale=scale, lengths=case.lengths, mask=case.mask, backend=backend, pages=given)


def check(inputs, kernel, case, pages=False):
    exact = run(inputs, kernel, case, "reference", torch.float64)
    plain = run(inputs, kernel, case, "reference").double()
    ours = run(inputs, kernel, case, "fused", pages=pages)
    ours, skipped = ours if pages else (ours, None)
    error, allowed = ((x.double() - exact).norm() for x in (ours, plain))
    q, k, _, scale = inputs
    largest = q.norm(dim=-1).max() * k.nan_to_num().norm(dim=-1).max() * scale.max()
    ulp = max(torch.finfo(q.dtype).eps, torch.finfo(torch.float32).eps * float(largest))
    floor = 4 * ulp * exact.norm()
    assert error <= 2 * allowed + floor, f"{error:.2e}, allowed {allowed:.2e}, size {exact.norm():.2e}"
    return skipped


@pytest.mark.parametrize(("kernel", "case"), PAIRS)
def test_decode_agrees_with_the_reference(kernel, case):
    check(draw(CASES[case]), kernel, CASES[case])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", ONE_OF_EACH_RULE)
def test_with_pages_decode_agrees_with_the_reference(kernel, case):
    check(draw(CASES[case]), kernel, CASES[case], pages=True)


@pytest.mark.parametrize("kernel", ["gaussian", *ONE_OF_EACH_RULE])
def test_a_cache_of_many_pages_agrees_with_the_reference(kernel, monkeypatch):
    """More pages than the programs hold at once, and more of them with support than the threshold looks at at once."""
    monkeypatch.setattr(decode_launch, "MOST_SPLITS", 2)
    monkeypatch.setattr(decode_launch, "SCORES_AT_ONCE", 128)
    case = Case(1, 2, 1, 1, 40 * PAGE + 3, 8, 8)
    check(draw(case), kernel, case)
    check(clustered(case), kernel, case, pages=True)


DIRECT = ["gaussian", "norm_relu", "rectified(r=3, b=1)", "rectified(r=1.5, b=1)", "ball"]  # θ is known before any score


@pytest.mark.parametrize("kernel", DIRECT)
def test_one_look_is_all_where_the_threshold_is_known(kernel, monkeypatch, poisoned):
    from compactattn.fused import decode as kernels
    from compactattn.fused import decode_threshold

    for module, name in ((decode_threshold, "find_threshold"), (kernels, "score_pages"), (kernels, "estimate")):
        monkeypatch.setattr(module, name, None)
    for case in CASES.values():
        check(draw(case), kernel, case)


@pytest.mark.parametrize("order", ["rising", "falling", "mixed", "mixed in fp16"])
@pytest.mark.parametrize("kernel", DIRECT)
def test_a_better_key_at_any_place_of_a_long_cache_scales_what_was_summed_before(kernel, order, poisoned):
    """Two splits of 16 pages, whose best keys rise, fall or do both."""
    case = Case(1, 2, 1, 1, 32 * PAGE - 5, 8, 8)
    q, k, v, _ = draw(case)
    place = torch.linspace(-1, 1, case.keys)
    place = {"rising": place, "falling": -place}.get(order, torch.sin(40 * place))
    dtype = torch.float16 if order.endswith("fp16") else torch.float32
    k = k + 4 * place[:, None] * q[:, :1] / q[:, :1].norm()
    check((q.to(dtype), k.to(dtype), v.to(dtype), torch.tensor([0.5, 2.0])), kernel, case)


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("kernel", DIRECT[1:])
def test_nothing_in_reach_is_uniform_and_the_first_key_that_is_takes_all(kernel, pages, poisoned):
    """Of the four rows one has all keys out of reach, the others one key within it: of the first, the middle or the last page.

    All lie in one group, so that a page is read for the row that needs it. Values without weight may hold anything where no row
    of the group has one for them.
    """
    case = Case(1, 4, 1, 1, 34 * PAGE - 7, 4, 3)
    q = torch.eye(4)[None, :, None]
    k = torch.zeros(1, 1, case.keys, 4) - 0.5
    inside = [3, case.keys // 2, case.keys - 1]
    for row, key in enumerate(inside):
        k[0, 0, key, row] = 7.0
    _, _, v, _ = draw(case)
    scale = torch.full((4,), 2.0)
    out = decode(q, k, v, kernel, scale=scale, backend="fused", pages=Pages.of(k) if pages else None)
    out, skipped = out if pages else (out, torch.zeros(1, 1))
    torch.testing.assert_close(out[0, :3, 0], v[0, 0, inside], rtol=0, atol=0)
    torch.testing.assert_close(out[0, 3, 0], v.mean(2)[0, 0], rtol=1e-5, atol=1e-6)
    assert skipped == 0  # for the row that sees nothing in reach
    v[0, 0, [key for key in range(case.keys) if key not in inside]] = math.nan
    given = Pages.of(k) if pages else None
    out = decode(q[:, :1], k, v, kernel, scale=scale[:1], backend="fused", pages=given)
    out, skipped = out if pages else (out, torch.ones(1, 1))
    torch.testing.assert_close(out[0, 0, 0], v[0, 0, 3], rtol=0, atol=0)
    assert skipped > 0


@pytest.mark.parametrize("kernel", DIRECT)
def test_huge_scores_and_a_score_that_is_no_number_stay_in_their_rows(kernel, poisoned):
    """Where the best key rises to 1e30 everything before it vanishes; in fp32, whose products hold such scores."""
    case = Case(1, 3, 1, 1, 40 * PAGE, 8, 8)
    q, k, v, scale = draw(case)
    q[0, 1], q[0, 2, 0, 0] = 0.0, math.nan
    k[0, 0, 1700] = 1e30 * q[0, 0, 0]
    out = decode(q, k, v, kernel, scale=scale, backend="fused")
    want = decode(q, k, v, kernel, scale=scale, backend="reference")
    torch.testing.assert_close(out[0, :2], want[0, :2], rtol=1e-5, atol=1e-6)
    assert out[0, 2].isnan().all()


@pytest.mark.parametrize("kernel", ["ball(0.5)", "rectified(r=2, b=0.5)"])
def test_pages_of_a_fixed_bandwidth_are_skipped_and_hold_no_support(kernel):
    case = Case(1, 1, 1, 1, 40 * PAGE, 16, 8)
    q, k, v, _ = clustered(case)
    q, k = q / q.norm(), k / k.norm(dim=-1, keepdim=True)
    k[0, 0, 20 * PAGE : 21 * PAGE] = q[0, 0] + 0.05 * k[0, 0, 20 * PAGE : 21 * PAGE]
    skipped = check((q, k, v, torch.ones(1)), kernel, case, pages=True)
    assert 30 < skipped < 40


@pytest.mark.parametrize("kernel", ["gaussian", *ONE_OF_EACH_RULE])
def test_half_precision_errs_as_little_as_the_reference(kernel):
    """In fp16: the interpreter multiplies no bf16."""
    case = CASES["grouped heads"]
    for pages in (False, True):
        check(draw(case, torch.float16), kernel, case, pages)


@pytest.mark.parametrize("kernel", KERNELS)
def test_tied_scores_agree_with_the_reference(kernel):
    case = Case(1, 1, 1, 2, 100, 2, 5)
    q, k, v, _ = draw(case)
    inputs = (q.clamp(-2, 2).round(), k.clamp(-2, 2).round(), v, torch.ones(1))
    for pages in (False, True):
        check(inputs, kernel, case, pages)


@pytest.mark.parametrize("kernel", ["epanechnikov", "triweight", "entmax(1.7)", "relumax", "margin", "topk_softmax(3)"])
def test_pages_are_skipped_and_hold_no_support(kernel, monkeypatch):
    monkeypatch.setattr(decode_launch, "MOST_SPLITS", 2)
    case = Case(2, 2, 1, 1, 30 * PAGE, 16, 8, [30 * PAGE, 900])
    inputs = clustered(case)
    skipped = check(inputs, kernel, case, pages=True)
    assert skipped.shape == (2, 1)
    assert (skipped > 0).all()
    assert (skipped < torch.tensor([[30], [15]])).all()
    q, k, _, scale = inputs
    hidden = torch.arange(case.keys) >= torch.tensor(case.lengths)[:, None, None, None]
    s = ((q @ k.mT) * scale[:, None, None]).masked_fill(hidden, -math.inf)
    w = decoding.weigh(s, parse(kernel).rule, parse(kernel).r)[0]
    support = (w > 0).any(1).any(1).unflatten(-1, (-1, PAGE)).any(-1).sum(-1)
    assert (support <= torch.tensor([30, 15]) - skipped[:, 0]).all()


def test_more_neighbours_than_keys_read_at_first_skip_nothing(monkeypatch):
    monkeypatch.setattr(decode_launch, "SCORES_AT_ONCE", 64)  # no padding, which would end in −inf by itself
    case = Case(1, 1, 1, 1, 12 * PAGE, 16, 8)
    assert check(clustered(case), "topk_uniform(100)", case, pages=True) == 0


@pytest.mark.parametrize("kernel", ["epanechnikov", "relumax", "topk_uniform(1)"])
def test_a_planted_key_in_a_page_that_is_skipped_is_found(kernel):
    """The same cache with one more good key, wherever it stands: the pages must not hide it."""
    case = Case(1, 1, 1, 1, 12 * PAGE, 16, 8)
    q, k, v, _ = clustered(case)
    q = q / q.norm()
    for page in (0, 5, 11):
        planted = k.clone()
        planted[0, 0, page * PAGE + 5 * page] = 40 * q[0, 0, 0]
        out, skipped = decode(q, planted, v, kernel, scale=1.0, backend="fused", pages=Pages.of(planted))
        torch.testing.assert_close(out[0, 0, 0], v[0, 0, page * PAGE + 5 * page])
        assert skipped > 0


@pytest.mark.parametrize("kernel", ONE_OF_EACH_RULE)
def test_keys_that_were_not_appended_are_always_read(kernel):
    case = Case(1, 1, 1, 1, 6 * PAGE, 16, 8)
    q, k, v, scale = clustered(case)
    k[0, 0, 64:128] = -q[0, 0, 0]  # nothing here is worth a look
    pages = Pages.of(k, [100])
    k[0, 0, [110, 300]] = 50 * q[0, 0, 0]
    out, _ = decode(q, k, v, kernel, scale=scale, backend="fused", pages=pages)
    torch.testing.assert_close(out, decode(q, k, v, kernel, scale=scale, backend="reference"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["gaussian", *ONE_OF_EACH_RULE])
def test_beyond_its_length_a_cache_may_hold_anything(kernel):
    case = Case(2, 2, 1, 1, 200, 8, 8, [70, 0])
    q, k, v, scale = draw(case)
    clean = run((q, k, v, scale), kernel, case, "fused")
    assert (clean[1] == 0).all()
    for x in (k, v):
        x[0, :, 70:90], x[0, :, 90:], x[1] = math.nan, math.inf, math.nan
    assert torch.equal(run((q, k, v, scale), kernel, case, "fused"), clean)
    assert torch.equal(run((q, k, v, scale), kernel, case, "fused", pages=True)[0], clean)


@pytest.mark.parametrize("kernel", ["gaussian", *ONE_OF_EACH_RULE])
def test_a_value_without_weight_may_hold_anything(kernel):
    case = Case(1, 1, 1, 1, 200, 8, 8)
    q, k, v, scale = draw(case)
    clean = run((q, k, v, scale), kernel, case, "fused")
    w = decoding.weigh((q @ k.mT) * scale[:, None, None], parse(kernel).rule, parse(kernel).r, scale[:, None, None])[0]
    v[0, 0, w[0, 0, 0] == 0] = math.nan
    assert torch.equal(run((q, k, v, scale), kernel, case, "fused"), clean)


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        *((kernel, Case(3, 2, 1, 1, 200, 8, 8)) for kernel in ONE_OF_EACH_RULE),
        *((kernel, Case(2, 1, 1, 1, 32 * PAGE, 8, 8)) for kernel in ("gaussian", "norm_relu")),  # two splits
    ],
)
def test_a_sample_has_the_same_bits_in_any_batch(kernel, case):
    q, k, v, scale = draw(case)
    together = decode(q, k, v, kernel, scale=scale, backend="fused")
    for b in range(case.batch):
        part = slice(b, b + 1)
        assert torch.equal(decode(q[part], k[part], v[part], kernel, scale=scale, backend="fused"), together[part])


@pytest.mark.parametrize("kernel", ["gaussian", "biweight", "norm_relu", "relumax"])
def test_a_query_that_is_not_a_number_shows_in_its_row_and_no_other(kernel):
    q, k, v, scale = draw(Case(1, 2, 1, 2, 130, 8, 8))
    q[0, 1, 1, 3] = math.nan
    for pages in (None, Pages.of(k)):
        out = decode(q, k, v, kernel, scale=scale, backend="fused", pages=pages)
        out = out if pages is None else out[0]
        assert out[0, 1, 1].isnan().all()
        assert not out[0, 0].isnan().any()
        assert not out[0, 1, 0].isnan().any()


def test_strides_do_not_matter():
    k, v = (torch.randn(2, 100, 3, 6).transpose(1, 2) for _ in range(2))  # (B, T, H, D), as most models hold a cache
    q = torch.randn(2, 1, 3, 6).transpose(1, 2)
    want = decode(*(x.contiguous() for x in (q, k, v)), "relumax", backend="fused")
    assert torch.equal(decode(q, k, v, "relumax", backend="fused"), want)
    turned = [x.mT.contiguous().mT for x in (q, k, v)]  # the head dim is not the last in memory
    assert torch.equal(decode(*turned, "relumax", backend="fused"), want)


def test_no_queries_or_no_keys():
    for queries, keys in ((0, 3), (3, 0)):
        q, k, v, _ = draw(Case(1, 2, 1, queries, keys, 4, 5))
        assert torch.equal(decode(q, k, v, backend="fused"), torch.zeros(1, 2, queries, 5))


def test_opcheck_and_one_graph():
    q, k, v, scale = draw(Case(1, 2, 1, 1, 70, 4, 3))
    view = resolve(ALiBi(), (1, 2, 1, 70), q.device)
    bounds = vars(Pages.of(k)).values()
    for given in ((None,) * 3, tuple(bounds)):
        inputs = (q, k, v, scale, view.at, view.lo, view.hi, view.slopes, *given, *encode(parse("biweight")))
        torch.library.opcheck(decoding._decode, inputs)

    def step(q, k, v, lengths):
        return decode(q, k, v, "sparsemax", lengths=lengths, mask=Causal() & ALiBi(), backend="fused")

    lengths = torch.tensor([33])
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, lengths), step(q, k, v, lengths))
