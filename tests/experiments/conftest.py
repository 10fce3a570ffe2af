"""A small corpus, a longer one, and a tiny language model trained on the first."""

import pytest
from tests.experiments.lm_examples import make_corpus, tiny

from compactattn.experiments import language_modelling as lm


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpora") / "stories")


@pytest.fixture(scope="module")
def long_corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpora") / "many", stories=60)


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    lm.run(tiny(corpus), folder, show_progress=False)
    return folder
