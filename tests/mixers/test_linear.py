"""GLA, RetNet and the linear attention with decay that they share."""

import numpy as np
import pytest
import torch
from operations import count_training
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid

from compactattn.mixers.gla import GLA, Written
from compactattn.mixers.linear_attention import CHUNK, _ChannelDecay, decay_scan, decay_step
from compactattn.mixers.retnet import NormalisedRetNet, Retained, RetNet

WIDTH = 12
MIXERS = {
    "gla": lambda: GLA(WIDTH),
    "gla-3": lambda: GLA(WIDTH, 3),
    "retnet": lambda: RetNet(WIDTH, 1),
    "retnet-3": lambda: RetNet(WIDTH, 3),
    "normalised-retnet": lambda: NormalisedRetNet(WIDTH, 1),
    "normalised-retnet-3": lambda: NormalisedRetNet(WIDTH, 3),
}
each_mixer = pytest.mark.parametrize("make", MIXERS.values(), ids=MIXERS)


def some_past(mixer, batch):
    """What a past could have left, with another position in every sample."""
    keys = WIDTH // 2 if isinstance(mixer, GLA) else WIDTH
    values = mixer.to_output.in_features // mixer.heads + isinstance(mixer, NormalisedRetNet)
    state = torch.randn(batch, mixer.heads, keys // mixer.heads, values).double().requires_grad_()
    return Written(state) if isinstance(mixer, GLA) else Retained(state, torch.tensor([17, 400])[:batch])


def assert_same(got, expected, tolerance=1e-10):
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def by_definition(q, k, v, log_decay, state):
    """`decay_scan` as a loop over `decay_step`."""
    out = []
    for parts in zip(*(x.expand(*q.shape[:3], -1).unbind(2) for x in (q, k, v, log_decay)), strict=True):
        y, state = decay_step(*parts, state)
        out.append(y)
    return torch.stack(out, 2), state


@each_mixer
@pytest.mark.parametrize("time", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("continued", [False, True], ids=["fresh", "continued"])
def test_parallel_equals_recurrent_in_output_state_and_every_gradient(make, time, continued):
    mixer = make().double()
    x = torch.randn(2, time, WIDTH).double().requires_grad_()
    past = some_past(mixer, 2) if continued else None
    inputs = (x, *mixer.parameters(), *((past.state,) if continued else ()))
    weight = torch.randn(x.shape).double()
    results = []
    for form in (mixer.advance, mixer.recur):
        y, end = form(x, past)
        total = (y * weight).sum() + (end.state * torch.arange(end.state.shape[-1])).sum()
        results.append((y, *end, *torch.autograd.grad(total, inputs, materialize_grads=True)))
    assert_same(*results)


@each_mixer
@pytest.mark.parametrize("cut", [1, CHUNK["cpu"], 50, 99])
def test_two_pieces_are_one_and_a_step_goes_on_where_they_end(make, cut):
    mixer = make().double()
    x = torch.randn(2, 101, WIDTH).double()
    whole, _ = mixer.recur(x)
    first, past = mixer.advance(x[:, :cut], None)
    second, past = mixer.advance(x[:, cut:100], past)
    last, _ = mixer.step(x[:, 100], past)
    assert_same((torch.cat((first, second, last[:, None]), 1),), (whole,))


@each_mixer
def test_no_answer_depends_on_a_later_input(make):
    mixer, x = make(), torch.randn(1, 150, WIDTH)
    changed = x.clone()
    changed[:, 70:] += 1
    before, after = mixer(x), mixer(changed)
    assert torch.equal(before[:, :70], after[:, :70])
    assert not torch.equal(before[:, 70], after[:, 70])


def norm_and_gate(o, gate):
    o = (o - o.mean(-1, keepdims=True)) / np.sqrt(o.var(-1, keepdims=True) + 1e-5)
    return o.reshape(*gate.shape) * gate / (1 + np.exp(-gate))


@pytest.mark.parametrize("heads", [1, 3])
def test_gla_is_the_sum_over_the_past_of_values_under_the_product_of_decays(heads):
    mixer, time, half = GLA(WIDTH, heads).double(), 70, WIDTH // 2
    x = np.random.default_rng(0).normal(size=(time, WIDTH)) * 2
    weights = {name: parameter.detach().numpy() for name, parameter in mixer.named_parameters()}
    q, k, v = np.split(x @ weights["to_inputs.weight"].T, (half, WIDTH), -1)
    raw = x @ weights["to_decay.0.weight"].T @ weights["to_decay.1.weight"].T + weights["to_decay.1.bias"]
    alpha = (1 / (1 + np.exp(-raw))) ** (1 / 16)
    q, k, v, alpha = (a.reshape(time, heads, -1) for a in (q, k, v, alpha))
    o = np.zeros((time, heads, WIDTH // heads))
    for t in range(time):
        for i in range(t + 1):
            left = alpha[i + 1 : t + 1].prod(0)  # (H, K)
            o[t] += (q[t] * left * k[i]).sum(-1, keepdims=True) * (half // heads) ** -0.5 * v[i]
    gate = x @ weights["to_gate.weight"].T + weights["to_gate.bias"]
    expected = norm_and_gate(o, gate) @ weights["to_output.weight"].T
    np.testing.assert_allclose(mixer(torch.tensor(x)[None])[0].detach(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("heads", [1, 3])
def test_retnet_is_the_sum_over_the_past_under_a_complex_power_of_the_age(heads):
    mixer, time, dim = RetNet(WIDTH, heads).double(), 70, WIDTH // heads
    x = np.random.default_rng(0).normal(size=(time, WIDTH)) * 2
    weights = {name: parameter.detach().numpy() for name, parameter in mixer.named_parameters()}
    q, k, v, gate = np.split(x @ weights["to_inputs.weight"].T, 4, -1)
    q, k, v = (a.reshape(time, heads, dim) for a in (q, k, v))
    q, k = (a[..., ::2] + 1j * a[..., 1::2] for a in (q, k))  # pairs of channels are complex numbers
    theta = 10000.0 ** (-2 * np.arange(dim // 2) / dim)
    o = np.zeros((time, heads, dim))
    for h in range(heads):
        gamma = 1 - 2.0 ** (-5 - h)
        for t in range(time):
            for i in range(t + 1):
                score = (q[t, h] * np.exp(1j * theta * (t - i)) * k[i, h].conj()).sum().real
                o[t, h] += gamma ** (t - i) * score * dim**-0.5 * v[i, h]
    expected = norm_and_gate(o, gate) @ weights["to_output.weight"].T
    np.testing.assert_allclose(mixer(torch.tensor(x)[None])[0].detach(), expected, rtol=1e-9, atol=1e-9)


def retain_by_rows(mixer, x):
    """The published parallel form, from its equations: matrices (T, T) of scores for each head."""
    heads, time, dim = mixer.heads, len(x), WIDTH // mixer.heads
    weight, bias = mixer.to_inputs.weight, mixer.to_inputs.bias
    q, k, v, gate = (x @ weight.T + bias).split((WIDTH, WIDTH, 2 * WIDTH, 2 * WIDTH), -1)
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in (q, k, v))
    turn = 10000.0 ** -torch.linspace(0, 1, dim // 2, dtype=torch.float64)
    age = (torch.arange(time)[:, None] - torch.arange(time)).double()
    out = []
    for h in range(heads):
        even, odd = (q[h, :, 0::2], k[h, :, 0::2]), (q[h, :, 1::2], k[h, :, 1::2])
        cos, sin = torch.cos(age[..., None] * turn), torch.sin(age[..., None] * turn)
        same = torch.einsum("td,jd,tjd->tj", *even, cos) + torch.einsum("td,jd,tjd->tj", *odd, cos)
        crossed = torch.einsum("td,jd,tjd->tj", even[0], odd[1], sin) - torch.einsum("td,jd,tjd->tj", odd[0], even[1], sin)
        decay = torch.tril((1 - 2.0 ** (-5 - h)) ** age.clamp_min(0))
        scores = (same + crossed) * dim**-0.5 * decay / decay.sum(1, keepdim=True).sqrt()
        scores = scores / scores.sum(1, keepdim=True).abs().clamp_min(1).detach()
        o = scores @ v[h]
        out.append((o - o.mean(-1, keepdim=True)) / (o.var(-1, keepdim=True, correction=0) + 1e-5).sqrt())
    return (torch.cat(out, -1) * gate * gate.sigmoid()) @ mixer.to_output.weight.T + mixer.to_output.bias


@pytest.mark.parametrize("size", [0.1, 3.0], ids=["sums below 1", "sums above 1"])
@pytest.mark.parametrize("heads", [1, 3])
def test_normalised_retnet_is_its_published_parallel_form_in_output_and_every_gradient(heads, size):
    mixer, x = NormalisedRetNet(WIDTH, heads).double(), (torch.randn(1, 90, WIDTH) * size).double().requires_grad_()
    inputs, weight = (x, *mixer.parameters()), torch.randn(90, WIDTH).double()
    results = [(y, *torch.autograd.grad((y * weight).sum(), inputs)) for y in (mixer(x)[0], retain_by_rows(mixer, x[0]))]
    assert_same(*results, 1e-9)
    assert_same((mixer.recur(x)[0][0],), (retain_by_rows(mixer, x[0]),))


def test_the_weights_under_channel_decay_pass_gradcheck():
    q, k = (torch.randn(2, 1, 8, 3).double().requires_grad_() for _ in range(2))
    since = torch.rand(2, 1, 8, 3).double().neg().cumsum(-2).requires_grad_()
    assert torch.autograd.gradcheck(_ChannelDecay.apply, (q, k, since))


GATES = {  # what goes into the sigmoid
    "near 0": lambda shape: -1000 - 200 * torch.rand(shape),
    "near 1": lambda shape: 12 + 4 * torch.rand(shape),
    "both": lambda shape: torch.where(torch.rand(shape) < 0.1, -600.0, 16.0),
    "shut for good": lambda shape: torch.full(shape, -1e6),
}


@pytest.mark.parametrize("gates", GATES.values(), ids=GATES)
def test_gates_close_to_0_and_to_1_are_safe_over_hundreds_of_positions(gates):
    q, k, v = (torch.randn(2, 1, 500, dim, requires_grad=True) for dim in (6, 6, 5))
    log_decay = logsigmoid(gates((2, 1, 500, 6))) / 16
    weight = torch.randn(2, 1, 500, 5)
    results = []
    for form, dtype in ((decay_scan, torch.float32), (by_definition, torch.float64)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, log_decay)]
        out, state = form(*inputs, None)
        results.append((out, state, *torch.autograd.grad((out * weight).sum(), inputs)))
    for mine, theirs in zip(*results, strict=True):
        assert (mine - theirs).abs().max() <= 1e-4 * theirs.abs().max()  # measured: 5e-5 where all gates are near 0, else 2e-7


def test_a_decay_that_all_channels_share_is_one_written_out_for_each():
    q, k, v = (torch.randn(2, 3, 90, dim).double() for dim in (4, 4, 5))
    shared = torch.rand(1, 3, 90, 1).double().neg()
    state = torch.randn(2, 3, 4, 5).double()
    each = shared.expand(2, -1, -1, 4)
    assert_same(decay_scan(q, k, v, shared, state), decay_scan(q, k, v, each, state))
    assert_same(decay_scan(q, k, v, shared, state), by_definition(q, k, v, each, state))


def test_retention_sees_how_far_apart_positions_are_and_not_where():
    mixer, x = RetNet(WIDTH, 1), torch.randn(1, 60, WIDTH)
    here = mixer(x)
    far, end = mixer.advance(x, Retained(torch.zeros(1, 1, WIDTH, WIDTH), torch.tensor([1_000_000])))
    torch.testing.assert_close(far, here, rtol=1e-4, atol=1e-5)
    assert end.position.tolist() == [1_000_060]


@each_mixer
def test_under_autocast_states_are_full_precision_and_answers_close(make):
    mixer, x = make(), torch.randn(2, 130, WIDTH)
    expected, end = mixer.advance(x, None)
    with torch.autocast("cpu", torch.bfloat16):
        y, past = mixer.advance(x, None)
        _, stepped = mixer.step(x[:, 0], past)
    assert past.state.dtype == stepped.state.dtype == torch.float32
    assert (past.state - end.state).abs().max() / end.state.abs().max() < 0.02
    assert (y - expected).norm() / expected.norm() < 0.02  # measured: at most 0.011
    y.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())


def test_under_autocast_the_scan_is_that_of_full_precision():
    q, k, v = (torch.randn(2, 1, 90, dim) for dim in (4, 4, 5))
    for channels in (1, 4):
        log_decay = torch.rand(2, 1, 90, channels).neg()
        expected = decay_scan(q, k, v, log_decay, None)
        with torch.autocast("cpu", torch.bfloat16):
            got = decay_scan(q, k, v, log_decay, None)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))


def test_under_autocast_the_decays_of_gla_are_those_of_full_precision():
    mixer, x = GLA(WIDTH), torch.randn(2, 40, WIDTH)
    expected = mixer._project(x)[3]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mixer._project(x)[3], expected)


@each_mixer
def test_training_takes_a_few_operations_for_each_chunk_and_none_for_each_position(make):
    four, five = (count_training(make(), torch.randn(1, chunks * CHUNK["cpu"], WIDTH)) for chunks in (4, 5))
    assert five - four <= 8  # by definition every position takes 100


def test_parameters_are_those_of_the_methods():
    assert sum(p.numel() for p in RetNet(128, 4).parameters()) == 5 * 128**2
    assert sum(p.numel() for p in NormalisedRetNet(128, 8).parameters()) == 8 * 128**2 + 7 * 128
    assert sum(p.numel() for p in GLA(128).parameters()) == 4 * 128**2 + 128 + (128 * 16 + 16 * 64 + 64)


class Reader(nn.Module):
    """One mixer between an embedding of each kind of symbol and a linear output."""

    def __init__(self, mixer, sizes, width=32):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.mixer, self.to_output = mixer, nn.Linear(width, 8)

    def forward(self, *symbols):
        return self.to_output(self.mixer(sum(e(s) for e, s in zip(self.embeddings, symbols, strict=True))))


def learn(model, draw, updates):
    """Accuracy on fresh samples after so many updates; draw gives symbols, the positions that count and their targets."""
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(updates):
        symbols, counted, targets = draw(64)
        optimiser.zero_grad()
        cross_entropy(model(*symbols)[:, counted].flatten(0, 1), targets.flatten()).backward()
        optimiser.step()
    symbols, counted, targets = draw(500)
    return (model(*symbols)[:, counted].argmax(-1) == targets).float().mean()


def latest_value(batch, time=12):
    """Keys are written with values and written again; the last position asks for the latest value of a key."""
    keys, values = torch.randint(4, (batch, time)), torch.randint(8, (batch, time))
    keys[:, 0] = keys[:, -1]  # so that the key has a value
    values[:, -1] = 8  # no value: a question
    latest = ((keys[:, :-1] == keys[:, -1:]) * torch.arange(1, time)).argmax(1)
    return (keys, values), slice(-1, None), values.gather(1, latest[:, None])


def three_ago(batch, time=12):
    """Every position asks for the symbol three positions earlier."""
    symbols = torch.randint(8, (batch, time))
    return (symbols,), slice(3, None), symbols[:, :-3]


def test_gla_learns_to_recall_the_latest_value_of_a_key():
    assert learn(Reader(GLA(32, 2), (4, 9)), latest_value, 150) > 0.9  # measured: 0.99 to 1; without decay 0.57


def test_retnet_learns_to_recall_what_stood_three_positions_earlier():
    assert learn(Reader(RetNet(32, 2), (8,)), three_ago, 150) > 0.65  # measured: 0.81; without positions 0.36


def test_the_scan_agrees_with_the_naive_forms_of_flash_linear_attention():
    pytest.importorskip("fla")
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.retention.naive import naive_retention

    q, k, v = (torch.randn(2, 3, 100, dim) for dim in (8, 8, 10))
    log_decay, state = logsigmoid(torch.randn(2, 3, 100, 8)) / 16, torch.randn(2, 3, 8, 10)
    by_time = (x.transpose(1, 2) for x in (q, k, v, log_decay))
    theirs, theirs_end = naive_recurrent_gla(*by_time, initial_state=state, output_final_state=True)
    ours, ours_end = decay_scan(q * 8**-0.5, k, v, log_decay, state)
    assert_same((ours, ours_end), (theirs.transpose(1, 2), theirs_end), 1e-4)
    v = v[..., :8]
    log_decay = RetNet(24, 3)._log_decay(q)[None, :, None, None].expand(-1, -1, 100, -1)
    assert_same(decay_scan(q * 8**-0.5, k, v, log_decay, None)[:1], (naive_retention(q, k, v),), 1e-4)
