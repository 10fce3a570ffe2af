"""The table of language modelling shows losses, sizes and cost, and says what all runs share."""

import dataclasses

from lm_examples import make_failed, make_row, make_run
from report_examples import tidy
from test_tables import Cells

from compactattn.report import lm_tables
from compactattn.report.lm_comparison import compare
from compactattn.report.runs import Cost


def comparison_of(*runs):
    (comparison,) = compare(runs)
    return comparison


def test_markdown_has_a_row_for_each_variant_and_a_column_for_each_split():
    comparison = comparison_of(
        make_run(2.5), make_run(2.6, kernel="gaussian", wall=0.0), make_run(2.55, architecture="transformer", kernel="gaussian")
    )
    assert lm_tables.format_markdown(comparison).splitlines() == [
        "| Kernel | Validation, loss | Perplexity | Bits, per byte | Simple English Wikipedia, loss | TinyStories, loss"
        " | Size, million | Time | Tokens/s, thousand | Memory, GiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| **Gaussian** | 2.600 | 13.46 | 0.839 | 5.000 | 3.200 | 45.7 | – | – | – |",
        "| **sparsemax** | **2.500** | 12.18 | **0.806** | **4.900** | **3.100** | 45.7 | 10 min | 131 | 5.0 |",
        "| **Transformer** | 2.550 | 12.81 | 0.823 | 4.950 | 3.150 | 46.1 | 10 min | 131 | 5.0 |",
    ]


def test_all_that_show_the_lowest_of_a_column_are_bold():
    text = lm_tables.format_markdown(comparison_of(make_run(2.5001), make_run(2.5004, kernel="gaussian")))
    assert text.count("| **2.500** |") == 2


def test_tokens_a_second_have_three_digits_at_any_speed():
    speeds = {"gaussian": 4_321.0, "sparsemax": 87.654, "biweight": 1_234_567.0}
    runs = [dataclasses.replace(make_run(kernel=kernel), cost=Cost(9.0, speed)) for kernel, speed in speeds.items()]
    shown = [row.split(" | ")[-1].rstrip(" |") for row in lm_tables.format_markdown(comparison_of(*runs)).splitlines()[2:]]
    assert shown == ["4.32", "0.0877", "1,230"]


def test_several_seeds_show_half_of_their_interval():
    comparison = comparison_of(make_run(2.5), make_run(2.51, seed=1), make_run(2.6, kernel="gaussian"))
    text = tidy(lm_tables.format_markdown(comparison))
    assert "| **sparsemax** | **2.505** ± 0.064 |" in text
    assert "| **Gaussian** | 2.600 | 13.46 |" in text
    assert "mean over seeds, ± half of its 95 % interval where there are several. Ours: 1 to 2 seeds" in tidy(
        lm_tables.describe(comparison)
    )


def test_the_caption_states_the_tokens_that_each_run_has_seen():
    text = lm_tables.describe(comparison_of(make_run()))
    assert "trained on stories (BabiStories substitute). Ours: 1 seed, 2,000 steps of 64 windows of 512 tokens" in text
    assert "so 65,536,000 tokens seen by each; judged on windows: 200 of validation" in text
    assert "Evaluated at step" not in text
    early = make_run(rows=[make_row(step=1500)])
    assert "Evaluated at step 1,500." in lm_tables.describe(comparison_of(early))


def test_the_caption_explains_the_columns_that_are_there():
    text = lm_tables.describe(comparison_of(make_run()))
    for word in ("Size in parameters.", "Time is", "Tokens/s are", "Memory is", "What else ran"):
        assert word in text
    on_cpu = make_run()
    text = lm_tables.describe(comparison_of(dataclasses.replace(on_cpu, cost=on_cpu.cost._replace(peak_bytes=0))))
    assert "Memory" not in text
    assert "Tokens/s are" in text
    assert lm_tables.describe(comparison_of(make_run(wall=0.0))).endswith("Size in parameters.")


def test_the_caption_says_how_many_runs_shared_the_gpu():
    def run(command, **more):
        return dataclasses.replace(make_run(), environment={"command": command, **more})

    shared = "Up to {} runs shared the GPU, so these need not be the times of a run alone. What else ran on the machine is not"
    shared += " noted."
    command = "python results/make.py lm --workers 3"
    assert lm_tables.describe(comparison_of(run(command))).endswith(shared.format(3))
    more = run(command, resumed=[{"command": "python results/make.py lm --workers=12 --steps 5"}])
    assert lm_tables.describe(comparison_of(more)).endswith(shared.format(12))
    for alone in (run("compactattn train lm"), run("make.py --workers 1"), dataclasses.replace(make_run(), environment={})):
        assert "shared" not in lm_tables.describe(comparison_of(alone))
    assert "shared" not in lm_tables.describe(comparison_of(dataclasses.replace(run(command), cost=Cost())))


def test_steps_and_tokens_have_columns_where_runs_differ_in_them():
    short = dataclasses.replace(make_run(kernel="gaussian"), steps=1000)
    text = lm_tables.format_markdown(comparison_of(make_run(), short))
    assert "| Steps, done | Tokens, seen |" in text
    assert "| 1,000 | 32,768,000 |" in text
    assert "| 2,000 | 65,536,000 |" in text
    assert "Steps" not in lm_tables.format_markdown(comparison_of(make_run(), make_run(kernel="gaussian")))


def test_what_is_missing_is_a_dash_and_a_column_without_numbers_is_left_out():
    bare = make_run(2.6, kernel="gaussian", rows=[make_row(2.6, bits_per_byte=None)], wall=0.0)
    text = lm_tables.format_markdown(comparison_of(bare))
    assert text.splitlines()[0] == "| Kernel | Validation, loss | Perplexity | Size, million |"
    beside = lm_tables.format_markdown(comparison_of(bare, make_run(2.5)))
    assert "| **Gaussian** | 2.600 | 13.46 | – | – | – | 45.7 | – | – | – |" in beside
    failed = lm_tables.format_markdown(comparison_of(make_run(), make_failed(kernel="biweight")))
    assert "| **1.5-entmax** | diverged at step 400, loss nan | – | – | – | – | 45.7 |" in failed


def test_html_has_the_same_cells_and_the_papers_names():
    comparison = comparison_of(make_run(2.5), make_run(2.6, kernel="gaussian"))
    rows = Cells(lm_tables.format_html(comparison)).rows
    assert rows[0][:3] == ["Kernel", "Validationloss", "Perplexity"]
    assert rows[1][:2] == ["Gaussian", "2.600"]
    assert rows[2][:2] == ["sparsemaxEpanechnikov (sparsemax)", "2.500"]
    assert "--share:1.000" in lm_tables.format_html(comparison)
