"""attend() in C: what it returns is the definition's, in output and every gradient, and hangs on nothing else."""

import logging
import os
import subprocess
import sys

import battery
import pytest
import torch
from battery import SHAPES, cases, draw, run, worst_excess

from compactattn import Bias, Causal, Packed, Padding, attend, entmax, operators, parse, weights
from compactattn.attention import BACKENDS
from compactattn.kernels import encode
from compactattn.masks import View, resolve
from compactattn.native import build, launch

ONE_OF_EACH = ["gaussian", "sparsemax", "biweight", "entmax(1.7)", "relumax", "norm_relu", "topk_softmax(3)"]


@pytest.mark.parametrize(("kernel", "shape", "mask", "dropout"), list(cases()))
def test_output_readout_and_gradients_are_those_of_the_definition(kernel, shape, mask, dropout):
    excess, name = battery.check(kernel, shape, mask, dropout)
    assert excess <= 1, name


UNEVEN = [
    "entmax(1.05)", "entmax(1.99999999)", "entmax(r=1e4)", "relumax(2.5)", "rectified(1.5)", "topk_rectified(6, 2.5)",
    "margin(1e-50)", "truncated_gaussian(1e-50)",
]  # fmt: skip


@pytest.mark.parametrize("kernel", [*UNEVEN, "topk_softmax(50)", f"topk_biweight({2**63})"])
def test_powers_that_are_no_whole_numbers_and_large_k(kernel):
    assert worst_excess(draw(SHAPES["long"]), kernel, Causal())[0] <= 1


@pytest.mark.parametrize("kernel", ["gaussian", "relumax"])
def test_sums_over_many_queries_keep_their_digits(kernel):
    inputs = draw((8192, 48, 8, 8, 6, 5))
    assert worst_excess(inputs._replace(do=inputs.do + 1), kernel, None)[0] <= 0.5


@pytest.mark.parametrize("sharp", [1e-3, 30.0, 1e4])
@pytest.mark.parametrize("kernel", ONE_OF_EACH)
def test_flat_and_sharp_scores(kernel, sharp):
    assert worst_excess(draw(SHAPES["long"], sharp=sharp), kernel, Causal(1, start=240))[0] <= 1


@pytest.mark.parametrize("kernel", ["sparsemax", "relumax", "topk_softmax(3)", "topk_biweight(4)", "margin"])
def test_ties_are_broken_as_by_the_definition(kernel):
    inputs = draw((20, 20, 2, 2, 3, 4))
    inputs = inputs._replace(q=(2 * inputs.q).round(), k=(2 * inputs.k).round(), scale=torch.ones(2))
    assert worst_excess(inputs, kernel, Causal())[0] <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once_at_the_end(dtype):
    half = draw(SHAPES["long"], dtype=dtype)
    found = run(half._replace(scale=half.scale.float()), "biweight", Causal())
    whole = run(battery.Inputs(*(x.float() for x in half)), "biweight", Causal())
    assert found["out"].dtype == found["dq"].dtype == dtype
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(found[name], whole[name].to(dtype)), name


@pytest.mark.parametrize("kernel", ONE_OF_EACH)
def test_a_row_hangs_on_no_later_key_and_no_other_row(kernel):
    inputs = draw((70, 70, 2, 1, 16, 8))
    whole = attend(*inputs[:3], kernel, scale=inputs.scale, mask=Causal(), backend="native")
    for n in (1, 33, 66):
        q, k, v = (x[:, :, :n] for x in inputs[:3])
        assert torch.equal(attend(q, k, v, kernel, scale=inputs.scale, mask=Causal(), backend="native"), whole[:, :, :n])
    q, k, v = (x[1:] for x in inputs[:3])
    assert torch.equal(attend(q, k, v, kernel, scale=inputs.scale, mask=Causal(), backend="native"), whole[1:])
    rows = attend(inputs.q[:, :, 5:6], *inputs[1:3], kernel, scale=inputs.scale, mask=Causal(start=5), backend="native")
    assert torch.equal(rows, whole[:, :, 5:6])


@pytest.mark.parametrize("kernel", ONE_OF_EACH)
def test_a_gradient_hangs_on_no_other_sample(kernel):
    inputs = draw((150, 150, 4, 2, 16, 8))
    whole = run(inputs, kernel, Causal())
    alone = run(inputs._replace(**{name: getattr(inputs, name)[1:] for name in ("q", "k", "v", "do")}), kernel, Causal())
    assert all(torch.equal(alone[name], whole[name][1:]) for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("shape", [(70, 70, 4, 2, 16, 8), (300, 300, 1, 1, 16, 8), (700, 700, 4, 2, 16, 8)])
def test_the_number_of_threads_changes_no_bit(shape):
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(run(draw(shape), "biweight", Causal(), dropout=0.2))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_query_that_sees_nothing_returns_zero_and_sends_no_gradient():
    inputs = draw((6, 6, 2, 2, 4, 4))
    found = run(inputs, "biweight", Padding([0, 6]) & Causal(1))
    assert not found["out"][0].any()
    assert not found["out"][1, :, 0].any()
    assert all(not found[name][0].any() for name in ("dq", "dk", "dv"))
    hidden = run(inputs, "biweight", torch.zeros(6, 6, dtype=torch.bool))
    assert not any(hidden[name].any() for name in ("out", "dq", "dk", "dv", "dscale", "support"))


@pytest.mark.parametrize("kernel", ONE_OF_EACH)
def test_what_is_no_number_is_treated_as_by_the_definition(kernel):
    inputs = draw((9, 9, 2, 1, 4, 4))
    for spoil, mask in ((inputs.v, Causal()), (inputs.k, Packed([5, 4])), (inputs.q, Causal())):
        spoil[0, :, 6] = torch.nan
        found, plain = (run(inputs, kernel, mask, backend=backend) for backend in ("native", "reference"))
        assert all(torch.equal(found[name].nan_to_num(7.0), plain[name].nan_to_num(7.0)) for name in found)
        spoil[0, :, 6] = 1.0
    bias = torch.zeros(9, 9)
    bias[4, 2], bias[5, 3] = torch.nan, torch.inf
    wide = torch.zeros(1, 40).index_fill(1, torch.tensor([3]), torch.nan)
    keys = inputs.k[:, :, :1].expand(2, 1, 40, 4)
    assert attend(inputs.q, keys, keys, kernel, mask=Bias(wide), backend="native").isnan().all()
    out = attend(*inputs[:3], kernel, mask=Causal() & Bias(bias), backend="native")
    assert out[:, :, 4].isnan().all()
    torch.testing.assert_close(out[:, :, 5], inputs.v[:, :, 3].expand(2, 2, 4))  # +∞ takes all the weight
    assert out[:, :, 6:].isfinite().all()


def test_gradients_of_torch_func_are_those_of_autograd():
    inputs = draw((6, 6, 2, 1, 4, 4))

    def loss(q, k, v):
        out = attend(q, k, v, "biweight", scale=inputs.scale, mask=Causal(), backend="native")
        return (out * inputs.do).sum()

    found = run(inputs, "biweight", Causal())
    for name, gradient in zip(("dq", "dk", "dv"), torch.func.grad(loss, (0, 1, 2))(*inputs[:3]), strict=True):
        assert torch.equal(gradient, found[name]), name


@pytest.mark.parametrize("kernel", ["biweight", "norm_relu", "topk_softmax(3)"])
def test_opcheck(kernel):
    q, k, v, scale, _ = draw((5, 5, 2, 1, 4, 3))
    view, code = resolve(Causal(), (2, 2, 5, 5), q.device), encode(parse(kernel))
    inputs = [x.requires_grad_() for x in (q, k.mT.contiguous().mT, v, scale)]
    call = (*inputs, view.at, view.lo, view.hi, None, None, None, None, *code, True, False, True, 0.0, None, True)
    torch.library.opcheck(operators.attend_operator, call)
    s = torch.randn(9, 6).T.requires_grad_()
    torch.library.opcheck(operators.weights_operator, (s, torch.ones(6, 1) if code[1] == "fixed" else None, None, *code))


def test_weights_of_transposed_scores_compile():
    s = torch.randn(7, 5, requires_grad=True)
    compiled = torch.compile(lambda x: weights(x, "biweight", dim=0), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(s), weights(s, "biweight", dim=0))
    compiled(s).square().sum().backward()
    found, s.grad = s.grad, None
    weights(s, "biweight", dim=0).square().sum().backward()
    assert torch.equal(found, s.grad)


def test_gradients_of_pieces_fit_a_bound():
    x = torch.empty(1, 1, 1, 128).expand(1, 1, 2**17, 128)
    view = View.everything((1, 1, 512, 2**17), x.device)
    parts = launch.Prepared(x[:, :, :512], x, x, torch.ones(1), view, (2.0, "normalising", 0.0), None).call.parts
    assert 1 <= parts * 4 * 2**17 * 256 <= launch.MOST_PIECE_BYTES


def test_nothing_is_held_for_every_pair_of_a_query_and_a_key():
    length, x = 4096, torch.ones(1, 2, 4096, 8)
    view = View.everything((1, 2, length, length), x.device)
    prepared = launch.Prepared(x, x, x, torch.ones(2), view, (2.0, "normalising", 0.0), None)
    assert sum(kept.numel() for kept in prepared.kept) < 8 * x.numel()


# -- what it has no form of, and machines that cannot compile ------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": torch.ones(1, 2, 3, 4).double()}, "float64 inputs; attend.c takes fp16, bf16, fp32"),
        ({"kernel": entmax(torch.tensor(1.5))}, "alpha is learned"),
        ({"mask": Bias(torch.zeros(3, 3, requires_grad=True))}, "the bias needs a gradient"),
        ({"q": torch.ones(1, 2, 3, 4, device="meta")}, "q is on meta, attend.c runs on a CPU"),
    ],
)
def test_a_call_it_cannot_do_is_refused_with_the_reason_and_left_to_the_reference_by_auto(change, reason):
    call = {"q": torch.ones(1, 2, 3, 4), "kernel": "biweight"} | change
    call |= {name: torch.ones_like(call["q"]) for name in "kv"}
    with pytest.raises(
        ValueError, match=f"backend='native' is not available for this call: .*{reason}; choose one of auto, ref"
    ):
        attend(**call, backend="native")
    assert attend(**call).shape == (1, 2, 3, 4)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A machine that has compiled nothing yet."""
    monkeypatch.setenv("COMPACTATTN_CACHE", str(tmp_path))
    build._find.cache_clear()
    yield tmp_path
    build._find.cache_clear()


def test_the_library_is_compiled_once_and_kept(fresh, caplog):
    with caplog.at_level(logging.INFO, logger="compactattn"):
        build.library()
        build._find.cache_clear()
        build.library()
    assert [record.message.partition(" for")[0] for record in caplog.records] == ["compiling attend.c"]
    assert [path.suffix for path in fresh.iterdir()] == [".so"]


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", r"there is no C compiler \(no-such-compiler\); install one, or name one in CC"),
        ("", r"there is no C compiler \(CC is empty\)"),
        ("false", "the C compiler 'false' fails .*; name another in CC"),
        ("true", "attend.c cannot be compiled, kept or loaded: .*No such file"),
        ("gcc '", "attend.c cannot be compiled, kept or loaded: No closing quotation"),
    ],
)
def test_without_a_compiler_the_reference_does_the_work_and_that_is_said_once(fresh, monkeypatch, caplog, compiler, reason):
    monkeypatch.setenv("CC", compiler)
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match=reason):
        attend(q, q, q, backend="native")
    assert torch.equal(attend(q, q, q), attend(q, q, q, backend="reference"))
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "several times as long" in warnings[0]


def test_a_compiler_that_fails_without_a_word_is_told(fresh, monkeypatch):
    (fresh / "cc").write_text("#!/bin/sh\necho >&2\nexit 3\n")
    (fresh / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(fresh / "cc"))
    assert "fails (exit status 3); name another in CC" in build.lack_library()


def test_a_folder_that_cannot_be_written_is_told(fresh, monkeypatch):
    (fresh / "file").write_text("")
    monkeypatch.setenv("COMPACTATTN_CACHE", str(fresh / "file" / "below"))
    assert "attend.c cannot be compiled, kept or loaded" in build.lack_library()


def test_a_user_without_a_home_still_attends(fresh, monkeypatch):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build, "cache_folder", fail)
    q = torch.randn(1, 2, 5, 4)
    assert torch.equal(attend(q, q, q), attend(q, q, q, backend="reference"))
    assert "home directory" in build.lack_library()


def flip_a_bit(content):
    return content[:20_000] + bytes([content[20_000] ^ 4]) + content[20_001:]


@pytest.mark.parametrize(
    "damage", [lambda content: b"", lambda content: content[:4096], flip_a_bit], ids=["empty", "cut short", "one bit"]
)
def test_a_library_that_was_damaged_is_never_loaded_and_made_again(tmp_path, damage):
    code = "from compactattn.native import build; print(build.lack_library() or build.library().lanes())"
    made = []
    for _ in range(2):
        call = [sys.executable, "-c", code]
        told = subprocess.run(call, capture_output=True, text=True, env=os.environ | {"COMPACTATTN_CACHE": str(tmp_path)})
        assert int(told.stdout) > 0
        (path,) = tmp_path.iterdir()
        made.append(path.read_bytes())
        path.write_bytes(damage(path.read_bytes()))
    assert made[0] == made[1]


def test_every_backend_is_named_in_the_error_of_an_unknown_one():
    q = torch.randn(1, 1, 2, 2)
    with pytest.raises(ValueError, match=", ".join(BACKENDS)):
        attend(q, q, q, backend="cuda")
