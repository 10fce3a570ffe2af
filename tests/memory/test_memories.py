import copy

import pytest
import torch
from torch.nn.functional import normalize

from compactattn import attend, parse, weights
from compactattn.kernels import FAMILY
from compactattn.memory.contextual import ContextualMemory
from compactattn.memory.features import leaky_average
from compactattn.memory.persistent import PersistentMemory
from compactattn.memory.released import Scoring, departs, scoring

KERNELS = ["gaussian", "sparsemax", "biweight", "triweight", "norm_relu", "relumax(r=2)", "topk_softmax(3)", "topk_uniform(3)"]
WIDTH, HEADS, TIME = 12, 3, 11


def make(kernel="sparsemax", **options):
    torch.manual_seed(0)
    return ContextualMemory(WIDTH, HEADS, parse(kernel), **options).double()


def plain_memory(memory, x, kernel, *, offset=1, slopes=None, scores=None):
    """The paper's Eqs. 2 and 5, position by position, from the module's parameters."""
    heads = WIDTH // HEADS
    k_raw, v_raw = (layer(x).unflatten(-1, (HEADS, heads)).transpose(1, 2) for layer in (memory.to_keys, memory.to_values))
    keys = normalize(leaky_average(k_raw, (10 * memory.leak.stored).abs()), dim=-1)
    scale = torch.exp(2 * (10 * memory.log_beta.stored).clamp_max(5))
    out = torch.zeros_like(v_raw)
    for t in range(offset, x.shape[1]):
        legal = t - offset + 1
        mix = memory.mix[:, None, None]
        raw = mix * v_raw[:, :, :legal] + (1 - mix) * v_raw[:, :, 1 : legal + 1]  # the newest value peeks at t − offset + 1 ≤ t
        v = normalize(raw, dim=-1) * torch.exp(10 * memory.log_value_scale.stored)[:, None, None]
        cosines = torch.einsum("bhd,bhid->bhi", keys[:, :, t], keys[:, :, :legal])[:, :, None]
        if scores is not None:
            w = scores(cosines, scale[:, None, None])
        elif slopes is not None:
            distance = t - torch.arange(legal)
            w = weights(cosines * scale[:, None, None] - slopes[:, None, None] * distance, kernel)
        else:
            w = weights(cosines, kernel, scale=scale)
        out[:, :, t] = (w @ v)[:, :, 0]
    return memory.to_output(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kernel", KERNELS)
def test_contextual_memory_is_kernel_regression_over_the_strict_past(kernel):
    memory, x = make(kernel), torch.randn(2, TIME, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(memory(x), plain_memory(memory, x, kernel), rtol=1e-10, atol=1e-10)


def test_contextual_memory_with_alibi_takes_the_distance_off_the_scores():
    memory, x = make("biweight", alibi=True), torch.randn(2, TIME, WIDTH, dtype=torch.float64)
    slopes = 2.0 ** (-8.0 / HEADS * torch.arange(1, HEADS + 1, dtype=torch.float64))
    expected = plain_memory(memory, x, "biweight", slopes=slopes)
    torch.testing.assert_close(memory(x), expected, rtol=1e-6, atol=1e-6)  # the op keeps its slopes in fp32


def test_row_0_of_contextual_memory_is_exactly_zero():
    memory, x = make(), torch.randn(2, TIME, WIDTH, dtype=torch.float64)
    assert torch.equal(memory(x)[:, 0], torch.zeros(2, WIDTH).double())
    assert torch.equal(memory(x[:, :1]), torch.zeros(2, 1, WIDTH).double())


@pytest.mark.parametrize("kernel", KERNELS)
def test_contextual_memory_never_sees_the_future(kernel):
    memory, x = make(kernel), torch.randn(1, TIME, WIDTH, dtype=torch.float64)
    changed = x.clone()
    changed[:, 6:] = torch.randn(1, TIME - 6, WIDTH).double()
    assert torch.equal(memory(x)[:, :6], memory(changed)[:, :6])
    assert not torch.equal(memory(x)[:, 6], memory(changed)[:, 6])


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("cuts", [(1,) * TIME, (4, 1, 6), (1, 10)])
def test_contextual_memory_goes_on_from_its_cache(cuts, alibi):
    memory, x = make("biweight", alibi=alibi), torch.randn(2, TIME, WIDTH, dtype=torch.float64)
    past, parts = None, []
    for part in x.split(cuts, 1):
        y, past = memory.advance(part, past)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), memory(x), rtol=1e-11, atol=1e-11)


def test_the_scalars_start_as_published():
    memory = ContextualMemory(16, 4, parse("gaussian"))
    torch.testing.assert_close(memory.leak(), torch.linspace(0.5, 5, 4))
    torch.testing.assert_close(memory.leak.stored, torch.linspace(0.05, 0.5, 4))
    torch.testing.assert_close(memory.beta_squared(), torch.full((4,), 2.0).exp())
    torch.testing.assert_close(memory.log_value_scale(), torch.full((4,), -0.5))
    assert bool(((memory.mix >= 0) & (memory.mix <= 1)).all())
    with torch.no_grad():
        memory.log_beta.stored.fill_(1.0)
    torch.testing.assert_close(memory.beta_squared(), torch.full((4,), 10.0).exp())  # log β is clamped at 5


def test_every_parameter_of_contextual_memory_passes_gradcheck():
    memory, x = make("biweight"), torch.randn(1, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    names, values = zip(*memory.named_parameters(), strict=True)

    def run(x, *values):
        return torch.func.functional_call(memory, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)


def test_persistent_memory_is_softmax_regression_over_its_slots():
    torch.manual_seed(0)
    memory, x = PersistentMemory(WIDTH, HEADS, slots=7).double(), torch.randn(2, TIME, WIDTH, dtype=torch.float64)
    raw = memory.to_keys(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    k = normalize(leaky_average(raw, (10 * memory.leak.stored).abs()), dim=-1)
    scale = torch.exp(2 * 10 * memory.log_beta.stored)
    w = torch.softmax(torch.einsum("bhtd,hsd->bhts", k, memory.keys) * scale[:, None, None], -1)
    values = memory.values * torch.exp(10 * memory.log_value_scale.stored)[:, None, None]
    expected = memory.to_output(torch.einsum("bhts,hsd->bthd", w, values).flatten(2))
    torch.testing.assert_close(memory(x), expected, rtol=1e-10, atol=1e-10)
    first, past = memory.advance(x[:, :4], None)
    second, _ = memory.advance(x[:, 4:], past)
    torch.testing.assert_close(torch.cat((first, second), 1), expected, rtol=1e-10, atol=1e-10)


def test_persistent_memory_does_not_copy_its_slots_for_each_sample():
    memory = PersistentMemory(8, 2, slots=64)
    x = torch.randn(32, 3, 8)
    copies = 32 * memory.keys.numel()
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), keywords=None):
            nonlocal largest
            out = function(*arguments, **(keywords or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        memory(x)
    assert 0 < largest < copies


@pytest.mark.parametrize("path", ["efficient", "plain"])
def test_as_released_changes_only_the_kernels_that_the_published_code_changes(path):
    changed = {str(kernel) for kernel in map(parse, ALL_KERNELS) if departs(kernel, path)}
    assert (
        changed
        == {"efficient": {"norm_relu", "relumax(r=1, b=1)", "topk_uniform(3)"}, "plain": {"norm_relu", "relumax(r=1, b=1)"}}[
            path
        ]
    )
    assert all(scoring(parse(kernel)) == Scoring(parse(kernel)) for kernel in ALL_KERNELS)


ALL_KERNELS = [*KERNELS, "relumax", "entmax(1.2)", *(m.name for m in FAMILY if not m.parameters)]


def test_released_efficient_normalised_relu_is_relu_of_the_cosine_without_the_newest_key():
    memory, x = make("norm_relu", as_released="efficient"), torch.randn(2, TIME, WIDTH, dtype=torch.float64)

    def relu_of_cosine(cosines, scale):
        w = cosines.relu()
        uniform = torch.full_like(w, 1 / w.shape[-1])
        return torch.where(w.sum(-1, keepdim=True) > 0, w / w.sum(-1, keepdim=True).clamp_min(1e-300), uniform)

    expected = plain_memory(memory, x, "norm_relu", offset=2, scores=relu_of_cosine)
    torch.testing.assert_close(memory(x), expected, rtol=1e-10, atol=1e-10)


def test_released_efficient_relumax_never_attends_to_the_newest_key():
    memory, x = make("relumax", as_released="efficient"), torch.randn(2, TIME, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(memory(x), plain_memory(memory, x, "relumax", offset=2), rtol=1e-10, atol=1e-10)


def test_released_plain_path_applies_the_bandwidth_twice():
    x = torch.randn(2, TIME, WIDTH, dtype=torch.float64)
    relumax = make("relumax", as_released="plain")

    def squared(cosines, scale):
        s = scale**2 * cosines
        w = (1 + s - s.amax(-1, keepdim=True)).relu()
        return w / w.sum(-1, keepdim=True)

    torch.testing.assert_close(relumax(x), plain_memory(relumax, x, "relumax", scores=squared), rtol=1e-9, atol=1e-9)
    norm_relu = make("norm_relu", as_released="plain")
    with torch.no_grad():
        norm_relu.log_beta.stored.fill_(0.02)

    def shifted(cosines, scale):
        w = (2 * scale**2 * cosines + 1 - 2 * scale).relu()
        uniform = torch.full_like(w, 1 / w.shape[-1])
        return torch.where(w.sum(-1, keepdim=True) > 0, w / w.sum(-1, keepdim=True).clamp_min(1e-300), uniform)

    torch.testing.assert_close(norm_relu(x), plain_memory(norm_relu, x, "norm_relu", scores=shifted), rtol=1e-9, atol=1e-9)


def test_a_look_shows_the_weights_with_their_exact_zeros():
    memory, x = make("sparsemax"), torch.randn(2, 140, WIDTH, dtype=torch.float64)
    w, readout, legal = memory.inspect(x)
    assert w.shape == (2, HEADS, 140, 140)
    torch.testing.assert_close(w[:, :, 1:].sum(-1), torch.ones(2, HEADS, 139).double())
    assert bool((w.triu() == 0).all())
    assert torch.equal((w > 0).sum(-1).int(), readout.support)
    assert torch.equal(legal, torch.arange(140).expand(2, HEADS, -1))
    (_, _, v, _), _ = memory.features(x, None)
    torch.testing.assert_close(memory.to_output((w @ v).transpose(1, 2).flatten(2)), memory(x), rtol=1e-10, atol=1e-10)


def test_memories_compile_into_one_graph():
    memory, x = copy.deepcopy(make("sparsemax")), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    compiled = torch.compile(memory, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), memory(x), rtol=1e-12, atol=1e-12)


def test_weights_of_persistent_memory_are_dropped_in_training_alone():
    torch.manual_seed(0)
    plain, dropping = (PersistentMemory(WIDTH, HEADS, 40, dropout=p).double() for p in (0.0, 0.4))
    dropping.load_state_dict(plain.state_dict())
    x = torch.randn(2, TIME, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(dropping.eval()(x), plain(x))
    dropping.train()
    torch.manual_seed(1)
    first = dropping(x)
    torch.manual_seed(1)
    assert torch.equal(dropping(x), first)  # the seed decides
    assert not torch.allclose(first, plain(x))
    torch.manual_seed(2)
    mean = torch.stack([dropping(x).detach() for _ in range(400)]).mean(0)  # what is kept is divided by 0.6
    assert float((mean - plain(x).detach()).norm() / plain(x).detach().norm()) < 0.05


def test_dropout_of_persistent_memory_is_that_of_attend():
    torch.manual_seed(0)
    q, (k, v) = torch.randn(1, HEADS, 9, 4), torch.randn(2, 1, HEADS, 5, 4)
    memory = PersistentMemory(WIDTH, HEADS, 5, dropout=0.5)
    torch.manual_seed(3)
    found = memory._attend(q, k, v)
    torch.manual_seed(3)
    assert torch.equal(found, attend(q, k, v, "softmax", scale=1.0, dropout=0.5))


def test_the_bandwidth_of_the_plain_path_is_that_of_its_support():
    torch.manual_seed(0)
    memory = ContextualMemory(WIDTH, HEADS, parse("norm_relu"), as_released="plain")
    beta_squared = memory.beta_squared().detach()
    cosine = (beta_squared - 0.5) / beta_squared**2  # 2β⁴cos + 1 − 2β² = 0
    found = memory.inspect(torch.randn(1, TIME, WIDTH)).readout.bandwidth[0, :, 1:].detach()  # the first query sees no key
    torch.testing.assert_close(found, (2 - 2 * cosine).sqrt()[:, None].expand_as(found))
    assert found.mean().item() == pytest.approx((2 - 2 * 0.126) ** 0.5, abs=0.01)
