"""Sentences about RegBench follow from the numbers, and say what is not known."""

import dataclasses
import re

from regbench_examples import make_all_runs, make_run
from report_examples import speak, tidy

from compactattn.report.evaluations import Reference
from compactattn.report.regbench_comparison import compare
from compactattn.report.regbench_finding import find, hold_against_paper, list_departures, list_epochs, list_gaps, list_kernels
from compactattn.training.config import vary

comparison_of, told = speak(compare, find)


def kernels(*runs):
    return [tidy(item) for item in list_kernels(comparison_of(*runs))]


GAUSSIAN = {"kernel": "gaussian"}
MAMBA = {"architecture": "mamba"}


def test_the_headline_is_the_best_compact_kernel_at_the_main_size():
    headline, details = told(
        make_run(0.95, 0.32), make_run(0.96, 0.16, examples=5000), make_run(0.945, 0.3, kernel="relumax"),
        make_run(0.94, 0.33, **GAUSSIAN), make_run(0.97, 0.15, examples=5000, **GAUSSIAN), make_run(0.7, 0.5, **MAMBA),
    )  # fmt: skip
    assert headline == (
        "With 1,000 training examples, sparsemax predicts a legal next token at 95.0 % of the positions of RegBench, "
        "Gaussian attention at 94.0 %; the best other architecture, Mamba, at 70.0 %."
    )
    assert (
        "Highest accuracy: sparsemax with 1,000 examples (95.0 %), Gaussian with 5,000 examples (97.0 %); "
        "lowest TVD: 1-ReLUmax with 1,000 examples (30.0 %), Gaussian with 5,000 examples (15.0 %)." in details
    )
    assert "ahead of Gaussian attention in accuracy: 2 of 2 with 1,000 examples, 0 of 1 with 5,000 examples." in details
    assert re.search(
        r"the best Memory Mosaic is 25.0 points ahead of Mamba with 1,000 examples \([\d,]+ parameters against [\d,]+\)\.",
        details,
    )
    assert "Every number is of a single seed: how much another would change it is not known" in details
    assert "chosen by these same numbers" in details


def test_a_gaussian_that_is_ahead_is_called_so():
    headline, _ = told(make_run(0.93, 0.3), make_run(0.94, 0.3, **GAUSSIAN))
    assert headline == (
        "With 1,000 training examples, no compact kernel is ahead of Gaussian attention: the best, sparsemax, predicts a legal "
        "next token at 93.0 % of the positions of RegBench, Gaussian attention at 94.0 %."
    )


def test_without_a_gaussian_the_best_speaks_for_itself():
    headline, details = told(make_run(0.93, 0.3), make_run(0.95, 0.3, **MAMBA))
    assert headline == "With 1,000 training examples, Mamba predicts a legal next token at 95.0 % of the positions of RegBench."
    assert "2.0 points behind Mamba with 1,000 examples" in details
    assert "ahead of Gaussian" not in details
    assert kernels(make_run()) == []


def test_the_headline_is_of_the_largest_size_that_all_lines_have():
    both = [make_run(0.95, examples=size) for size in (1000, 2500)]
    base = [make_run(0.94, examples=size, **GAUSSIAN) for size in (1000, 2500)]
    headline, _ = told(*both, *base, make_run(0.96, examples=5000))
    assert headline.startswith("With 2,500 training examples, sparsemax")


def test_what_shows_no_difference_is_called_equal():
    headline, details = told(make_run(0.9402, 0.3302), make_run(0.9398, 0.3298, **GAUSSIAN), make_run(0.9401, 0.4, **MAMBA))
    assert headline.startswith("With 1,000 training examples, no compact kernel is ahead of Gaussian attention")
    assert "ahead of Gaussian attention in accuracy: 0 of 1 with 1,000 examples" in details
    assert "the best Memory Mosaic is equal to Mamba with 1,000 examples" in details
    assert kernels(make_run(0.9402, 0.3302), make_run(0.9398, 0.3298, **GAUSSIAN)) == [
        "With 1,000 examples: 0 of 1 ahead in accuracy, the best, sparsemax, equal; "
        "0 of 1 ahead in TVD, the best, sparsemax, equal."
    ]


def test_every_size_is_held_against_the_best_n_gram():
    grams = {"references": (Reference("a 2-gram", 0.8, 0.3), Reference("a 3-gram", 0.936, 0.2))}
    shares = {1000: 0.92, 2500: 0.9364, 5000: 0.95}
    _, details = told(*(make_run(share, examples=size, score=grams) for size, share in shares.items()))
    assert (
        "Without any training a 3-gram reaches 93.6 %: with 1,000 examples no model does better (92.0 %), "
        "with 2,500 examples the best equals it (93.6 %), with 5,000 examples sparsemax does better (95.0 %)." in details
    )


def test_kernels_are_held_against_the_gaussian_in_both_measures():
    assert kernels(make_run(0.95, 0.34), make_run(0.93, 0.35, kernel="relumax"), make_run(0.94, 0.33, **GAUSSIAN)) == [
        "With 1,000 examples: 1 of 2 ahead in accuracy, the best, sparsemax, 1.0 points ahead; "
        "0 of 2 ahead in TVD, the best, sparsemax, 1.0 points behind."
    ]


def test_intervals_over_seeds_tell_a_difference_from_chance():
    apart = [make_run(0.95 + 0.001 * seed, seed=seed) for seed in range(3)]
    base = [make_run(0.9 + 0.001 * seed, seed=seed, **GAUSSIAN) for seed in range(3)]
    (item,) = kernels(*apart, *base)
    assert "5.0 points ahead (95 % intervals over 3 seeds: 94.9 to 95.3 % and 89.9 to 90.3 %, apart)" in item
    wide = [make_run(0.8 + 0.1 * seed, seed=seed) for seed in range(2)]
    (item,) = kernels(*wide, *base)
    assert "overlapping, so it may be chance" in item
    _, details = told(*apart, *base)
    assert "Every number is a mean over 3 seeds." in details
    _, details = told(*apart, base[0])
    assert "The numbers are of 1 to 3 seeds; differences between those of one may be chance." in details


def test_differences_to_the_paper_are_counted_and_listed_as_open_or_explained():
    recipe = {"rate": 1e-4, "final_rate": 1e-5, "decay": 0.01}
    gaussian = GAUSSIAN | recipe
    runs = make_run(0.942, 0.2, **recipe), make_run(0.8, 0.35, **gaussian), make_run(0.85, 0.2, examples=2500, **gaussian)
    comparison = comparison_of(*runs)
    assert hold_against_paper(comparison)[:2] == [
        "Of 6 means, 3 are within 2 points of the paper's, 2 are worse and 1 better.",
        "Further away: 3 (open: 3).",
    ]
    assert list_gaps(comparison) == ["Open. Gaussian (1,000 and 2,500 examples); sparsemax (1,000 examples)."]
    stopped = dataclasses.replace(runs[2], steps=1000)
    own = make_run(0.6, 0.65, architecture="h3", model={"form": "own"}, **recipe)
    other = make_run(0.938, 0.33, kernel="relumax", model={"persistent_dropout": 0.0}, **recipe)
    comparison = comparison_of(*runs[:2], stopped, own, other)
    kinds = "explained by code: 1, a different recipe: 1, explained by steps: 1, open: 2"
    assert hold_against_paper(comparison)[1] == f"Further away: 5 ({kinds})."
    assert list_gaps(comparison) == [
        "Explained by code: this model is of our own form, not of the benchmark's. H3, own form (1,000 examples).",
        "Open. Gaussian (1,000 examples); sparsemax (1,000 examples).",
        "Explained by steps: a run was stopped before its end. Gaussian (2,500 examples).",
        "A different recipe: no dropout on persistent weights (0.05 in the paper). 1-ReLUmax (1,000 examples).",
    ]


def test_where_the_paper_has_no_such_numbers_nothing_is_held_against_it():
    other = comparison_of(make_run(0.1, changes={"states": 5}))
    assert hold_against_paper(other) == list_gaps(other) == []


def test_other_ways_to_count_are_told():
    sentence = hold_against_paper(comparison_of(make_run(0.94, 0.33)))[-1]
    assert sentence == (
        "Accuracies count every position; at the last token alone, as the paper's text has it, they move by +2.0 points; "
        "without the positions before a separator, they move by −1.0 points."
    )
    bare = comparison_of(make_run(score={"last": None, "inside": None}))
    assert not any("count every" in text for text in hold_against_paper(bare))


def test_departures_name_both_numbers():
    notes = list_departures(
        comparison_of(make_run(epochs=20, rate=1e-4, decay=0.3, changes={"string_length": [1, 12], "seed": 5}))
    )
    assert notes == [
        "seed of the languages: 5; in the benchmark 0",
        "letters of a string: 1 to 12; in the benchmark 1 to 49",
        "epochs at most: 20; in the paper 200",
        "weight decay: 0.3; in the paper 0.1 or 0.01",
        "samples of a test: 500; in the paper 1,000",
    ]
    undropped = {"attention_dropout": 0.0, "persistent_dropout": 0.0}
    transformer = make_run(rate=1e-3, architecture="transformer", kernel="gaussian", model={"attention_dropout": 0.0})
    mamba = make_run(architecture="mamba")  # one layer, and no dropout: as the benchmark has it
    assert list_departures(comparison_of(make_run(model=undropped), transformer, mamba)) == [
        "learning rate: 0.0005 and 0.001; in the paper 0.0005 or 0.0001",
        "dropout on contextual weights: 0.0; in the paper 0.05",
        "dropout on persistent weights: 0.0; in the paper 0.05",
        "attention dropout of the Transformer: 0.0; in the paper 0.1",
        "samples of a test: 500; in the paper 1,000",
    ]


def test_epochs_done_and_evaluated_are_told():
    short = dataclasses.replace(make_run(seed=1), steps=3100)
    sizes = make_run(), short, make_run(examples=2500, kernel="gaussian")
    assert list_epochs(comparison_of(*sizes)) == [
        "With 1,000 examples: sparsemax: 99 to 200 (97), 10 min.",
        "With 2,500 examples: Gaussian: 200 (97), 10 min.",
    ]


def test_a_run_that_lost_patience_was_not_interrupted():
    run = make_run(patience=10)
    early = dataclasses.replace(run, steps=3100, validations=run.validations[:100])
    patient = "training stops 10 epochs after its lowest validation loss; the paper has no such stop"
    assert patient in list_departures(comparison_of(early))
    assert not any("stopped" in note for note in list_departures(comparison_of(early)))
    killed = dataclasses.replace(early, validations=run.validations[:30])
    assert "sparsemax, 1,000 examples, seed 0, stopped after 3,100 of its 6,250 steps" in list_departures(comparison_of(killed))


def test_a_run_that_lost_patience_while_its_loss_fell_is_named():
    run = make_run(patience=4)
    losses = (1.5, 1.9, 1.8, 1.7, 1.6)
    early = dataclasses.replace(run, steps=155, validations=[(31 * (n + 1), loss) for n, loss in enumerate(losses)])
    note = "ended by patience while the validation loss was falling: sparsemax with 1,000 examples"
    note += " (the last were 1.900, 1.800, 1.700, 1.600; the lowest was 1.500)"
    assert note in list_departures(comparison_of(early))
    for other in (
        dataclasses.replace(early, steps=6250),  # came to its end
        dataclasses.replace(early, validations=[*early.validations, (186, 1.65)]),
    ):
        assert not any("falling" in note for note in list_departures(comparison_of(other)))


def test_what_the_published_code_computes_is_no_rival_of_gaussian_attention():
    base, rival = make_run(0.9, **GAUSSIAN), make_run(0.91, kernel="norm_relu")
    released = dataclasses.replace(rival, config=vary(rival.config, model={"as_released": "efficient"}))
    assert "1 of 1 with 1,000 examples" in told(base, rival, released)[1]


def test_a_run_that_diverged_is_named_and_not_called_missing():
    failed = dataclasses.replace(make_run(evaluated=False, seed=1, **GAUSSIAN), failed="diverged at step 412, loss nan")
    comparison = comparison_of(make_run(), failed)
    assert "Gaussian, 1,000 examples, seed 1, diverged at step 412, loss nan" in list_departures(comparison)
    assert "Gaussian" not in comparison.not_run()
    assert "Gaussian" in comparison_of(make_run()).not_run()


def test_runs_judged_on_different_test_sets_are_told():
    notes = list_departures(comparison_of(make_run(), make_run(score={"checksum": "ab"}, **GAUSSIAN)))
    assert "examples 1000: the runs were judged on 2 different test sets" in notes


def test_all_rows_of_the_paper_make_one_finding():
    headline, details = told(*make_all_runs(seeds=2))
    assert headline.startswith("With 5,000 training examples, ")
    assert "of 9 with 5,000 examples" in details
