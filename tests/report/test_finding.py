"""Sentences follow from the numbers: whoever is ahead, by how much, and how sure that is."""

import dataclasses

import pytest
from report_examples import make_run, speak, tidy

from compactattn.report.comparison import compare
from compactattn.report.finding import find, find_baseline, hold_against_paper, list_departures
from compactattn.training.config import vary

comparison_of, told = speak(compare, find)


SPARSE = {64: 0.99, 128: 0.95, 256: 0.9, 512: 0.74}
GAUSSIAN = {64: 0.96, 128: 0.9, 256: 0.6, 512: 0.13}


def test_the_headline_names_the_length_of_the_largest_lead():
    headline, details = told(
        make_run(SPARSE), make_run(GAUSSIAN, kernel="gaussian"), make_run({64: 1, 512: 0.1}, kernel="relumax")
    )
    assert (
        headline
        == "At 8× the training length, sparsemax gets 74 % of MQMTAR samples exactly right; Gaussian attention gets 13 %."
    )
    assert "1 of the 2 compact kernels is ahead of Gaussian attention at 8×." in details
    assert "The 95 % intervals of the two in the headline (71 % to 77 % and 11 % to 15 %) do not overlap" in details
    assert "from a single seed, which says nothing about other seeds" in details
    assert "Every variant has learnt the task itself: at the training length the least is 96 %." in details


def test_a_variant_that_beats_both_is_not_passed_over():
    transformer = make_run({64: 1, 512: 0.9}, kernel="gaussian", architecture="transformer", positions="alibi")
    _, details = told(make_run(SPARSE), make_run(GAUSSIAN, kernel="gaussian"), transformer)
    assert "Best of all there is Transformer, ALiBi with 90 %." in details


def test_a_lead_at_the_training_length_is_no_lead():
    headline, _ = told(make_run({64: 1.0, 128: 0.3}), make_run({64: 0.95, 128: 0.4}, kernel="gaussian"))
    assert headline.startswith("No compact kernel is ahead of Gaussian attention past the training length: at 2×")
    assert headline.endswith("the best, sparsemax, gets 30 % of MQMTAR samples exactly right, Gaussian attention 40 %.")


def test_what_shows_no_difference_is_no_lead():
    headline, details = told(
        make_run({64: 1, 128: 0.304}),
        make_run({64: 1, 128: 0.302}, kernel="gaussian"),
        make_run({64: 1, 128: 0.303}, kernel="relumax"),
    )
    assert headline.startswith("No compact kernel is ahead of Gaussian attention past the training length")
    assert "0 of the 2 compact kernels are ahead" in details


def test_a_variant_that_has_not_learnt_the_task_is_no_rival():
    headline, details = told(
        make_run({64: 0.89, 128: 0.9}, kernel="relumax"),
        make_run({64: 0.95, 128: 0.6}),
        make_run({64: 0.9, 128: 0.2}, kernel="entmax(1.5)"),
        make_run({64: 1, 128: 0.5}, kernel="gaussian"),
    )
    assert headline.startswith("At 2× the training length, sparsemax gets 60 % of MQMTAR")
    assert "1 of the 2 compact kernels that have learnt the task is ahead of Gaussian attention at 2×." in details
    assert "Best of all" not in details


def test_a_baseline_that_has_not_learnt_the_task_is_named_and_nothing_is_held_against_it():
    headline, details = told(
        make_run({64: 0.95, 128: 0.7, 256: 0.5, 512: 0.4}),
        make_run({64: 0.91, 128: 0.9, 256: 0.3}, kernel="relumax"),
        make_run({64: 0.74, 128: 0.1}, kernel="gaussian"),
    )
    assert headline == (
        "After 2,000 steps Gaussian attention has not yet learnt MQMTAR (74 %), so nothing can be said about extrapolation "
        "against it; of the 2 variants that have, sparsemax carries furthest, with 50 % at 4× the training length."
    )
    assert details.startswith("Of those that have learnt the task, at 4×: sparsemax (50 %), 1-ReLUmax (30 %).")
    assert "no test of extrapolation: Gaussian (74 %)." in details


def test_the_transformer_alone_makes_no_learnt_task_of_the_others():
    transformer = make_run({64: 0.99, 128: 0}, kernel="gaussian", architecture="transformer", positions="alibi")
    headline, _ = told(make_run({64: 0.63, 128: 0.01}), make_run({64: 0.898, 128: 0}, kernel="gaussian"), transformer)
    assert headline == (
        "After 2,000 steps Gaussian attention has not yet learnt MQMTAR (under 90 %), so nothing can be said about "
        "extrapolation against it; only the Transformer, ALiBi has, and gets 0 % at 2× the training length."
    )


def test_where_the_baseline_alone_has_learnt_the_task_no_kernel_is_held_against_it():
    headline, _ = told(make_run({64: 0.4, 128: 0.3}), make_run({64: 0.95, 128: 0.1}, kernel="gaussian"))
    assert headline == (
        "After 2,000 steps no compact kernel has yet learnt MQMTAR (the best at the training length: sparsemax, 40 %), so "
        "nothing can be said about extrapolation against Gaussian attention; only Gaussian attention has, and gets 10 % at 2× "
        "the training length."
    )


def test_of_two_baselines_the_one_that_has_learnt_the_task_counts():
    slow, done = make_run({64: 0.5}, kernel="gaussian", steps=1000), make_run({64: 1.0}, kernel="gaussian", steps=2000)
    base = find_baseline(comparison_of(slow, done, make_run()))
    assert base.label == "Gaussian, steps 2000"


def test_a_line_that_was_not_tested_at_the_training_length_is_left_out_unless_none_was():
    untested = make_run({128: 0.99}, kernel="relumax")
    headline, details = told(untested, make_run({64: 1, 128: 0.6}), make_run({64: 1, 128: 0.5}, kernel="gaussian"))
    assert "sparsemax gets 60 %" in headline
    assert "Not tested at the training length, so left out: 1-ReLUmax." in details
    headline, details = told(untested, make_run({128: 0.5}, kernel="gaussian"))
    assert "1-ReLUmax gets 99 %" in headline
    assert "it is not known which have learnt the task" in details


def test_the_choice_of_the_headline_is_owned_up_to():
    _, details = told(make_run(SPARSE), make_run(GAUSSIAN, kernel="gaussian"), make_run({64: 1, 512: 0.1}, kernel="relumax"))
    assert "This gap is the largest of 4 differences, over 3 lengths and 2 kernels; the intervals are not adjusted" in details
    _, details = told(make_run({64: 1, 128: 0.6}), make_run({64: 1, 128: 0.5}, kernel="gaussian"))
    assert "This gap" not in details


def test_an_interval_is_called_what_it_is_for_each_of_the_two():
    runs = [make_run({64: 1, 128: share}, seed=seed) for seed, share in enumerate([0.8, 0.9, 0.85])]
    _, details = told(*runs, make_run({64: 1, 128: 0.1}, kernel="gaussian"))
    assert "the first is over 3 seeds; the second is over test samples, from a single seed" in details


def test_the_headline_counts_the_seeds_where_the_two_differ_in_them():
    runs = [make_run({64: 1, 128: share}, seed=seed) for seed, share in enumerate([0.8, 0.9, 0.85])]
    headline, _ = told(*runs, make_run({64: 1, 128: 0.1}, kernel="gaussian"))
    assert "samples exactly right (3 seeds); Gaussian attention gets 10 % (1 seed)." in headline
    headline, _ = told(*runs, make_run({64: 1, 128: 0.9}, kernel="gaussian"))
    assert headline.endswith("samples exactly right (3 seeds), Gaussian attention 90 % (1 seed).")
    headline, _ = told(runs[0], make_run({64: 1, 128: 0.1}, kernel="gaussian"))
    assert "seed" not in headline


def test_a_difference_within_the_intervals_is_called_chance():
    runs = [make_run({64: 1, 128: share}, seed=seed) for seed, share in enumerate([0.2, 0.9])]
    runs += [make_run({64: 1, 128: share}, seed=seed, kernel="gaussian") for seed, share in enumerate([0.1, 0.3])]
    _, details = told(*runs)
    assert "overlap, so the difference may be chance; they are over 2 seeds." in details


def test_a_task_that_was_not_learnt_is_called_so():
    _, details = told(make_run({64: 0.4, 128: 0.1}), make_run({64: 0.95, 128: 0.1}, kernel="gaussian"))
    assert (
        "Not yet learnt after 2,000 steps (under 90 % at the training length), so no test of extrapolation: sparsemax (40 %)."
    ) in details


def test_who_has_not_yet_learnt_is_said_to_be_falling_only_where_every_run_of_it_is():
    def falling(*ends):
        level = [(step, 5.0 if step <= 190 else end) for end in ends for step in range(1, 201)]
        losses = [level[200 * i : 200 * (i + 1)] for i in range(len(ends))]
        return [make_run({64: 0.4}, seed=seed, losses=curve) for seed, curve in enumerate(losses)]

    base = make_run(kernel="gaussian")
    other = make_run({64: 0.1}, kernel="relumax", losses=[(step, 5.0) for step in range(1, 201)])
    assert "Their training losses were still falling: sparsemax." in told(base, other, *falling(4.9, 4.8))[1]
    assert "Their training losses were still falling." in told(base, *falling(4.9))[1]
    for rest in (falling(4.9, 5.1), [make_run({64: 0.4}, losses=[(10, 5.0), (20, 4.0)])]):
        assert "falling" not in told(base, other, *rest)[1]
    assert "falling" not in told(base)[1]


def test_where_nothing_was_learnt_no_lead_is_claimed():
    headline, details = told(make_run({64: 0.4, 128: 0.1}), make_run({64: 0.3, 128: 0.0}, kernel="gaussian"))
    assert headline.startswith(
        "Nothing to extrapolate yet: at the training length itself, the best, sparsemax, gets 40 % of MQMTAR"
    )
    assert "sparsemax (40 %)" in details


def test_without_a_baseline_the_best_speaks_for_itself():
    headline, _ = told(make_run({64: 1, 128: 0.5}), make_run({64: 1, 128: 0.996}, kernel="relumax"))
    assert headline == "At 2× the training length, 1-ReLUmax gets over 99 % of MQMTAR samples exactly right."
    assert find_baseline(comparison_of(make_run())) is None


def test_the_transformer_stands_in_for_a_missing_gaussian():
    transformer = make_run({64: 1, 128: 0.002}, kernel="gaussian", architecture="transformer", positions="alibi")
    headline, _ = told(transformer, make_run({64: 1, 128: 0.5}))
    assert headline.endswith("the Transformer, ALiBi gets under 1 %.")


def test_differences_to_the_paper_are_counted_and_the_largest_named():
    sentences = hold_against_paper(
        comparison_of(make_run({64: 1.0, 128: 0.95, 512: 0.98, 2048: 0.1}), make_run({64: 0.99, 2048: 0.3}, kernel="gaussian"))
    )
    assert sentences == [
        "Of 6 means, 4 are within 0.05 of the paper's, 1 are lower and 1 higher.",
        "The largest difference is sparsemax at 32×: 0.10 here, 0.63 in the paper.",
    ]
    assert hold_against_paper(comparison_of(make_run(data={"symbols": 8}))) == []


def test_departures_name_both_numbers():
    notes = list_departures(comparison_of(make_run(width=128, data={"symbols": 32}, samples=200)))
    for note in (
        "symbols of the data: 32; in the paper 256",
        "steps: 2,000; in the paper 195,312",
        "width: 128; in the paper 512",
        "seeds: 1; in the paper 3",
        "samples of a test: 200; in the paper 1,000",
        "warm-up steps: 200; in the paper 40,000",
        "training examples: at most 512,000, 1 % of the paper's 50,000,000",
        "slots of persistent memory: 448; in the paper 2,688",
        "dropout: 0.0; in the paper 0.05",
        "dropout on persistent weights: 0.0; in the paper 0.05",
    ):
        assert note in map(tidy, notes)
    kept = {"slots": 2688, "dropout": 0.05, "persistent_dropout": 0.05}
    assert not any(note.startswith(("slots", "dropout")) for note in list_departures(comparison_of(make_run(**kept))))
    more = list_departures(comparison_of(make_run(**kept, attention_dropout=0.05)))
    assert "dropout on contextual weights: 0.05; in the paper 0.0" in more
    transformer = make_run(kernel="gaussian", architecture="transformer", positions="alibi")
    assert not any(note.startswith(("slots", "dropout")) for note in list_departures(comparison_of(transformer)))
    changed = dataclasses.replace(make_run(), config=vary(make_run().config, training={"betas": (0.9, 0.99)}))
    assert "second beta of AdamW: 0.99; in the paper 0.95" in list_departures(comparison_of(changed))
    assert not any(note.startswith(("batch", "layers", "heads", "learning rate", "weight decay", "first")) for note in notes)


def test_a_run_that_stopped_early_is_named():
    stopped = dataclasses.replace(make_run(), steps=1200)
    assert "sparsemax, seed 0, stopped after 1,200 of its 2,000 steps" in list_departures(comparison_of(stopped))


def test_a_run_that_diverged_is_named_and_not_called_missing():
    failed = dataclasses.replace(make_run({}, kernel="biweight"), failed="diverged at step 412, loss nan")
    (comparison,) = compare([make_run(), failed, dataclasses.replace(failed, config=make_run(task="sort").config)])
    assert list_departures(comparison)[-1] == "1.5-entmax, seed 0, diverged at step 412, loss nan"
    assert "Biweight (1.5-entmax)" not in comparison.not_run()


def test_examples_are_those_seen_before_the_evaluation():
    run = make_run()
    early = dataclasses.replace(run, evaluation=[dataclasses.replace(row, step=1000) for row in run.evaluation])
    notes = list_departures(comparison_of(early))
    assert "steps: 1,000; in the paper 195,312" in notes
    assert any("training examples: at most 256,000," in note for note in notes)


def test_an_evaluation_in_another_precision_is_told():
    run = make_run()
    for precision, told in (("bf16", True), ("fp32", False), ("", False)):  # trained in fp32
        rows = [dataclasses.replace(row, precision=precision) for row in run.evaluation]
        notes = list_departures(comparison_of(dataclasses.replace(run, evaluation=rows)))
        assert ("trained in fp32 but evaluated in bf16: sparsemax" in notes) is told


def test_runs_judged_on_different_test_sets_are_told():
    run = make_run(kernel="gaussian")
    others = [dataclasses.replace(row, checksum="cd" * 32) if row.length == 128 else row for row in run.evaluation]
    notes = list_departures(comparison_of(make_run(), dataclasses.replace(run, evaluation=others)))
    assert [note for note in notes if "test sets" in note] == ["length 128: the runs were judged on 2 different test sets"]


def test_a_task_the_paper_does_not_have_is_called_so():
    assert list_departures(comparison_of(make_run(task="copy"))) == ["the paper has no task Copy"]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_and_nothing_are_said_only_of_all_and_nothing(share):
    headline, _ = told(make_run({64: 1, 128: share}))
    assert f" {100 * share:.0f} % of" in headline


@pytest.mark.parametrize(("share", "text"), [(0.005, "under 1 %"), (0.001, "under 1 %"), (0.995, "over 99 %"), (0.006, "1 %")])
def test_a_share_is_never_rounded_to_all_or_to_nothing(share, text):
    headline, _ = told(make_run({64: 1, 128: share}))
    assert f"gets {text} of" in headline
