"""Sentences about language modelling follow from the numbers, and say what is not known."""

import dataclasses
import re

import pytest
from lm_examples import make_all_runs, make_failed, make_row, make_run
from report_examples import speak, tidy
from tests.experiments.lm_examples import make_corpus

from compactattn.experiments import language_modelling as lm
from compactattn.report import lm_finding, lm_paper
from compactattn.report.lm_comparison import compare
from compactattn.report.lm_finding import find, hold_against_paper, list_departures, list_kernels, rank
from compactattn.report.runs import Cost, Run
from compactattn.training.config import vary

GAUSSIAN = {"kernel": "gaussian"}
TRANSFORMER = {"kernel": "gaussian", "architecture": "transformer"}


comparison_of, told = speak(compare, find)


def seeds(loss, spread, count=3, **config):
    return [make_run(loss + spread * (seed - 1), seed=seed, **config) for seed in range(count)]


def test_the_headline_is_the_best_compact_kernel_against_the_gaussian():
    headline, details = told(
        make_run(2.5, layers=8), make_run(2.55, layers=8, kernel="biweight"), make_run(2.52, layers=8, **GAUSSIAN),
        make_run(2.49, layers=8, **TRANSFORMER),
    )  # fmt: skip
    assert headline == (
        "With 8 layers, sparsemax predicts held-out stories (BabiStories substitute) at 2.500 nats a token, "
        "Gaussian attention at 2.520 (one seed each); the Transformer, at 2.490, is ahead of every Memory Mosaic."
    )
    behind = told(make_run(2.5), make_run(2.52, **GAUSSIAN), make_run(2.51, **TRANSFORMER))[0]
    assert behind.endswith("Gaussian attention at 2.520 (one seed each).")
    assert details.startswith(
        "Compact kernels ahead of Gaussian attention: 1 of 2 on validation, 1 of 2 on Simple English Wikipedia, "
        "1 of 2 on TinyStories. Against the Transformer, the best Memory Mosaic is 0.010 behind on validation (sparsemax), "
    )
    assert "Every number is of a single seed: how much another would change it is not known" in details
    assert "chosen by these same numbers" in details
    assert "risen again" not in details


def test_another_output_layer_is_told_beside_the_own_and_is_no_contestant():
    runs = make_run(3.0), make_run(3.1, **GAUSSIAN), make_run(2.6, rate=1e-3, **TRANSFORMER)
    plain, scaled = make_run(2.5), make_run(3.4, rate=1e-3, **TRANSFORMER)
    plain = dataclasses.replace(plain, config=vary(plain.config, model={"output": "plain"}))
    scaled = dataclasses.replace(scaled, config=vary(scaled.config, model={"output": "scaled"}))
    headline, details = told(*runs, plain, scaled)
    assert "sparsemax predicts" in headline
    assert "at 3.000 nats a token" in headline
    assert headline.endswith("; sparsemax, plain output, is ahead of all at 2.500.")
    assert "Against the Transformer, each with its own output layer, the best Memory Mosaic is 0.400 behind" in details
    close = dataclasses.replace(plain, evaluation=[make_row(2.61)])
    assert told(*runs, close)[0].endswith(
        "the Transformer, at 2.600, is ahead of every Memory Mosaic, of the best with its output layer"
        " (sparsemax, plain output, 2.610) by 0.010."
    )
    changed = "sparsemax, plain output: with an output layer that is not the paper's"
    assert changed in list_departures(comparison_of(*runs, plain))
    assert changed not in list_departures(comparison_of(*runs))
    assert "1 of 1 on validation" in details
    assert "the best Memory Mosaic is 0.400 behind on validation (sparsemax)" in details
    assert (
        "With the other's, sparsemax, plain output is at 2.500, 0.500 ahead of its own;"
        " Transformer, scaled output is at 3.400, 0.800 behind its own."
    ) in tidy(details)
    assert "output layers" not in told(*runs)[1]
    assert "its embedding starts as N(0, 1/width) (scaled)" in details
    former = [dataclasses.replace(run, config=vary(run.config, model={"start": "former"})) for run in runs[:2]]
    assert "its embedding starts as N(0, 1) (scaled)" in told(*former, runs[2], plain)[1]


def test_an_output_layer_that_all_mosaics_share_is_of_the_setting_and_keeps_no_kernel_from_the_contest():
    runs = [make_run(3.0), make_run(3.1, **GAUSSIAN), make_run(2.9, **TRANSFORMER)]
    plain = [dataclasses.replace(run, config=vary(run.config, model={"output": "plain"})) for run in runs]
    assert told(*plain) == told(*runs)
    notes, usual = list_departures(comparison_of(*plain)), list_departures(comparison_of(*runs))
    assert [note for note in notes if note not in usual] == ["output layer: plain; in the paper scaled"]
    assert [line.label for line in comparison_of(*plain).lines] == ["Gaussian", "sparsemax", "Transformer"]
    quick = dataclasses.replace(plain[0], config=vary(plain[0].config, training={"rate": 2e-3}))
    assert [line.label for line in comparison_of(plain[0], quick).lines] == ["sparsemax, rate 0.002", "sparsemax, rate 0.005"]
    mixed = [line.label for line in comparison_of(*runs, *plain[:1]).lines]
    assert mixed == ["Gaussian", "sparsemax", "Transformer", "sparsemax, plain output"]


def test_the_way_to_the_transformer_is_told_where_training_is_short():
    def run(losses, **config):
        steps = {"steps": 400, "batch": 4, "rows": [make_row(losses[-1])]}
        made = make_run(losses[-1], **steps, **config)
        return dataclasses.replace(made, validations=list(zip((100, 200, 300, 400), losses, strict=True)))

    transformer = run((5.0, 3.0, 3.0, 2.8), **TRANSFORMER)
    _, details = told(run((9.0, 3.2, 3.1, 2.9)), run((8.0, 3.2, 3.1, 3.0), kernel="biweight"), transformer)
    assert (
        "This is after 0.0039 % of the paper's tokens. In validations during training sparsemax was 4.000 behind at step 100, "
        "0.200 behind at step 200, 0.100 behind at step 400."
    ) in tidy(details)
    ahead = told(run((4.0, 3.0, 3.1, 2.7)), transformer)[1]
    assert "sparsemax was 1.000 ahead at step 100, equal at step 200, 0.100 ahead at step 400." in ahead
    whole = {"steps": lm_paper.STEPS, "batch": lm_paper.BATCH}
    for runs in ([run((9.0, 3.2, 3.1, 2.9))], [transformer], [make_run(**whole), make_run(**whole, **TRANSFORMER)]):
        assert "This is after" not in told(*runs)[1]
    bare = [dataclasses.replace(one, validations=[]) for one in (make_run(), make_run(**TRANSFORMER))]
    assert "This is after" not in told(*bare)[1]


def test_a_gaussian_that_is_ahead_is_called_so():
    headline, details = told(make_run(2.5), make_run(2.4, **GAUSSIAN))
    assert headline == (
        "With 1 layer, no compact kernel is ahead of Gaussian attention: the best, sparsemax, predicts held-out stories "
        "(BabiStories substitute) at 2.500 nats a token, Gaussian attention at 2.400 (one seed each)."
    )
    assert "0 of 1 on validation" in details


def test_without_a_gaussian_the_best_speaks_for_itself():
    headline, details = told(make_run(2.5), make_run(2.4, **TRANSFORMER))
    assert headline == "With 1 layer, Transformer predicts held-out stories (BabiStories substitute) at 2.400 nats a token."
    assert "ahead of Gaussian" not in details
    assert list_kernels(comparison_of(make_run())) == []


def test_a_difference_smaller_than_the_spread_of_seeds_is_called_so():
    headline, details = told(*seeds(2.5, 0.02), *seeds(2.51, 0.02, **GAUSSIAN))
    assert headline.endswith("Gaussian attention at 2.510, no further apart than seeds explain.")
    assert "1 of 1 on validation (0 by more than seeds explain)" in details
    assert "The numbers are of 3 seeds; what seeds explain is judged at 95 %" in details
    headline, details = told(*seeds(2.4, 0.02), *seeds(2.51, 0.02, **GAUSSIAN))
    assert headline.endswith("Gaussian attention at 2.510, further apart than seeds explain.")
    assert "1 of 1 on validation (1 by more than seeds explain)" in details


def test_the_spread_of_some_judges_a_single_seed_of_another():
    headline, details = told(make_run(2.5), *seeds(2.51, 0.02, **GAUSSIAN))
    assert headline.endswith("no further apart than seeds explain.")
    assert "The numbers are of 1 to 3 seeds" in details


def test_every_split_is_ranked_and_ties_are_named():
    items = rank(comparison_of(*seeds(2.5, 0.02), *seeds(2.51, 0.02, **GAUSSIAN), make_run(3.5, kernel="norm_relu")))
    assert items[0] == (
        "Validation: sparsemax (2.500), Gaussian (2.510), normReLU (3.500). "
        "No further from the first than seeds explain: Gaussian."
    )
    assert items[1].startswith("Simple English Wikipedia: sparsemax (4.900), ")
    alone = rank(comparison_of(make_run(2.5), make_run(2.5001, **GAUSSIAN)))
    assert alone[0] == "Validation: sparsemax (2.500), Gaussian (2.500)."


def test_kernels_are_held_against_the_gaussian_on_every_split():
    away = [make_row(2.6), make_row(4.7, "simplewiki")]
    items = list_kernels(
        comparison_of(make_run(2.5), make_run(2.7, kernel="relumax"), make_run(rows=away, stories=False, **GAUSSIAN))
    )
    assert items == [
        "Validation (Gaussian 2.600): the best, sparsemax, is 0.100 ahead; the last, 1-ReLUmax, 0.100 behind.",
        "Simple English Wikipedia (Gaussian 4.700): the best, sparsemax, is 0.200 behind; the last, 1-ReLUmax, 0.400 behind.",
    ]
    (item, *_) = list_kernels(comparison_of(*seeds(2.5, 0.02), *seeds(2.51, 0.02, **GAUSSIAN)))
    assert item.endswith("is 0.010 ahead (no more than the 0.045 that seeds explain).")
    (item, *_) = list_kernels(comparison_of(make_run(2.5), make_run(2.5, **GAUSSIAN)))
    assert item.endswith("the best, sparsemax, is equal.")


def test_a_validation_loss_that_rose_again_is_told():
    _, details = told(make_run(2.5, end=0.2), make_run(2.6, **GAUSSIAN))
    assert (
        "By the end of training the validation loss had risen again for sparsemax (from 2.505 at step 1,900 to 2.700)."
        in details
    )
    many = [make_run(2.5, end=0.2, kernel=kernel) for kernel in ("gaussian", "sparsemax", "biweight", "triweight", "relumax")]
    assert "and 2 more." in told(*many)[1]


def test_a_run_that_diverged_is_told():
    _, details = told(make_run(2.5), make_run(2.6, **GAUSSIAN), make_failed(kernel="biweight"), make_failed(seed=1))
    assert (
        "Failed in training: sparsemax (seed 1 diverged at step 400, loss nan), 1.5-entmax (diverged at step 400, loss nan)."
        in details
    )


# -- beside the paper ----------------------------------------------------------------------------


def test_claims_of_the_paper_are_counted_in_pairs_at_their_depth():
    runs = [
        make_run(2.5),
        make_run(2.7, kernel="triweight"),
        make_run(2.6, **GAUSSIAN),
        make_run(2.65, kernel="topk_softmax(64)"),
    ]
    items = hold_against_paper(comparison_of(*runs))
    assert items[0] == (
        "The paper: with one layer, compact kernels of adaptive bandwidth have a lower validation loss than Gaussian attention "
        "and top-k. Here: holds for 2 of 4 pairs; the best of each: sparsemax 2.500, Gaussian 2.600."
    )
    assert not any("8 layers" in item or "12 layers" in item for item in items)
    assert not any("normReLU" in item for item in items)  # which was not run
    deep = hold_against_paper(comparison_of(*(dataclasses.replace(run, config=_deepen(run.config, 12)) for run in runs)))
    assert deep[0] == (
        "The paper: with 12 layers, all but normReLU and uniform kNN reach roughly the same validation loss. "
        "Here: they lie between sparsemax (2.500) and 4/3-entmax (2.700), 0.200 apart."
    )


def test_claims_are_judged_with_the_best_k_of_each_kind():
    losses = {"topk_softmax(16)": 2.4, "topk_softmax(32)": 2.6, "topk_uniform(32)": 2.55, "topk_uniform(64)": 2.45}
    tops = [make_run(loss, kernel=kernel) for kernel, loss in losses.items()]
    first, *_ = hold_against_paper(comparison_of(make_run(2.5), make_run(2.52, **GAUSSIAN), *tops))
    assert first.endswith(
        "holds for 1 of 3 pairs with the best k; the best of each: sparsemax 2.500, Gaussian kNN, k=16 2.400."
    )
    one = hold_against_paper(comparison_of(make_run(2.5), make_run(2.52, **GAUSSIAN), tops[0], tops[2]))
    assert "holds for 2 of 3 pairs; " in one[0]
    deep = [dataclasses.replace(run, config=_deepen(run.config, 12)) for run in (make_run(2.5), *tops)]
    (claim,) = (item for item in hold_against_paper(comparison_of(*deep)) if "roughly the same" in item)
    assert claim.endswith("between Gaussian kNN, k=16 (2.400) and sparsemax (2.500), 0.100 apart with the best k.")
    assert not any("with the best k" in item for item in hold_against_paper(comparison_of(*deep)) if item != claim)


def _deepen(config, layers):
    return dataclasses.replace(config, model=dataclasses.replace(config.model, layers=layers))


def test_the_start_of_a_window_is_judged_by_its_first_positions_alone():
    items = hold_against_paper(comparison_of(make_run(2.5, kernel="biweight", early=0.5), make_run(2.55, **GAUSSIAN)))
    (item,) = [item for item in items if "start from" in item]
    assert "Here: holds for 0 of 1 pairs over the first 32 tokens" in item
    items = hold_against_paper(comparison_of(make_run(2.6, kernel="biweight", early=-0.5), make_run(2.55, **GAUSSIAN)))
    assert any("holds for 1 of 1 pairs over the first 32 tokens" in item for item in items)


def test_kernels_of_every_normalisation_are_held_against_the_gaussian_away_from_home():
    away, start = (
        next(claim for claim in lm_paper.CLAIMS if words in claim.text) for words in ("are comparable to", "start from")
    )
    compact = {*lm_paper.NORM_RELU, *lm_paper.ADAPTIVE, *lm_paper.ANCHORED}
    assert set(away.lower) == compact | set(lm_paper.GAUSSIAN)
    assert {lm_paper.ROWS[variant].split()[0] for variant in start.lower} == {"Biweight", "Triweight"}
    assert {*start.lower, *start.beside} == compact
    runs = [make_run(2.5, kernel="relumax(r=2)", rate=1e-3), make_run(2.6), make_run(2.65, **GAUSSIAN)]
    (item,) = [item for item in hold_against_paper(comparison_of(*runs)) if "are comparable to" in item]
    assert item.endswith(
        "they lie between 2-ReLUmax (4.900) and Gaussian (5.050), 0.150 apart; 2-ReLUmax had a learning rate of 0.001 and "
        "not 0.005; the others lie between sparsemax (5.000) and Gaussian (5.050), 0.050 apart."
    )


def test_an_epanechnikov_kernel_that_starts_lowest_is_told():
    def start(loss, **config):
        named = make_run(2.55, kernel="relumax(r=2)"), make_run(2.6, **GAUSSIAN)
        items = hold_against_paper(comparison_of(make_run(loss, kernel="relumax(r=1)", **config), *named))
        (item,) = [item for item in items if "start from" in item]
        assert "holds for 1 of 1 pairs over the first 32 tokens" in item
        return item

    assert re.search(r"Gaussian \d\.\d{3}; lower than all of these: 1-ReLUmax \(\d\.\d{3}\)\.$", start(2.5))
    assert start(2.5, rate=1e-3).endswith("; 1-ReLUmax had a learning rate of 0.001 and not 0.005.")
    for loss in (2.55, 2.57, 2.7):
        assert "lower than all" not in start(loss)


def test_the_published_loss_stands_beside_a_note_that_ours_is_another_corpus():
    told = " ".join(map(tidy, lm_finding.state_published(comparison_of(make_run(layers=12)))))
    assert "about 1.50 after 80,000 steps" in told
    assert "on another corpus, stories (BabiStories substitute), and after 0.31 % of its 20,971,520,000 tokens" in told
    assert "about 1.50" not in " ".join(lm_finding.state_published(comparison_of(make_run())))


def test_departures_name_both_numbers():
    notes = [tidy(note) for note in list_departures(comparison_of(make_run(rate=1e-3, width=384)))]
    assert notes == [
        "corpus: stories (BabiStories substitute); in the paper BabiStories",
        "steps: 2,000; in the paper 80,000",
        "batch: 64; in the paper 512",
        "warm-up steps: 200; in the paper 2,000",
        "slots of persistent memory: 1,344; in the paper 2,688",
        "width: 384; in the paper 768",
        "learning rate: 0.001; in the paper 0.005",
        "tokens seen: at most 65,536,000, 0.31 % of the paper's 20,971,520,000",
    ]


def test_a_rate_that_the_paper_lowered_too_is_no_departure():
    lowered = {"layers": 8, "rate": 1e-3, "final_rate": 5e-5}
    assert not any("rate" in note for note in list_departures(comparison_of(make_run(kernel="relumax(r=2)", **lowered))))
    assert any("rate" in note for note in list_departures(comparison_of(make_run(**lowered))))
    kept = list_departures(comparison_of(make_run(kernel="relumax(r=2)", layers=8)))
    assert {"learning rate: 0.005; in the paper 0.001", "last learning rate: 0.0001; in the paper 0.00005"} <= set(kept)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"final_rate": 5e-5}, "last learning rate: 0.00005; in the paper 0.0001"),
        ({"dropout": 0.0}, "dropout: 0.0; in the paper 0.05"),
        ({"attention_dropout": 0.0}, "dropout on contextual weights: 0.0; in the paper 0.05"),
        ({"persistent_dropout": 0.0}, "dropout on persistent weights: 0.0; in the paper 0.05"),
        ({"clip": 0.0}, "largest norm of a gradient: 0.0; in the paper 1.0"),
        ({"betas": (0.8, 0.95)}, "first beta of AdamW: 0.8; in the paper 0.9"),
        ({"keep": "best"}, "judged by the weights of the lowest validation loss; in the paper by the last ones"),
        ({"kernel": "topk_softmax(16)"}, None),
        ({"kernel": "topk_softmax(8)"}, "k of the nearest neighbours: 8; in the paper 16 or 32 or 64"),
        ({"kernel": "topk_softmax(16)", "layers": 8}, "k of the nearest neighbours: 16; in the paper 32"),
    ],
)
def test_each_departure_is_told(change, note):
    usual = list_departures(comparison_of(make_run(layers=change.get("layers", 1))))
    assert set(list_departures(comparison_of(make_run(**change)))) - set(usual) == ({note} if note else set())


def test_two_settings_are_both_named_and_more_by_their_ends():
    runs = [make_run(layers=8, kernel=f"topk_softmax({k})") for k in (8, 16, 64)]
    assert "k of the nearest neighbours: 8 and 16; in the paper 32" in list_departures(comparison_of(*runs[:2]))
    assert "k of the nearest neighbours: 8 to 64; in the paper 32" in list_departures(comparison_of(*runs))


NO_TRANSFORMER = "Transformer: not in the paper's experiment"


def test_beside_mosaics_the_transformer_departs_by_being_there():
    both = list_departures(comparison_of(make_run(), make_run(rate=2e-3, keep="best", **TRANSFORMER)))
    assert [note for note in both if note != NO_TRANSFORMER] == list_departures(comparison_of(make_run()))
    assert NO_TRANSFORMER in both


def test_a_transformer_alone_is_held_against_the_recipe_of_the_mosaics():
    notes = list_departures(comparison_of(make_run(width=384, dropout=0.0, keep="best", **TRANSFORMER)))
    assert notes == [
        "corpus: stories (BabiStories substitute); in the paper BabiStories",
        NO_TRANSFORMER,
        "steps: 2,000; in the paper 80,000",
        "batch: 64; in the paper 512",
        "warm-up steps: 200; in the paper 2,000",
        "dropout: 0.0; in the paper 0.05",
        "width: 384; in the paper 768",
        "judged by the weights of the lowest validation loss; in the paper by the last ones",
        "tokens seen: at most 65,536,000, 0.31\u00a0% of the paper's 20,971,520,000",
    ]


def test_a_transformer_of_another_size_is_called_so_where_it_is_compared():
    small, large = make_run(2.5, width=768), make_run(2.4, width=768, **TRANSFORMER)
    assert "Against the Transformer, the best Memory Mosaic is 0.100 behind" in told(small, large)[1]  # within a tenth
    _, details = told(make_run(2.5, width=96), make_run(2.4, width=192, **TRANSFORMER))
    assert re.search(r"the best Memory Mosaic, of [\d,]+ parameters against [\d,]+, is 0.100 behind on validation", details)


def test_what_shows_no_difference_is_called_equal():
    headline, details = told(make_run(2.5001), make_run(2.5004, **GAUSSIAN), make_run(2.5002, **TRANSFORMER))
    assert "no compact kernel is ahead of Gaussian attention" in headline
    assert "Compact kernels ahead of Gaussian attention: 0 of 1 on validation" in details
    assert "the best Memory Mosaic is equal on validation" in details


@pytest.mark.parametrize("layers", [1, 8, 12])
def test_the_paper_preset_departs_in_its_corpus_alone(layers, tmp_path):
    corpus = make_corpus(tmp_path / "stories", stories=60)
    models = [("transformer", "gaussian"), *(("mosaic", str(v.kernel)) for v in lm_paper.DRAWN)]
    configs = [lm.paper(corpus, model, kernel, layers) for model, kernel in models]
    runs = [Run(config, {}, 80_000, Cost(), [], [make_row(step=80_000, precision="bf16")]) for config in configs]
    assert list_departures(comparison_of(*runs)) == [
        "corpus: stories (BabiStories substitute); in the paper BabiStories",
        NO_TRANSFORMER,
    ]


def test_the_best_k_is_stated_where_several_were_run():
    losses = {"topk_softmax(16)": 2.52, "topk_softmax(32)": 2.53, "topk_uniform(32)": 2.7, "topk_uniform(64)": 2.6}
    _, details = told(make_run(), *(make_run(loss, kernel=kernel) for kernel, loss in losses.items()))
    assert (
        "The best k on validation: 16 for Gaussian kNN (16: 2.520, 32: 2.530) and 64 for uniform kNN (32: 2.700, 64: 2.600); "
        "in the paper 32." in details
    )
    assert "best k" not in told(make_run(), make_run(kernel="topk_softmax(16)"))[1]


def test_rises_of_the_validation_loss_are_told_of_every_line_at_every_depth():
    def shake(run, every):
        return dataclasses.replace(run, validations=[(at, loss + 2.0 * (at % every == 0)) for at, loss in run.validations])

    for layers in (1, 8):
        steady, shaky = make_run(layers=layers), make_run(layers=layers, kernel="relumax(r=2)")
        _, details = told(steady, shake(shaky, 600))
        assert (
            "From one validation to the next the loss rose 3 of 19 times with 2-ReLUmax, and never with the others." in details
        )
        assert "From one validation to the next no loss rose." in told(steady, shaky)[1]
        both = told(steady, shake(shaky, 600), shake(make_run(layers=layers, kernel="relumax(r=2)", seed=1), 400))
        assert "the loss rose 8 of 38 times with 2-ReLUmax" in both[1]
    everyone = told(shake(make_run(), 600), shake(make_run(kernel="biweight"), 600))[1]
    assert "the loss rose 3 of 19 times with sparsemax, 3 of 19 times with 1.5-entmax." in everyone
    assert "one validation to the next" not in told(dataclasses.replace(make_run(), validations=[(100, 3.0)]))[1]


def test_instability_is_counted_in_rises_of_the_validation_loss():
    shaky = make_run(kernel="topk_softmax(32)", layers=8)
    up_and_down = [(step, loss + 2.0 * (step % 400 == 0)) for step, loss in shaky.validations]
    items = hold_against_paper(
        comparison_of(dataclasses.replace(shaky, validations=up_and_down), make_run(layers=8, **GAUSSIAN))
    )
    (item,) = [item for item in items if "mild instability" in item]
    assert item.endswith(
        "from one validation to the next the loss rose 0 of 19 times with Gaussian, 5 of 19 times with Gaussian kNN, k=32."
    )
    assert not any("instability" in item for item in hold_against_paper(comparison_of(make_run(layers=8, **GAUSSIAN))))


def test_runs_judged_on_different_text_or_stopped_early_are_told():
    stopped = dataclasses.replace(make_run(**GAUSSIAN), steps=900)
    notes = list_departures(comparison_of(make_run(rows=[make_row(checksum="ab")]), stopped))
    assert "split validation: the runs were judged on 2 different test sets" in notes
    assert "Gaussian, seed 0, stopped after 900 of its 2,000 steps" in notes


def test_relumax_is_held_against_compact_kernels_alone_away_from_home():
    (claim,) = (claim for claim in lm_paper.CLAIMS if "ReLUmax is the best" in claim.text)
    assert claim.split == lm_paper.AWAY
    assert all(variant.compact for variant in claim.lower + claim.higher)
    assert set(claim.higher) == set(lm_paper.NORM_RELU + lm_paper.ADAPTIVE)


def test_the_papers_claims_name_variants_that_have_a_row():
    for claim in lm_paper.CLAIMS:
        assert set(claim.lower) | set(claim.higher) <= set(lm_paper.ROWS), claim.text
        assert not set(claim.lower) & set(claim.higher)
        assert set(claim.layers) <= set(lm.RATES)
    assert len(lm_paper.DRAWN) == 10
    assert lm_paper.TOKENS == 80_000 * 512 * 512


@pytest.mark.parametrize("count", [1, 2])
def test_all_rows_make_a_finding_at_each_depth(count):
    shallow, deep = compare(make_all_runs(seeds=count))
    assert find(shallow).headline.startswith("With 1 layer, ")
    assert find(deep).headline.startswith("With 8 layers, ")
    assert len(rank(deep)) == 3
    assert len(hold_against_paper(deep)) == 8
