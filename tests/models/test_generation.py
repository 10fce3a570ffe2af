"""Tokens are chosen as documented, with a cache or without; text comes in whole characters."""

import math

import pytest
import torch

from compactattn.models.config import ModelConfig
from compactattn.models.generation import Sampling, choose, generate, stream_text
from compactattn.models.language_model import build

VOCAB = 31
SMALL = {"vocab": VOCAB, "layers": 2, "width": 24, "heads": 3}
MODELS = [
    ModelConfig(**SMALL, kernel="sparsemax"),
    ModelConfig(**SMALL, architecture="transformer", positions="learned", longest=40, kernel="biweight"),
    ModelConfig(**SMALL, architecture="mamba"),
]
each_model = pytest.mark.parametrize("config", MODELS, ids=lambda config: config.architecture)
FILTERS = {"top_k": 12, "top_p": 0.9, "min_p": 0.02}


def prompts(rows=3, time=5, seed=0):
    return torch.randint(0, VOCAB, (rows, time), generator=torch.Generator().manual_seed(seed))


def made(model, prompt, tokens, **how):
    return torch.stack(list(generate(model, prompt, tokens, **how)), 1)  # (B, tokens)


def plain_probabilities(p, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The documented rule for one row of probabilities, token by token."""
    p = [x ** (1 / temperature) for x in p]
    left = sorted(range(len(p)), key=lambda token: -p[token])
    left = [token for token in left if not top_k or p[token] >= p[left[:top_k][-1]]]
    total, kept, mass = sum(p[token] for token in left), [], 0.0
    for token in left:
        if mass < top_p * (1 - 1e-12) or top_p == 1:
            kept.append(token)
        mass += p[token] / total
    kept = [token for token in kept if p[token] >= min_p * max(p)]
    total = sum(p[token] for token in kept)
    return [p[token] / total if token in kept else 0.0 for token in range(len(p))]


# -- the choice of a token -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 3}, {"top_k": 99}, {"top_p": 0.6}, {"min_p": 0.2},
        {"min_p": 1.0}, {"top_p": 1e-9}, {"top_k": 5, "top_p": 0.7},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.95, "min_p": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_tokens_are_drawn_from_what_temperature_top_k_top_p_and_min_p_leave_in_that_order(how):
    logits = torch.randn(20, 12, dtype=torch.float64) * 2
    found = Sampling(**{"temperature": 1.0, **how}).probabilities(logits)
    for row, p in zip(found.tolist(), logits.softmax(-1).tolist(), strict=True):
        assert row == pytest.approx(plain_probabilities(p, **how), abs=1e-12)


def test_the_order_of_the_filters_matters_and_is_the_documented_one():
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    both = Sampling(1.0, top_k=2, top_p=0.55).probabilities(p.log())
    assert both[0].tolist() == pytest.approx([1, 0, 0, 0])  # 0.4 of 0.7 is enough; of all tokens it would take two


def test_what_ties_with_the_last_of_the_k_likeliest_stays():
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0]])
    assert (Sampling(1.0, top_k=2).probabilities(logits) > 0).tolist() == [[True, True, True, False, True]]


def test_filters_that_are_off_change_nothing_at_all():
    logits = torch.randn(4, 1000) * 30  # most of the mass on a few tokens: a rounded sum reaches 1 early
    off, plain = Sampling(1.0, 0, 1.0, 0.0).probabilities(logits), logits.double().softmax(-1)
    torch.testing.assert_close(off, plain, rtol=1e-12, atol=0)


@pytest.mark.parametrize("temperature", [1e-307, 1e-30, 1e300])
def test_no_temperature_overflows(temperature):
    logits = torch.tensor([[80.0, -90.0, 100.0]])
    p = Sampling(temperature).probabilities(logits)
    assert p[0].tolist() == pytest.approx([0, 0, 1] if temperature < 1 else [1 / 3] * 3)


def test_draws_follow_the_probabilities_and_never_hit_a_zero():
    logits = torch.tensor([[0.0, -math.inf, math.log(2), -math.inf, math.log(5)]]).expand(8000, -1)
    uniform = (torch.arange(8000, dtype=torch.float64) + 0.5) / 8000
    counts = choose(logits, Sampling(1.0), uniform).bincount(minlength=5)
    assert counts.tolist() == [1000, 0, 2000, 0, 5000]
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert choose(torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]]).expand(2, -1), Sampling(1.0), edges).tolist() == [1, 2]


# -- generation ----------------------------------------------------------------------------------


@each_model
@pytest.mark.parametrize(
    "how", [{}, {"temperature": 1.0}, {"temperature": 0.8, **FILTERS}], ids=["greedy", "sampled", "filtered"]
)
def test_a_cache_changes_no_token(config, how):
    model, text = build(config).double().eval(), prompts()
    found = made(model, text, 12, seed=3, **how)

    class Uncached(type(model)):
        """Reads the whole text again for every token."""

        def prefill(self, tokens):
            return self(tokens)[:, -1], tokens

        def step(self, token, cache):
            return self.prefill(torch.cat((cache, token[:, None]), 1))

    model.__class__ = Uncached
    assert torch.equal(made(model, text, 12, seed=3, **how), found)


@each_model
@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, **FILTERS}], ids=["greedy", "sampled"])
def test_prompts_of_different_lengths_go_on_as_each_would_among_its_equals(config, how):
    model = build(config).double().eval()
    text = prompts(5, 9)
    cuts = (9, 4, 9, 1, 4)
    ragged = made(model, [row[:cut].tolist() for row, cut in zip(text, cuts, strict=True)], 8, seed=1, **how)
    for row, cut in enumerate(cuts):
        assert torch.equal(ragged[row], made(model, text[:, :cut], 8, seed=1, **how)[row])


def test_a_row_draws_the_same_whatever_the_other_rows_are_and_however_long_it_is():
    model, text = build(MODELS[0]).double(), prompts(20)
    all_rows = made(model, text, 15, temperature=1.0, seed=7)
    assert torch.equal(made(model, text[:2], 6, temperature=1.0, seed=7), all_rows[:2, :6])
    assert not torch.equal(made(model, text[:2], 6, temperature=1.0, seed=8), all_rows[:2, :6])
    same = made(model, text[:1].expand(2, -1), 15, temperature=1.0, seed=7)
    assert not torch.equal(same[0], same[1])


@pytest.mark.parametrize("ragged", [False, True], ids=["equal", "ragged"])
def test_a_row_that_has_stopped_is_padded_with_the_stop_token_and_the_others_go_on(ragged):
    model, text = build(MODELS[0]).double(), prompts(6, 6)
    given = [row[: 2 + number % 3].tolist() for number, row in enumerate(text)] if ragged else text
    free = made(model, given, 40, temperature=1.5, seed=2)
    stop = int(free[0, 3])
    firsts = [(row == stop).nonzero()[:1, 0].tolist() for row in free]
    assert len({tuple(first) for first in firsts}) > 3  # they stop at different times
    found = made(model, given, 40, temperature=1.5, seed=2, stop=stop)
    last = max(first[0] if first else 39 for first in firsts)
    assert found.shape == (6, last + 1)
    for row, plain, first in zip(found, free, firsts, strict=True):
        end = first[0] if first else 39
        assert torch.equal(row[: end + 1], plain[: end + 1])
        assert (row[end + 1 :] == stop).all()


def test_a_group_of_prompts_that_has_stopped_costs_nothing_more():
    model, text = build(MODELS[0]).double(), prompts(2, 6)
    stop = int(made(model, text[:1], 1)[0, 0])
    assert int(made(model, text[1:, :3], 1)[0, 0]) != stop
    steps, step = [], model.step
    model.step = lambda token, cache: (steps.append(len(token)), step(token, cache))[1]
    found = made(model, [text[0].tolist(), text[1, :3].tolist()], 5, stop=stop)
    assert len(steps) == found.shape[1] - 1


def test_what_is_yielded_stays_as_it_was():
    tokens = list(generate(build(MODELS[0]), prompts(), 6))
    again = list(map(torch.clone, generate(build(MODELS[0]), prompts(), 6)))
    assert torch.equal(torch.stack(tokens), torch.stack(again))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1.0 must be 0 (the likeliest token) or a positive number"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"temperature": math.inf}, "temperature = inf"),
        ({"top_k": -2}, "top_k = -2 must be a whole number: 0 (all tokens) or how many to keep"),
        ({"top_k": 2.5}, "top_k = 2.5"),
        ({"top_p": 0.0}, "top_p = 0.0 must be above 0 and at most 1 (all tokens)"),
        ({"top_p": math.nan}, "top_p = nan"),
        ({"min_p": 1.5}, "min_p = 1.5 must lie between 0 (all tokens) and 1"),
        ({"tokens": 0}, "tokens = 0 must be at least 1"),
        ({"stop": 31}, "stop = 31 is not one of the model's 31 tokens (0 to 30)"),
        ({"prompt": torch.zeros(3, dtype=torch.long)}, "got shape (3,)"),
        ({"prompt": torch.zeros(3, 0, dtype=torch.long)}, "got shape (3, 0)"),
        ({"prompt": []}, "no prompt was given; give at least one prompt"),
        ({"prompt": [[1], []]}, "prompt 1 is empty"),
        ({"prompt": [[1], [2, 31]]}, "token 31 of a prompt is not one of the model's 31 tokens (0 to 30)"),
        ({"prompt": [[1, -1]]}, "token -1 of a prompt"),
        ({"prompt": [[1] * 41]}, "a prompt of 41 tokens is longer than the 40 this model learned positions for"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_is_generated(how, message):
    with pytest.raises(ValueError) as error:
        generate(build(MODELS[1]), **{"prompt": prompts(), "tokens": 4, **how})  # no token is asked for
    assert message in str(error.value)


def test_a_prompt_of_fractions_is_refused():
    with pytest.raises(TypeError) as error:
        generate(build(MODELS[0]), torch.rand(1, 3), 4)
    assert "whole numbers, got torch.float32" in str(error.value)


# -- text ----------------------------------------------------------------------------------------


class Bytes:
    """A token for each byte, and one for the end."""

    vocab, end = 257, 256

    def encode(self, text):
        return list(text.encode())

    def to_bytes(self, tokens):
        return bytes(tokens)


class Reciter:
    """A model that writes what it was told, whatever it reads."""

    def __init__(self, tokens, vocab=257):
        self.model = build(ModelConfig(vocab=vocab, layers=1, width=8, heads=1))
        self.said, self.read = [*tokens, 0], []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def answer(self, count):
        logits = torch.full((1, self.model.config.vocab), -20.0)
        logits[0, self.said[count]] = 20.0
        return logits, count + 1

    def prefill(self, tokens):
        self.read.append(tokens.tolist())
        return self.answer(0)

    def step(self, token, cache):
        assert int(token) == self.said[cache - 1]
        return self.answer(cache)


STORY = "Żółć, 水, naïve 🦊!"


def test_text_comes_in_whole_characters_as_soon_as_they_are_whole():
    model = Reciter([*STORY.encode(), 256])
    stream = stream_text(model, Bytes(), "Once", 100)
    assert list(stream) == list(STORY)
    assert model.read == [[list(b"Once")]]
    assert stream.ended
    assert stream.tokens == [*STORY.encode(), 256]


def test_a_text_that_is_cut_inside_a_character_ends_in_a_replacement():
    stream = stream_text(Reciter("ab🦊".encode()), Bytes(), "x", 5)
    assert "".join(stream) == "ab\ufffd"
    assert (stream.ended, len(stream.tokens)) == (False, 5)


def test_bytes_that_are_no_text_are_replaced_and_lose_nothing_around_them():
    said = [*b"a", 0xFF, *b"b", 0xF0, 0x9F, *b"c", 256]
    assert "".join(stream_text(Reciter(said), Bytes(), "x", 50)) == bytes(said[:-1]).decode(errors="replace") == "a�b�c"


def test_an_empty_prompt_starts_a_new_text():
    model = Reciter([*b"hi", 256])
    assert "".join(stream_text(model, Bytes())) == "hi"
    assert model.read == [[[256]]]


def test_text_depends_on_its_seed_and_equals_its_tokens():
    model = build(ModelConfig(vocab=257, layers=1, width=16, heads=2)).eval()
    streams = [stream_text(model, Bytes(), "fox", 60, top_k=40, seed=seed) for seed in (0, 0, 1)]
    texts = ["".join(stream) for stream in streams]
    assert texts[0] == texts[1] != texts[2]
    tokens = [int(token) for token in generate(model, [[*b"fox"]], 60, temperature=1.0, top_k=40, stop=256)]
    assert tokens == streams[0].tokens


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(ValueError) as error:
        stream_text(Reciter([], vocab=300), Bytes(), "x")
    assert str(error.value) == "the tokenizer has 257 tokens and the model 300; use the one it was trained with"
