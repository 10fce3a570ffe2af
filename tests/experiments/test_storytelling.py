"""A story is what the model would write without a cache, and ends where it ends."""

import json

import pytest
import torch
from tests.experiments.lm_examples import LENGTH, tiny

from compactattn.data.tokenizers import Bytes
from compactattn.experiments import language_modelling as lm
from compactattn.experiments.runs import open_run
from compactattn.experiments.storytelling import Teller, Wish, save_stories
from compactattn.models.generation import Sampling, TextStream
from compactattn.training import files


@pytest.mark.parametrize("model", ["mosaic", "transformer"])
def test_a_story_is_what_the_uncached_model_takes_for_the_likeliest(model, corpus, tmp_path):
    lm.run(tiny(corpus, model, "gaussian"), tmp_path / "run", show_progress=False)
    teller = Teller.open(tmp_path / "run", "cpu")
    prompt = "Once upon"
    wish = Wish(12, Sampling(), stop=False)
    told = teller.stream(prompt, wish)
    text = "".join(told)
    tokens = list(prompt.encode())
    for _ in range(12):
        with torch.no_grad():
            tokens.append(int(teller.trained.model(torch.tensor([tokens]))[0, -1].argmax()))
    assert told.tokens == tokens[len(prompt) :]
    assert text == Bytes().decode(told.tokens)
    together = teller.tell([prompt, "A"], wish)
    assert "".join(together[0]) == text
    assert together[0].tokens == told.tokens


def test_a_story_stops_at_its_end_or_goes_on_if_told_to(run, monkeypatch):
    teller = Teller.open(run, "cpu")
    weight = teller.trained.model.embedding.weight
    with torch.no_grad():  # the end token is the likeliest after anything
        weight[256] = 100 * teller.trained.model.hidden(torch.tensor([[65]]))[0, -1]
    assert "".join(teller.stream("A", Wish(5, Sampling()))) == ""
    going = teller.stream("A", Wish(2, Sampling(), stop=False))
    assert "".join(going).startswith("<|endoftext|>")
    assert len(going.tokens) == 2


def test_a_text_that_goes_on_after_its_end_has_ended():
    stream = TextStream(iter([*b"a", 256, *b"b"]), Bytes(), stop=False)
    assert "".join(stream) == "a<|endoftext|>b"
    assert stream.ended


def test_a_kill_while_stories_are_saved_leaves_those_before(tmp_path, monkeypatch):
    def die(*given):
        raise KeyboardInterrupt

    save_stories(tmp_path, [{"text": "one"}])
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", die)  # all has been written, but not in its place
        with pytest.raises(KeyboardInterrupt):
            save_stories(tmp_path, [{"text": "two"}])
    assert (tmp_path / "stories.jsonl").read_text() == '{"text": "one"}\n'
    save_stories(tmp_path, [{"text": "three"}])
    assert (tmp_path / "stories.jsonl").read_text() == '{"text": "one"}\n{"text": "three"}\n'


def test_learned_positions_bound_a_story_and_its_prompt(corpus, tmp_path):
    lm.run(tiny(corpus, "transformer", "gaussian", steps=2), tmp_path / "run", show_progress=False)
    teller = Teller.open(tmp_path / "run", "cpu")
    told = teller.stream("a" * 20, Wish(100, Sampling(), stop=False))
    assert len(list(told)) <= len(told.tokens) == LENGTH - 20 + 1
    with pytest.raises(ValueError) as error:
        teller.stream("a" * (LENGTH + 1), Wish(3))
    assert str(error.value) == "a prompt of 25 tokens is longer than the 24 this model learned positions for; shorten it"


def test_words_to_look_at_are_what_the_tokens_spell(corpus, run):
    config = open_run(run, "cpu").config
    tokens, words = lm.example(config)
    assert tokens == corpus.validation[:LENGTH].tolist()
    assert "".join(words) == Bytes().decode(tokens)
    assert lm.read(config, "a fox") == ([97, 32, 102, 111, 120], ["a", " ", "f", "o", "x"])
    with pytest.raises(ValueError, match="has no tokens"):
        lm.read(config, "")
    assert json.loads((run / "config.json").read_text())["data"]["corpus"] == "stories"
