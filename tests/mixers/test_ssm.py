"""S4D, H3 and Mamba: parallel equals recurrent, both equal the papers, and each learns what it is known to learn."""

import copy
import math
from functools import partial

import pytest
import ssm_equations
import ssm_tasks
import torch
from operations import Count, count_training
from torch.nn.functional import pad

from compactattn.mixers import convolution, mamba, selective_scan
from compactattn.mixers.convolution import DiagonalSSM, bands, bilinear, draw_taps, hold, start_inverse
from compactattn.mixers.h3 import H3
from compactattn.mixers.mamba import Mamba
from compactattn.mixers.s4d import S4D
from compactattn.training.config import TrainingConfig
from compactattn.training.optimiser import build_optimiser

WIDTH, CHUNK = 5, 64  # the chunk of convolutions; that of the scan divides it
MIXERS = {
    "s4d": (S4D, 6),
    "h3": (H3, 6),
    "mamba": (Mamba, 3),
    "s4d_benchmark": (partial(S4D, gated=False, start=start_inverse, shared=True), 6),
    "h3_benchmark": (partial(H3, taps=draw_taps, discretise=bilinear), 6),
}
each_mixer = pytest.mark.parametrize("name", MIXERS)


def make(name, dtype=torch.float64):
    kind, state = MIXERS[name]
    return kind(WIDTH, state).to(dtype)


def numbers(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def some_past(mixer, **options):
    """A state that 70 positions leave."""
    past = mixer.recur(numbers(2, 70, WIDTH))[1]
    return tuple(x.detach().requires_grad_(**options) for x in past)


def rebuild(mixer, parts):
    """The mixer's own kind of state."""
    kind = type(mixer.recur(numbers(2, 1, WIDTH))[1])
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def test_the_lengths_of_these_tests_surround_the_chunks():
    assert convolution.CHUNK == CHUNK
    assert CHUNK % selective_scan.CHUNK == 0


@each_mixer
@pytest.mark.parametrize("with_past", [False, True], ids=["fresh", "past"])
@pytest.mark.parametrize("time", [1, 2, 63, 64, 65, 200])
def test_parallel_equals_recurrent_in_answer_state_and_every_gradient(name, time, with_past, monkeypatch):
    monkeypatch.setitem(selective_scan.SLICE, "cpu", 1)  # a slice for each row
    mixer, x = make(name), numbers(2, time, WIDTH).requires_grad_()
    parts = some_past(mixer) if with_past else ()
    past = rebuild(mixer, parts) if with_past else None
    parallel, recurrent = mixer.advance(x, past), mixer.recur(x, past)
    outputs = [(y, *state) for y, state in (parallel, recurrent)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-9, atol=1e-10)
    weights = [torch.randn_like(part) for part in outputs[0]]
    inputs = {"x": x, **{f"past {i}": part for i, part in enumerate(parts)}, **dict(mixer.named_parameters())}
    ours, theirs = (
        torch.autograd.grad(sum((w * part).real.sum() for w, part in zip(weights, out, strict=True)), list(inputs.values()))
        for out in outputs
    )
    for key, mine, other in zip(inputs, ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-8, msg=lambda text, key=key: f"{key}: {text}")


@each_mixer
@pytest.mark.parametrize("cut", [1, 5, 63, 64, 65, 149])
def test_two_pieces_make_the_whole(name, cut):
    mixer, x = make(name), numbers(2, 150, WIDTH)
    whole, last = mixer.advance(x, None)
    first, past = mixer.advance(x[:, :cut], None)
    second, end = mixer.advance(x[:, cut:], past)
    torch.testing.assert_close((torch.cat((first, second), 1), *end), (whole, *last), rtol=1e-10, atol=1e-11)


@each_mixer
def test_generation_step_by_step_goes_on_from_a_parallel_prefix(name):
    mixer, x = make(name), numbers(2, 80, WIDTH)
    (prefix,), past = mixer.features(x[:, :70], None)
    answers = [prefix]
    for t in range(70, 80):
        (y,), past = mixer.features(x[:, t : t + 1], past)
        answers.append(y)
    torch.testing.assert_close(torch.cat(answers, 1), mixer(x), rtol=1e-10, atol=1e-11)


@each_mixer
@pytest.mark.parametrize("at", [30, 64, 100])
def test_no_answer_sees_the_future_not_even_in_its_last_bits(name, at):
    mixer, x = make(name, torch.float32), numbers(2, 150, WIDTH, dtype=torch.float32)
    changed = x.clone()
    changed[:, at:] += 1
    with torch.no_grad():
        before, after = mixer(x), mixer(changed)
    assert torch.equal(before[:, :at], after[:, :at])
    assert not torch.equal(before[:, at], after[:, at])


@each_mixer
def test_the_answers_are_those_of_the_papers_equations(name):
    mixer, x = make(name), numbers(2, 70, WIDTH)
    expected = [torch.from_numpy(getattr(ssm_equations, name)(mixer, row.numpy())) for row in x]
    torch.testing.assert_close(mixer(x).detach(), torch.stack(expected), rtol=1e-9, atol=1e-10)


@each_mixer
def test_training_takes_a_few_operations_for_each_chunk_and_none_for_each_position(name):
    four, five = (count_training(make(name), numbers(1, chunks * CHUNK, WIDTH)) for chunks in (4, 5))
    assert five - four < CHUNK  # measured: 38 of S4D and H3, none of Mamba; by definition every position takes 134 to 277


def scan_inputs(batch=2, time=7, channels=3, states=2):
    shapes = [(batch, time, channels)] * 2 + [(states, channels)] + [(batch, time, states)] * 2 + [(batch, states, channels)]
    inputs = [numbers(*shape) for shape in shapes]
    inputs[1], inputs[2] = inputs[1].abs(), -inputs[2].abs()
    return [x.requires_grad_() for x in inputs]


@pytest.mark.parametrize("room", [1, 2**22], ids=["row by row", "at once"])
@pytest.mark.parametrize("time", [1, 6, 7])
def test_the_selective_scan_passes_gradcheck(time, room, monkeypatch):
    monkeypatch.setattr(selective_scan, "CHUNK", 3)
    monkeypatch.setitem(selective_scan.SLICE, "cpu", room)
    assert torch.autograd.gradcheck(selective_scan.selective_scan, scan_inputs(3, time))


def test_the_loops_of_the_selective_scan_take_no_more_turns_for_more_positions():
    calls = []
    for chunks in (4, 5):
        u, *rest = (x.detach() for x in scan_inputs(time=chunks * selective_scan.CHUNK))
        with Count() as count:  # of what the operators do, which are one operation each to those who call them
            y, last, entering = selective_scan._scan._init_fn(u, *rest)
            selective_scan._scan_backward._init_fn(y, last, entering, u, *rest[:4])
        calls.append(count.calls)
    assert calls[1] - calls[0] < selective_scan.CHUNK  # measured: 2


def test_the_selective_scan_is_a_sound_operator_for_compilers():
    inputs = [x.detach() for x in scan_inputs(time=70)]
    torch.library.opcheck(selective_scan._scan, tuple(inputs), test_utils=("test_schema", "test_faketensor"))


def test_the_selective_scan_stays_finite_when_every_state_is_forgotten_at_once():
    u, step, rates, b, c, state = (x.detach().float().requires_grad_() for x in scan_inputs(time=100))
    y, last = selective_scan.selective_scan(u, (step + 1) * 1e4, rates - 0.1, b, c, state)
    gradients = torch.autograd.grad(y.sum() + last.sum(), (u, step, rates, b, c, state))
    assert all(torch.isfinite(x).all() for x in (y, last, *gradients))
    torch.testing.assert_close(y, (b * c).sum(-1, keepdim=True) * u)


def test_the_selective_scan_stores_nothing_of_the_size_of_all_states(monkeypatch):
    monkeypatch.setitem(selective_scan.SLICE, "cpu", 1)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        selective_scan.selective_scan(*scan_inputs(4, 256, 8, 16))
    assert 0 < max(saved) <= 4 * 256 * 16 < 4 * 256 * 8 * 16


@pytest.mark.parametrize("asked", [0, 1], ids=["answers", "last state"])
def test_one_output_of_the_selective_scan_may_be_all_that_has_a_gradient(asked):
    inputs = scan_inputs(time=70)
    outputs = selective_scan.selective_scan(*inputs)
    alone = torch.autograd.grad(outputs[asked].square().sum(), inputs, retain_graph=True)
    both = torch.autograd.grad(outputs[asked].square().sum() + 0 * outputs[1 - asked].sum(), inputs)
    torch.testing.assert_close(alone, both, rtol=0, atol=0)


def test_no_zeros_are_made_for_the_gradient_of_states_that_enter_chunks():
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, given=(), options=None):
            out = function(*given, **(options or {}))
            if "zeros" in str(function) and isinstance(out, torch.Tensor):
                seen.append(tuple(out.shape))
            return out

    inputs = scan_inputs(time=70)
    loss = selective_scan.selective_scan(*inputs)[0].sum()
    with Watch():
        loss.backward()
    assert (2, 2, 3) in seen  # of the last state
    assert (2, 3, 2, 3) not in seen


def test_bands_hold_the_taps_last_one_first():
    taps = torch.tensor([[1.0, 2.0, 3.0]])
    expected = torch.stack([pad(taps[0].flip(0), (i, 3 - i)) for i in range(4)])
    assert torch.equal(bands(taps, 4)[0], expected)


@each_mixer
def test_under_bf16_autocast_the_memory_is_kept_in_fp32(name):
    mixer, x = make(name, torch.float32), numbers(2, 70, WIDTH, dtype=torch.float32)
    exact, _ = mixer.advance(x, None)
    with torch.autocast("cpu", torch.bfloat16):
        rough, past = mixer.advance(x, None)
        for _ in range(2):
            y, past = mixer.step(x[:, 0], past)
    assert all(part.dtype in (torch.float32, torch.complex64) for part in past)
    torch.testing.assert_close(rough.float(), exact, rtol=0, atol=0.05 * exact.abs().max().item())
    (rough.float().square().sum() + y.float().sum()).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in mixer.parameters())


@each_mixer
def test_convolutions_and_scans_are_left_alone_by_autocast(name, monkeypatch):
    mixer, x = make(name, torch.float32), numbers(2, 70, WIDTH, dtype=torch.float32).bfloat16().float()
    if not name.startswith(
        "s4d"
    ):  # projections that are exact in bf16, so that all that follows must be the same to the last bit
        torch.nn.init.dirac_(mixer.to_inputs.weight.data[..., None])
        mixer.to_inputs.weight.data += mixer.to_inputs.weight.data.roll(WIDTH, 0) + mixer.to_inputs.weight.data.roll(
            2 * WIDTH, 0
        )
    if name.startswith("h3"):
        torch.nn.init.zeros_(mixer.to_inputs.bias)
    seen = []
    if name == "mamba":
        torch.nn.init.zeros_(mixer.to_selection.weight)
        monkeypatch.setattr(mamba, "selective_scan", lambda u, *rest: seen.append(u) or (u, rest[-1]))
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            seen.extend(mixer.advance(x, None)[1])
    half = len(seen) // 2
    assert all(torch.equal(plain, cast) for plain, cast in zip(seen[:half], seen[half:], strict=True))
    assert seen[-1 if name != "mamba" else half].abs().max() > 0


@each_mixer
def test_the_pace_of_a_state_never_decays_in_training(name):
    mixer = make(name, torch.float32)
    before = copy.deepcopy(mixer.state_dict())
    optimiser = build_optimiser(mixer, TrainingConfig(steps=10, batch=1, decay=0.5, rate=0.1))
    for parameter in mixer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    still = {key.rpartition(".")[2] for key, value in mixer.state_dict().items() if torch.equal(value, before[key])}
    paces = {"step_bias", "log_rate"} if name == "mamba" else {"log_step", "log_rate", "frequency"}
    assert paces | {"skip"} <= still
    assert "weight" not in still
    assert not any(parameter.is_complex() for parameter in mixer.parameters())


@each_mixer
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks activations for it
def test_a_mixer_compiles_into_one_graph_with_its_gradients(name):
    torch.compiler.reset()
    mixer, x = make(name, torch.float32), numbers(2, 40, WIDTH, dtype=torch.float32)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    parameters = list(mixer.parameters())
    plain, traced = mixer(x), compiled(x)
    want, got = (torch.autograd.grad(y.square().sum(), parameters) for y in (plain, traced))
    torch.testing.assert_close((traced, *got), (plain, *want))


def test_the_mixers_start_as_published():
    s4d, selective = S4D(2000, 64), Mamba(1000)
    for steps in (s4d.diagonal.log_step.exp(), torch.nn.functional.softplus(selective.step_bias)):
        assert 0.001 * 0.999 <= steps.min() < 0.0015
        assert 0.098 < steps.max() <= 0.1 * 1.001
        assert steps.log().mean().item() == pytest.approx(torch.tensor(0.01).log().item(), rel=0.05)
    assert torch.equal(s4d.diagonal.frequency.view(2000, 32)[7], torch.pi * torch.arange(32))
    torch.testing.assert_close(s4d.diagonal.log_rate.exp(), torch.full((2000 * 32,), 0.5))
    torch.testing.assert_close(selective._rates()[:, 3], -torch.arange(1.0, 17))
    assert selective.to_step.weight.shape == (2000, 63)
    assert sum(p.numel() for p in Mamba(128).parameters()) == 116480


@pytest.mark.parametrize("discretise", [hold, bilinear])
def test_both_discretisations_are_those_of_complex_numbers_and_pass_gradcheck(discretise):
    rate, frequency = torch.rand(3, 4).double() * 2 + 0.1, numbers(3, 4) * 40
    rate[0, :2], frequency[0] = 300.0, torch.tensor([5.0, -5.0, 1.0, 0.0])  # |Δ a / 2| > 1: the real part of ā is negative
    step, readout = torch.tensor([[0.05], [1e-3], [0.1]]).double(), numbers(3, 4, 2)
    log, angle, w, w_i = discretise(rate, frequency, step, readout)
    oracle = {hold: ssm_equations.zero_order_hold, bilinear: ssm_equations.bilinear}[discretise]
    a_bar, b_bar = oracle(torch.complex(-rate, frequency).numpy(), step.numpy())
    torch.testing.assert_close(torch.polar(log.exp(), angle), torch.from_numpy(a_bar), rtol=1e-11, atol=1e-14)
    expected = torch.view_as_complex(readout) * torch.from_numpy(b_bar)
    torch.testing.assert_close(torch.complex(w, w_i), expected, rtol=1e-11, atol=1e-13)
    inputs = [x.clone().requires_grad_() for x in (rate, frequency, step, readout)]
    assert torch.autograd.gradcheck(discretise, inputs)


def test_the_bilinear_rule_stays_finite_where_it_forgets_everything_at_once():
    rate = torch.tensor([[2.0, 2.0 + 1e-7, 1.9]], requires_grad=True)
    log, *rest = bilinear(rate, torch.zeros(1, 3), torch.ones(1, 1), torch.ones(1, 3, 2))
    assert (log[0, :2] < -7).all()
    assert all(part.isfinite().all() for part in (log, *rest))
    (log.sum() + sum(part.sum() for part in rest)).backward()
    assert rate.grad.isfinite().all()


@pytest.mark.parametrize("discretise", [hold, bilinear])
def test_in_fp32_slow_states_keep_their_bits(discretise):
    arguments = (torch.tensor([[0.5, 1e-3]]), torch.tensor([[0.0, 1e-2]]), torch.tensor([[1e-3]]), torch.ones(1, 2, 2))
    rough, exact = discretise(*arguments), discretise(*(x.double() for x in arguments))
    torch.testing.assert_close(rough, tuple(x.float() for x in exact), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shared", [False, True])
def test_the_gradients_of_a_diagonal_ssm_pass_gradcheck(shared):
    ssm, x = DiagonalSSM(2, 4, start=start_inverse, shared=shared, discretise=bilinear).double(), numbers(1, 70, 2)
    parameters = dict(ssm.named_parameters())

    def answer(x, *values):
        return torch.func.functional_call(ssm, dict(zip(parameters, values, strict=True)), x)

    assert torch.autograd.gradcheck(answer, (x.requires_grad_(), *parameters.values()), fast_mode=True)


def test_the_ssms_of_the_benchmark_start_as_its_code_has_them():
    s4d, h3 = MIXERS["s4d_benchmark"][0](500, 64), MIXERS["h3_benchmark"][0](500, 64)
    ssm = s4d.diagonal
    assert ssm.log_rate.shape == ssm.frequency.shape == (32,)  # one for all channels
    assert ssm.log_step.shape == (500,)
    torch.testing.assert_close(ssm.log_rate.exp(), torch.full((32,), 0.5))
    torch.testing.assert_close(ssm.frequency, torch.tensor([64 / math.pi * (64 / (2 * n + 1) - 1) for n in range(32)]))
    a = torch.complex(-ssm.log_rate.exp(), ssm.frequency)
    answers = 2 * (torch.view_as_complex(ssm.readout) / a).real.sum(1)  # to a constant input, after a long time
    assert answers.std().item() == pytest.approx(1, rel=0.1)
    assert s4d.to_output.weight.shape == (500, 500)
    assert h3.shift.taps.abs().max() <= 1 / 8
    assert h3.shift.taps.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.02)
    assert torch.equal(h3.diagonal.frequency.view(500, 32)[7], torch.pi * torch.arange(32))


def test_s4d_learns_a_delayed_copy():
    assert ssm_tasks.accuracy_after(ssm_tasks.delayed_copy, S4D(16, 32), 16, 200) > 0.9


def test_h3_learns_to_recall_a_value_by_its_key():
    assert ssm_tasks.accuracy_after(ssm_tasks.recall, H3(32, 8), 32, 400) > 0.9


def test_mamba_learns_to_select_what_it_keeps():
    assert ssm_tasks.accuracy_after(ssm_tasks.latest_marked, Mamba(16, 4), 16, 200) > 0.9
