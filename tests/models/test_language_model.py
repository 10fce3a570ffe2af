import re
from itertools import product

import pytest
import torch
from torch.nn.functional import cross_entropy

from compactattn.data.automata import RegularLanguages
from compactattn.models import head
from compactattn.models.block import RECURRENCES
from compactattn.models.config import ARCHITECTURES, ModelConfig
from compactattn.models.generation import generate
from compactattn.models.head import head_loss
from compactattn.models.language_model import build, count_parameters
from compactattn.models.zoo import ZOO

VOCAB = 31
SMALL = {"vocab": VOCAB, "layers": 2, "width": 24, "heads": 3}
MODELS = [
    ModelConfig(**SMALL, kernel="sparsemax"),
    ModelConfig(**SMALL, kernel="gaussian", positions="alibi"),
    ModelConfig(**SMALL, kernel="norm_relu", as_released="efficient"),
    ModelConfig(**SMALL, kernel="topk_softmax(4)"),
    ModelConfig(**SMALL, architecture="transformer", positions="alibi"),
    ModelConfig(**SMALL, architecture="transformer", positions="learned", longest=90, kernel="biweight"),
    ModelConfig(**SMALL, architecture="transformer"),
    *(ModelConfig(**SMALL, architecture=name, form="benchmark") for name in RECURRENCES if name != "mamba"),
    ModelConfig(**SMALL | {"layers": 1}, architecture="mamba", form="benchmark", start="unit"),
]
NAMES = [f"{config.architecture}-{config.kernel}-{config.positions}{config.as_released}" for config in MODELS]
each_model = pytest.mark.parametrize("config", MODELS, ids=NAMES)


def tokens(batch=3, time=80, seed=0):
    return torch.randint(0, VOCAB, (batch, time), generator=torch.Generator().manual_seed(seed))


@each_model
def test_step_by_step_logits_equal_the_full_forward(config):
    model, text = build(config).double(), tokens()
    full = model(text)
    logits, cache = model.prefill(text[:, :1])
    steps = [logits]
    for t in range(1, text.shape[1]):
        logits, cache = model.step(text[:, t], cache)
        steps.append(logits)
    torch.testing.assert_close(torch.stack(steps, 1), full, rtol=1e-10, atol=1e-10)
    logits, cache = model.prefill(text[:, :50])
    logits, cache = model.advance(text[:, 50:77], cache)
    torch.testing.assert_close(logits, full[:, 76], rtol=1e-10, atol=1e-10)
    assert cache.length == 77


@each_model
def test_no_logit_depends_on_a_later_token(config):
    model, text = build(config), tokens(1)
    changed = text.clone()
    changed[:, 40:] = (changed[:, 40:] + 7) % VOCAB
    with torch.no_grad():
        before, after = model(text), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40], after[:, 40])


@each_model
def test_the_fused_loss_is_cross_entropy_in_value_and_every_gradient(config, monkeypatch):
    monkeypatch.setitem(head.CHUNK, "cpu", 7 * VOCAB)  # several chunks, the last one short
    model, text = build(config).double(), tokens(2, 40)
    targets, counted = tokens(2, 40, seed=1), torch.rand(2, 40, generator=torch.Generator().manual_seed(2)) < 0.4
    total, count = model.loss(text, targets, counted)
    plain = (cross_entropy(model(text).flatten(0, 1), targets.flatten(), reduction="none") * counted.flatten()).sum()
    torch.testing.assert_close(total, plain, rtol=1e-12, atol=1e-12)
    assert int(count) == int(counted.sum())
    parameters = dict(model.named_parameters())
    ours, theirs = (torch.autograd.grad(loss * 0.5, parameters.values()) for loss in (total, plain))
    for name, mine, other in zip(parameters, ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("count", "words"), [(512, 1000), (512, 1), (10, 1300), (3, 4095), (1, 4096), (1, 5000), (5, 5000)])
def test_the_loss_holds_no_more_logits_than_its_chunk_unless_a_single_token_has_more(count, words, monkeypatch):
    monkeypatch.setitem(head.CHUNK, "cpu", 2**12)
    hidden, weight = torch.randn(count, 4, requires_grad=True), torch.randn(words, 4, requires_grad=True)
    targets, counted = torch.randint(0, words, (count,)), torch.ones(count, dtype=torch.bool)
    shapes, pull = [], head._pull_rows
    monkeypatch.setattr(head, "_pull_rows", lambda logits, *rest: shapes.append(logits.shape) or pull(logits, *rest))
    head_loss(hidden, weight, targets, counted, 0.5).backward()
    assert sum(rows for rows, _ in shapes) == count
    assert max(rows * words for rows, words in shapes) <= max(2**12, words)
    assert len(shapes) == -(-count // max(1, 2**12 // words))  # and no fewer than it may


def test_the_loss_of_bf16_autocast_is_near_that_of_fp32():
    model, text = build(MODELS[0]), tokens()
    everything = torch.ones_like(text, dtype=torch.bool)
    exact, _ = model.loss(text, text, everything)
    with torch.autocast("cpu", torch.bfloat16):
        rough, _ = model.loss(text, text, everything)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, exact, rtol=2e-2, atol=0)
    rough.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_weights_depend_on_the_config_and_the_seed_alone():
    torch.manual_seed(1)
    first = build(MODELS[0], seed=3)
    torch.rand(5)
    before = torch.random.get_rng_state()
    second, other = build(MODELS[0], seed=3), build(MODELS[0], seed=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_a_mosaic_starts_as_published():
    model = build(ModelConfig(vocab=400, layers=4, width=512, heads=8))
    block = model.blocks[0]
    for weight, deviation in (
        (model.embedding.weight, 512**-0.5),
        (block.mixer.to_keys.weight, 512**-0.5),
        (block.mixer.to_output.weight, 512**-0.5 / 2),
        (block.store.to_keys.weight, 512**-0.5),
        (block.store.to_output.weight, 512**-0.5 / 2),
        (block.store.keys, 64**-0.5),
        (block.store.values, 64**-0.5),
    ):
        assert weight.std().item() == pytest.approx(deviation, rel=0.02)
    assert block.store.keys.shape == (8, 7 * 512 // 2, 64)
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())
    assert model.scale == 512**-0.5


def test_either_output_layer_goes_with_any_architecture():
    def start(architecture, output):
        model = build(ModelConfig(vocab=4000, layers=1, width=64, heads=2, architecture=architecture, output=output))
        return model.scale, round(model.embedding.weight.std().item(), 2)

    for architecture, output in product(("mosaic", "transformer", "mamba"), ("", "scaled", "plain")):
        own = "scaled" if architecture == "mosaic" else "plain"
        assert start(architecture, output) == {"scaled": (1 / 8, 0.13), "plain": (1.0, 0.02)}[output or own]
    with pytest.raises(ValueError, match="output = 'loud' is unknown; choose one of '', 'scaled', 'plain'"):
        ModelConfig(vocab=4, output="loud")


def test_a_mosaic_and_a_transformer_of_one_size_have_matching_parameter_counts():
    for size in ZOO.values():
        both = [size.configure(architecture=kind, vocab=64) for kind in ("mosaic", "transformer")]
        with torch.device("meta"):
            mosaic, transformer = (count_parameters(build(config)) for config in both)
        assert mosaic == pytest.approx(transformer, rel=0.02)


@pytest.mark.parametrize("size", ["regular", "recall"])
def test_every_architecture_of_one_size_has_about_the_parameters_of_a_mosaic(size):
    with torch.device("meta"):
        counts = {kind: count_parameters(build(ZOO[size].configure(architecture=kind))) for kind in ARCHITECTURES}
    assert all(count == pytest.approx(counts["mosaic"], rel=0.04) for count in counts.values()), counts
    assert ZOO[size].configure(architecture="gla", inner=64).inner == 64


def test_the_transformer_of_regbenchs_size_learns_the_positions_of_the_longest_example():
    model = ZOO["regular"].configure(architecture="transformer")
    assert (model.positions, model.longest) == ("learned", RegularLanguages().longest)
    assert ZOO["recall"].configure(architecture="transformer").positions == "none"
    short = ZOO["regular"].configure(architecture="transformer", longest=64)
    assert (short.longest, short.inner > model.inner) == (64, True)


def test_memory_mosaics_has_2688_slots_at_the_width_of_the_language_model():
    assert ZOO["stories-12"].configure().slots_per_head == 2688
    assert ZOO["regular"].configure().slots_per_head == 448


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "rnn"}, ["'rnn'", "'mosaic'"]),
        ({"heads": 5}, ["24", "5"]),
        ({"kernel": "gausian"}, ["gausian", "gaussian"]),
        ({"positions": "learned"}, ["longest"]),
        ({"layers": 0}, ["layers", "at least 1"]),
        ({"as_released": "yes"}, ["as_released", "'efficient'"]),
        ({"dropout": 1.0}, ["dropout = 1.0", "below 1"]),
        ({"embedding_dropout": -0.1}, ["embedding_dropout = -0.1", "at least 0"]),
        ({"architecture": "s4d", "state": 7}, ["state = 7 of s4d", "even"]),
        ({"architecture": "h3", "state": 1}, ["state = 1 of h3", "even"]),
        (
            {"architecture": "gla", "heads": 24},
            ["into 24 heads", "half as wide as values", "choose 12 heads, or a width of 48"],
        ),
        ({"architecture": "retnet", "heads": 8}, ["into 8 heads", "pairs", "choose 6 or 12 heads, or a width of 32"]),
        ({"architecture": "retnet", "width": 1, "heads": 1}, ["into 1 head of", "pairs; choose a width of 2"]),
    ],
)
def test_a_config_that_cannot_be_is_told_in_words(change, words):
    with pytest.raises(ValueError) as error:
        ModelConfig(**{**SMALL, **change})
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_every_width_and_number_of_heads_that_is_not_refused_makes_a_model(architecture):
    taken = 0
    for width, heads in product((1, 2, 3, 6, 8, 12), (1, 2, 3, 4, 6, 8, 12, 24)):
        try:
            config = ModelConfig(VOCAB, 1, width, heads, architecture, slots=4)
        except ValueError as error:
            (remedy,) = re.findall(r"or a width of (\d+)|choose a width of (\d+)", str(error))
            ModelConfig(VOCAB, 1, int("".join(remedy)), heads, architecture)
            for fewer_or_more in re.findall(r"(\d+)(?: or \d+)? heads?, or a", str(error)):
                ModelConfig(VOCAB, 1, width, int(fewer_or_more), architecture)
        else:
            taken += 1
            assert build(config)(tokens(1, 5)).isfinite().all()
    assert taken > 6


def test_learned_positions_end_where_they_were_told_to():
    with pytest.raises(ValueError) as error:
        build(MODELS[5])(tokens(1, 91))
    assert "91" in str(error.value)
    assert "90" in str(error.value)


def test_generation_is_greedy_at_temperature_0_and_equals_the_uncached_model():
    model, text = build(MODELS[0]).double(), tokens(2, 5)
    made = list(generate(model, text, 12))
    for token in made:
        assert torch.equal(token, model(text)[:, -1].argmax(-1))
        text = torch.cat((text, token[:, None]), 1)
    assert len(made) == 12


def test_generation_depends_on_its_seed_and_stops_when_every_row_has_stopped():
    model, text = build(MODELS[0]), tokens(2, 5)
    runs = [torch.stack(list(generate(model, text, 20, temperature=1.0, seed=seed))) for seed in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    stop = int(next(iter(generate(model, text[:1], 1)))[0])
    assert len(list(generate(model, text[:1], 20, stop=stop))) == 1


def test_a_look_at_the_model_covers_every_layer():
    for config in MODELS[:2] + MODELS[4:5]:
        looks = build(config).inspect(tokens(1, 20))
        assert [look.weights.shape for look in looks] == [(1, 3, 20, 20)] * 2
        assert looks[0].readout.support.shape == (1, 3, 20)


def test_the_loss_compiles_into_one_graph_with_its_gradients():
    model, text = build(MODELS[0]), tokens(2, 20)
    counted = torch.ones_like(text, dtype=torch.bool)
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(text, text, counted)[0], model.loss(text, text, counted)[0])
    compiled(text, text, counted)[0].backward()
    assert all(p.grad is not None for p in model.parameters())


RECURRENT = [ModelConfig(**SMALL | {"layers": 1}, architecture=name) for name in RECURRENCES]


@pytest.mark.parametrize("config", MODELS + RECURRENT, ids=NAMES + list(RECURRENCES))
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks activations for it
def test_compiled_parts_have_no_graph_break_and_change_nothing(config, monkeypatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda part, dynamic: real(part, fullgraph=True, backend="aot_eager"))
    torch.compiler.reset()
    model, text = build(config), tokens(2, 20)
    counted, parameters = torch.ones_like(text, dtype=torch.bool), list(model.parameters())
    plain, _ = model.loss(text, text, counted)
    want = torch.autograd.grad(plain, parameters)
    model.compile_parts()
    loss, _ = model.loss(text, text, counted)
    torch.testing.assert_close((loss, *torch.autograd.grad(loss, parameters)), (plain, *want))


@pytest.mark.parametrize("config", [MODELS[0], MODELS[4], *RECURRENT], ids=lambda config: config.architecture)
def test_all_but_attention_itself_and_the_views_of_self_attention_is_compiled(config, monkeypatch):
    parts = []
    monkeypatch.setattr(torch, "compile", lambda part, dynamic: parts.append(part.__name__))
    build(config).blocks[0].compile_parts()
    assert parts == (["finish"] if config.architecture == "transformer" else ["prepare", "finish"])


@pytest.mark.parametrize(("positions", "low", "high"), [("learned", 0.95, 1.0), ("none", 0.0, 0.6)])
def test_a_transformer_learns_to_look_three_tokens_back_by_its_positions_alone(positions, low, high):
    """Of one layer, a query has nothing but its place to find that token by."""
    torch.manual_seed(0)
    longest = {"longest": 16} if positions == "learned" else {}
    config = ModelConfig(4, layers=1, width=32, heads=2, architecture="transformer", positions=positions, **longest)
    model = build(config)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(250):
        tokens = torch.randint(0, 4, (64, 16))
        loss = cross_entropy(model(tokens)[:, 3:].flatten(0, 1), tokens[:, :-3].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    tokens = torch.randint(0, 4, (256, 16))
    right = (model(tokens)[:, 3:].argmax(-1) == tokens[:, :-3]).float().mean().item()
    assert low <= right <= high
