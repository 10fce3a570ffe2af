"""The Triton kernels agree with the float64 reference, under Triton's interpreter and in blocks as small as it takes."""

import math

import numpy as np
import pytest
import torch
from family import KERNELS, ONE_OF_EACH_RULE, Case, check, draw, run
from gpu_tests.cases import Case as RandomCase
from gpu_tests.cases import Group, Layout
from gpu_tests.test_numerics import judge_all
from torch.func import grad, jvp, vmap

from compactattn import ALiBi, Causal, Packed, Padding, attend, operators, parse
from compactattn.fused import launch
from compactattn.kernels import encode
from compactattn.masks import resolve

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of log2(0) and inf − inf
]


CASES = {
    "everything": Case(1, 1, 1, 7, 33, 16, 5, (16, 32), None),
    "one key": Case(1, 1, 1, 1, 1, 5, 3, (16, 16), Causal()),
    "causal": Case(1, 1, 1, 33, 33, 5, 16, (32, 32), Causal()),
    "strictly past": Case(1, 2, 1, 33, 33, 40, 7, (64, 64), Causal(offset=1)),
    "more queries than keys": Case(1, 1, 1, 33, 20, 16, 16, (16, 32), Causal(offset=1)),
    "padding": Case(2, 1, 1, 7, 9, 5, 5, (16, 16), Causal() & Padding([0, 6], queries=[7, 5])),
    "padded queries": Case(1, 1, 1, 20, 20, 5, 5, (32, 16), Padding([20], queries=[9])),
    "packed": Case(1, 1, 1, 33, 33, 5, 5, (64, 16), Causal(1) & Packed([3, 0, 21, 9])),
    "alibi": Case(1, 2, 1, 12, 20, 16, 5, (16, 16), Causal() & ALiBi()),
}
# masks and profiles meet in few places: every kernel in two cases, and one of each kind in all
EVERYWHERE = ["gaussian", "biweight", "entmax(1.7)", "norm_relu", "relumax", "topk_epanechnikov(4)"]
PAIRS = [(kernel, case) for kernel in KERNELS for case in CASES if kernel in EVERYWHERE or case in ("alibi", "packed")]


@pytest.mark.parametrize(("kernel", "case"), PAIRS)
def test_output_and_every_gradient_agree_with_the_reference(kernel, case, cut):
    cut(*CASES[case].blocks)
    check(*draw(CASES[case]), kernel, CASES[case].mask)


@pytest.mark.parametrize("mask", [Causal(1), Packed([30, 0, 30], queries=[10, 0, 8])], ids=["strictly past", "packed"])
@pytest.mark.parametrize("kernel", [name for name in KERNELS if not name.startswith("topk")] + ["topk_softmax(3)"])
def test_skipping_tiles_changes_nothing(kernel, mask, cut, monkeypatch):
    """Sharp scores leave many tiles without a weight: they are found, skipped, and not missed."""
    cut(16, 16)
    monkeypatch.setattr(launch, "TRACK_FROM", 1)
    (q, k, v, _), do = draw(Case(1, 1, 1, 18, 60, 16, 16, (16, 16), mask))
    check((q, k, v, torch.tensor([3.0])), do, kernel, mask)


@pytest.mark.parametrize("kernel", ["ball", "rectified(r=3, b=0.3)"])
def test_a_tile_of_rows_that_reach_nothing_is_not_skipped(kernel, cut, monkeypatch):
    """Their weights are uniform, and no tile of theirs is without one."""
    cut(16, 16)
    monkeypatch.setattr(launch, "TRACK_FROM", 1)
    (q, k, v, _), do = draw(Case(1, 1, 1, 2, 100, 16, 16, (16, 16), None))
    q = q.detach().clone()
    q[:] = 1.5 * k.detach()[:, :, 50] / k.detach()[:, :, 50].square().sum()  # the first query finds one key, the second none
    q[:, :, 1] *= 0.1
    check((q, k, v, torch.tensor([1.0])), do, kernel, None)


def test_a_tile_with_the_kth_key_alone_is_not_skipped(cut, monkeypatch):
    """That key weighs nothing and receives what θ does."""
    test_skipping_tiles_changes_nothing("topk_epanechnikov(4)", Causal(1), cut, monkeypatch)


@pytest.mark.parametrize("kernel", ["gaussian", "entmax(1.3)", *ONE_OF_EACH_RULE])
def test_the_shipped_blocks_agree_with_the_reference(kernel):
    case = Case(1, 1, 1, 33, 40, 40, 24, (0, 0), Causal())
    check(*draw(case), kernel, case.mask)


@pytest.mark.parametrize("kernel", ["biweight", "relumax"])
def test_a_wide_head_on_a_gpu_with_little_shared_memory_agrees_with_the_reference(kernel, monkeypatch):
    """Tiles of 32 × 32 and no copies ahead fit its 99 KiB."""
    monkeypatch.setattr(launch, "is_roomy", lambda _: False)
    case = Case(1, 1, 1, 33, 70, 130, 24, (0, 0), Causal())
    cut = launch.choose_cut(case.queries, 256, torch.float16, roomy=False)
    assert {(blocks.m, blocks.n, blocks.stages) for blocks in vars(cut).values()} == {(32, 32, 1)}
    check(*draw(case, torch.float16), kernel, case.mask)


RECTIFIED = [f"rectified(r={r}, b=1)" for r in (1.5, 2, 3)]
HALVES = ["gaussian", *ONE_OF_EACH_RULE, "topk_softmax(9)", *RECTIFIED]


@pytest.mark.parametrize("kernel", HALVES)
def test_half_precision_errs_as_little_as_the_reference(kernel):
    """Weights are rounded to the dtype of the values, as the output is: errors of one size."""
    case = Case(1, 2, 1, 33, 33, 16, 16, (0, 0), Causal())
    check(*draw(case, torch.float16), kernel, case.mask)


PLAIN = ["gaussian", "epanechnikov", "biweight", "triweight", "norm_relu"]  # one multiply-add leads from q·k to their y


@pytest.mark.parametrize("case", [name for name in CASES if name != "one key"])
@pytest.mark.parametrize("kernel", PLAIN)
def test_half_precision_agrees_with_the_reference_in_small_blocks(kernel, case, cut):
    cut(*CASES[case].blocks)
    check(*draw(CASES[case], torch.float16), kernel, CASES[case].mask)


def test_the_centre_of_ds_follows_the_last_step_of_newton(monkeypatch):
    """With the steps of bf16: dq errs by 9e-4 of its size, and by 3e-3 if õ stays where it was."""
    monkeypatch.setitem(launch.TOLERANCES, torch.float16, launch.TOLERANCES[torch.bfloat16])
    (q, k, v, _), do = draw(Case(1, 1, 1, 64, 1024, 64, 64, (0, 0), None), torch.float16)
    inputs = (q, k, v, torch.tensor([0.125]))
    exact = run(inputs, do, "triweight", None, "reference", torch.float64)
    found = run(inputs, do, "triweight", None, "fused")
    assert (found["dq"] - exact["dq"]).norm() < 1.5e-3 * exact["dq"].norm()


@pytest.mark.parametrize("kernel", KERNELS)
def test_tied_scores_agree_with_the_reference(kernel, cut):
    """Whole numbers tie often: the earlier key wins among the k nearest, and tied best keys share a gradient."""
    cut(16, 16)
    case = Case(1, 1, 1, 9, 20, 2, 5, (16, 16), None)
    (q, k, v, _), do = draw(case)
    q, k = (x.detach().clamp(-2, 2).round() for x in (q, k))
    check((q, k, v, torch.ones(1)), do, kernel, case.mask)


BOTH = [(name, torch.float32) for name in KERNELS] + [(name, torch.float16) for name in PLAIN]


@pytest.mark.parametrize(("kernel", "dtype"), BOTH)
def test_a_row_with_no_legal_key_is_zero_with_zero_gradient(kernel, dtype, cut):
    cut(16, 16)
    inputs, do = draw(Case(1, 1, 1, 18, 18, 4, 4, (16, 16), None), dtype)
    lengths = torch.tensor([5])
    found = run(inputs, do, kernel, Causal(1) & Padding(lengths, queries=lengths), "fused")
    for name in ("out", "dq"):
        assert (found[name][:, :, 0] == 0).all()
        assert (found[name][:, :, 5:] == 0).all()
    for name in ("dk", "dv"):
        assert (found[name][:, :, 4:] == 0).all()
    found = run(inputs, do, kernel, Causal(99), "fused")
    assert all((x == 0).all() for x in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kernel", ["gaussian", "epanechnikov", *ONE_OF_EACH_RULE])
def test_padding_may_hold_anything(kernel, dtype, cut):
    cut(16, 16)
    inputs, do = draw(Case(2, 1, 1, 18, 18, 4, 4, (16, 16), None), dtype)
    lengths = torch.tensor([3, 18])
    mask = Causal() & Padding(lengths, queries=lengths)
    clean = run(inputs, do, kernel, mask, "fused")
    dirty = [x.detach().clone() for x in inputs]
    for x in (*dirty[:3], do):
        x[0, :, 3:7], x[0, :, 7:] = math.nan, math.inf
    for name, x in run(dirty, do, kernel, mask, "fused").items():
        assert torch.equal(x, clean[name]), name


@pytest.mark.parametrize("anything", [math.nan, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kernel", ["gaussian", "entmax(1.7)", "topk_softmax(3)", *ONE_OF_EACH_RULE])
def test_a_padded_query_may_hold_anything_beside_live_ones(kernel, dtype, anything, cut):
    """In a tile where every live query sees every key no mask is taken: there the others must not count either."""
    cut(16, 16)
    inputs, do = draw(Case(1, 1, 1, 32, 32, 4, 4, (16, 16), None), dtype)
    mask = Padding([32], queries=[20])
    clean = run(inputs, do, kernel, mask, "fused")
    dirty = [x.detach().clone() for x in inputs]
    for x in (dirty[0], do):
        x[:, :, 20:] = anything
    for name, x in run(dirty, do, kernel, mask, "fused").items():
        assert torch.equal(x, clean[name]), name


@pytest.mark.parametrize("kernel", ["gaussian", "entmax(1.7)", *ONE_OF_EACH_RULE])
def test_the_past_is_bit_identical_whatever_the_future_holds(kernel, cut):
    cut(16, 16)
    (q, k, v, scale), _ = draw(Case(1, 1, 1, 24, 24, 8, 8, (16, 16), None))
    before = attend(q, k, v, kernel, scale=scale, mask=Causal(), backend="fused")[:, :, :19]
    for factor in (0.0, 30.0):
        later = [x.detach().clone() for x in (q, k, v)]
        for x in later:
            x[:, :, 19:] *= factor
        after = attend(*later, kernel, scale=scale, mask=Causal(), backend="fused")[:, :, :19]
        assert torch.equal(after, before)


@pytest.mark.parametrize("kernel", ["gaussian", "truncated_gaussian(1.5)", "margin", "ball", *ONE_OF_EACH_RULE])
def test_a_score_that_is_not_a_number_shows_in_its_row_and_no_other(kernel, cut):
    cut(16, 16)
    (q, k, v, scale), _ = draw(Case(1, 1, 1, 20, 20, 4, 4, (16, 16), None))
    q = q.detach().clone()
    q[0, 0, 7, 1] = math.nan
    out = attend(q, k, v, kernel, scale=scale, mask=Causal(), backend="fused")
    assert out[0, 0, 7].isnan().all()
    assert not out[0, 0, torch.arange(20) != 7].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_readout_is_that_of_the_reference(kernel, dtype, cut):
    cut(32, 16)
    (q, k, v, scale), _ = draw(Case(1, 1, 1, 19, 19, 4, 4, (32, 16), None), dtype)
    ours, theirs = (
        attend(q, k, v, kernel, scale=scale, mask=Causal(1), backend=backend, return_readout=True)[1]
        for backend in ("fused", "reference")
    )
    assert torch.equal(ours.support, theirs.support)
    torch.testing.assert_close(ours.threshold, theirs.threshold, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(ours.bandwidth, theirs.bandwidth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", ["gaussian", "topk_softmax(20)", "truncated_gaussian(60)"])
def test_a_weight_that_vanishes_in_half_precision_is_still_counted_wherever_the_best_key_is(kernel, cut):
    cut(16, 16)
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 40, 4)
    q[..., 0], k[:, :, 0, 0] = 1.0, 50.0
    for keys in (k, k.flip(2)):
        half = [x.half() for x in (q, keys, keys)]
        support = [
            attend(*half, kernel, scale=1.0, backend=one, return_readout=True)[1].support for one in ("fused", "reference")
        ]
        assert torch.equal(*support)


@pytest.mark.parametrize("kernel", ["norm_relu", "rectified(r=2, b=1)", "rectified(r=3, b=1)", "rectified(r=1.5, b=1)"])
def test_the_powers_of_huge_scores_do_not_overflow(kernel, cut):
    cut(16, 16)
    q, k, v = torch.randn(3, 1, 1, 20, 4, generator=torch.Generator().manual_seed(0))
    ours, theirs = (
        attend(1e10 * q, 1e10 * k, v, kernel, scale=1.0, mask=Causal(), backend=one) for one in ("fused", "reference")
    )
    assert theirs.isfinite().all()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 4])
@pytest.mark.parametrize("kernel", ["norm_relu", "rectified(r=2, b=1)", "rectified(r=1.5, b=1)"])
def test_a_fixed_bandwidth_of_few_keys_errs_in_fp32_no_more_than_the_reference(kernel, dim):
    """The gradient of a row with one key in reach is 0, and its slope is r/ρ."""
    group = Group(kernel, "float32", Layout(dim, 8, 2, 1))
    found = judge_all([RandomCase(group, 1, 24, 24, "causal", sharp, seed) for sharp in (3.0, 6.0) for seed in range(4)])
    assert found["cases"] == 8
    assert not found["faults"]


@pytest.mark.parametrize("kernel", ["relumax", "biweight"])
@pytest.mark.parametrize(("dim", "dtype"), [(6, torch.float32), (16, torch.float16)], ids=["loaded", "copied by descriptors"])
def test_strides_do_not_matter(kernel, dim, dtype, cut):
    cut(16, 16)
    tensors = [torch.randn(2, 40, 3, dim).to(dtype) for _ in range(3)]  # (B, T, H, D), as most models hold them
    views = [x.transpose(1, 2).requires_grad_() for x in tensors]
    copies = [x.detach().contiguous().requires_grad_() for x in views]
    found = [attend(*given, kernel, mask=Causal(), backend="fused") for given in (views, copies)]
    assert torch.equal(*found)
    summed = [torch.autograd.grad(out.sum(), given) for out, given in zip(found, (views, copies), strict=True)]
    for ours, theirs in zip(*summed, strict=True):
        assert torch.equal(ours, theirs)
    turned = [torch.randn(1, 2, dim, 9).to(dtype).transpose(2, 3) for _ in range(3)]  # the head dim is not the last in memory
    whole = [x.contiguous() for x in turned]
    assert torch.equal(attend(*turned, kernel, backend="fused"), attend(*whole, kernel, backend="fused"))


def test_a_head_dim_of_one_may_have_any_stride(cut):
    cut(16, 16)
    q, k = (torch.randn(1, 1, 20, 8).half() for _ in range(2))
    v = torch.randn(320).half().as_strided((1, 1, 20, 1), (320, 320, 16, 8))
    assert torch.equal(attend(q, k, v, backend="fused"), attend(q, k, v.contiguous(), backend="fused"))


@pytest.mark.parametrize("kernel", ["epanechnikov", "biweight", "triweight", "relumax(r=2, b=3)"])
def test_large_scores_err_as_little_as_the_reference(kernel, cut):
    """Of 1e4 and more, as sharp heads have them: y is a small difference of large numbers, the same forward and backward."""
    cut(16, 16)
    (q, k, v, _), do = draw(Case(1, 1, 1, 20, 40, 16, 16, (16, 16), Causal()), torch.float16)
    inputs = (10 * q.detach(), 10 * k.detach(), v, torch.tensor([10.0]))
    exact = run(inputs, do, kernel, Causal(), "reference", torch.float64)
    plain, ours = (run(inputs, do, kernel, Causal(), backend) for backend in ("reference", "fused"))
    for name in ("out", "dv"):
        error, allowed = ((x[name] - exact[name]).norm() for x in (ours, plain))
        assert error <= 3 * allowed + 1e-4 * exact[name].norm(), (name, error, allowed)
    for name in ("dq", "dk"):  # nothing but the best key has a weight, and that of each row is 1
        assert exact[name].norm() == 0
        assert ours[name].norm() < 0.01, (name, ours[name].norm())


@pytest.mark.parametrize(
    ("kernel", "keys", "score"), [("epanechnikov", 20, 1.1e6), ("biweight", 450, 3e6), ("triweight", 100, 3e7)]
)
def test_ties_at_scores_whose_rounding_exceeds_the_reach_leave_gradients_finite(kernel, keys, score):
    q, k, v = (
        torch.full((1, 1, 1, 8), 200.0).half(),
        torch.full((1, 1, keys, 8), 200.0).half(),
        torch.randn(1, 1, keys, 8).half(),
    )
    found = run((q, k, v, torch.tensor([score / 320_000])), torch.randn(1, 1, 1, 8).half(), kernel, None, "fused")
    assert all(x.isfinite().all() for x in found.values()), {name: float(x.abs().max()) for name, x in found.items()}


@pytest.mark.parametrize("scale", [1e3, 1e8])
def test_large_scores_of_the_nearest_keys_have_the_weights_of_the_reference(scale, cut):
    cut(16, 16)
    (q, k, v, _), do = draw(Case(1, 1, 1, 20, 20, 8, 8, (16, 16), Causal()), torch.float16)
    inputs = (q, k, v, torch.tensor([scale]))
    exact = run(inputs, do, "topk_softmax(8)", Causal(), "reference", torch.float64)
    plain, ours = (run(inputs, do, "topk_softmax(8)", Causal(), backend) for backend in ("reference", "fused"))
    for name in ("out", "dv"):
        error, allowed = ((x[name] - exact[name]).norm() for x in (ours, plain))
        assert error <= 3 * allowed + 1e-3 * exact[name].norm(), (name, error, allowed)


def test_the_scale_of_a_fixed_bandwidth_errs_as_little_as_the_reference():
    """Of few keys, where nothing averages: dscale was five times as far off while θ and the scores were rounded differently."""
    group = Group("rectified(r=3, b=1)", "float16", Layout(1, 3, 1, 1))
    found = judge_all(RandomCase(group, 1, 9, 9, "all", 3.0, seed) for seed in range(6))
    assert not found["faults"], "\n".join(found["faults"])


@pytest.mark.parametrize("kernel", ["biweight", "relumax"])
def test_a_scale_that_has_vanished_leaves_all_keys_equal(kernel):
    """On a GPU its value is not checked."""
    q, k, v = (torch.randn(1, 1, 20, 8) for _ in range(3))
    view = resolve(None, (1, 1, 20, 20), q.device)
    found, _ = launch.estimate(q, k, v, torch.zeros(1), view, encode(parse(kernel)), None, False, False)
    torch.testing.assert_close(found.out, v.mean(2, keepdim=True).expand_as(v))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap calls the operator once a sample
@pytest.mark.parametrize("kernel", ["gaussian", *ONE_OF_EACH_RULE])
def test_torch_func_finds_the_gradients_of_autograd(kernel, cut):
    cut(16, 16)
    inputs, _ = draw(Case(2, 2, 1, 5, 18, 4, 3, (16, 16), None))

    def loss(q, k, v, scale):
        return attend(q, k, v, kernel, scale=scale, backend="fused").square().sum()

    def by_sample(*given):
        return vmap(lambda *sample: loss(*(x[None] for x in sample[:3]), sample[3]), (0, 0, 0, None))(*given).sum()

    wanted = torch.autograd.grad(loss(*inputs), inputs)
    plain = tuple(x.detach() for x in inputs)
    torch.testing.assert_close(grad(loss, (0, 1, 2, 3))(*plain), wanted)
    torch.testing.assert_close(grad(by_sample, (0, 1, 2))(*plain), wanted[:3])  # vmap hides that they need gradients
    with pytest.raises(NotImplementedError, match="forward-mode"):
        jvp(loss, plain, plain)


def test_no_samples_no_queries_or_no_keys():
    for batch, queries, keys in ((0, 3, 3), (1, 0, 3), (1, 3, 0)):
        inputs, do = draw(Case(batch, 2, 1, queries, keys, 4, 5, (16, 16), None))
        found = run(inputs, do, "biweight", None, "fused")
        assert found["out"].shape == (batch, 2, queries, 5)
        assert all((x == 0).all() for x in found.values())


def test_opcheck_of_the_fused_operator(cut):
    cut(16, 16)
    (q, k, v, scale), _ = draw(Case(1, 2, 1, 5, 6, 4, 3, (16, 16), None))
    view = resolve(Causal(1) & ALiBi(), (1, 2, 5, 6), q.device)
    inputs = (q, k, v, scale, view.at, view.lo, view.hi, None, None, view.slopes, None, *encode(parse("biweight")))
    torch.library.opcheck(operators.attend_operator, (*inputs, True, True))


def test_torch_compile_sees_one_graph(cut):
    cut(16, 16)

    def model(q, k, v, scale):
        return attend(q, k, v, "sparsemax", scale=scale, mask=Causal(1) & ALiBi(), backend="fused").square().sum()

    inputs, _ = draw(Case(1, 2, 1, 9, 9, 4, 3, (16, 16), None))
    eager, compiled = model(*inputs), torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")(*inputs)
    assert torch.equal(compiled, eager)
    for a, b in zip(torch.autograd.grad(eager, inputs), torch.autograd.grad(compiled, inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({name: torch.ones(1, 1, 3, 4, dtype=torch.float64) for name in "qkv"}, "float64"),
    ],
)
def test_fused_refuses_with_the_reason_what_it_cannot_do(change, reason):
    call = {name: torch.ones(1, 1, 3, 4) for name in "qkv"} | {"kernel": "biweight", "mask": None} | change
    with pytest.raises(ValueError) as error:
        attend(**call, backend="fused")
    assert reason in str(error.value)
    assert "choose one of auto, reference" in str(error.value)
    attend(**call)  # the reference does it


def test_fused_on_a_cpu_is_for_the_interpreter_alone(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        attend(*(torch.ones(1, 1, 3, 4) for _ in range(3)), backend="fused")


@pytest.mark.parametrize("scores", [torch.tensor([0.0, -0.0, 1.5, -2.5, 1e-40, -1e30, math.inf, -math.inf, -1e-40])])
def test_the_whole_numbers_of_scores_are_in_their_order(scores):
    bits = scores.where(scores != 0, 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    assert np.array_equal(np.argsort(ordered.numpy(), kind="stable"), np.argsort(scores.numpy(), kind="stable"))
