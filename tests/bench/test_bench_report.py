"""The page of the benchmarks is made of the rows that the commands leave."""

import pytest
from benchmarks import attention, common, gpu, report

from compactattn.bench import goals

ENVIRONMENT = {
    "started": "2026-01-02T03:04:05",
    "commit": "abc1234",
    "device": "a GPU",
    "torch": "2.11",
    "triton": "3.6",
    "adasplash": "0.2",
}


def attention_row(contestant, kernel, both, status="ok", length=512):
    return {
        "contestant": contestant, "kernel": kernel, "regime": "mild", "mask": "causal", "length": str(length), "head_dim": "64",
        "status": status, "forward_median_ms": "0.25" if both else "", "both_median_ms": both, "memory_mib": "64",
        "active_tiles": "1.000", "command": "compactattn bench attention", **ENVIRONMENT,
    }  # fmt: skip


def training_row(architecture, kernel, speed):
    """A mosaic takes 10 ms, a transformer 8."""
    return {
        "architecture": architecture, "kernel": kernel, "layers": "8", "compile": "parts", "graph": "True", "status": "ok",
        "median_ms": "8.0" if architecture == "transformer" else "10.0",
        "tokens_per_second": str(speed), "memory_mib": "900", "command": "compactattn bench training",
        **ENVIRONMENT,
    }  # fmt: skip


@pytest.fixture
def rows(monkeypatch):
    held = {"attention": [], "training": [], "decode": [], "preparation": [], "cpu_attention": []}
    for module in (report, gpu, common, attention):
        monkeypatch.setattr(module, "read", held.__getitem__)
    return held


def test_without_rows_there_is_no_section(rows):
    assert gpu.attention_section() == gpu.steps_section() == gpu.decode_section() == ""
    assert report.preparation_section() == attention.section() == ""


def test_attention_shows_goals_times_lost_cells_and_the_command(rows):
    rows["attention"] = [
        attention_row("ours", "biweight", "1.5"),
        attention_row("adasplash-2", "biweight", "2.0"),
        attention_row("ours", "sparsemax", "", "wrong: relative error 1 of dq"),
        attention_row("ours", "biweight", "3.0", length=2048),
    ]
    text = gpu.attention_section()
    assert "| `biweight` / adasplash-2 | mild | **0.75** > 0.6, lost | not measured (≤ 0.6) |" in text
    assert "| `biweight` | ours | causal | 0.25 / 1.5 (1.000; 64) | 0.25 / 3 (1.000; 64) |" in text
    assert "| `sparsemax` | ours | causal | wrong: relative error 1 of dq | – |" in text
    assert "`compactattn bench attention` on a GPU, torch 2.11, triton 3.6, adasplash 0.2, 2026-01-02, commit abc1234" in text


def test_a_table_of_times_is_of_one_run_and_others_add_what_it_lacks(rows):
    def run(started, commit, *given):
        return [attention_row(*each) | {"started": started, "commit": commit} for each in given]

    rows["attention"] = [
        *run("2026-01-01", "older", ("ours", "biweight", "9.0"), ("ours", "relumax", "8.0")),
        *run(
            "2026-01-02", "newer", ("ours", "biweight", "1.5"), ("ours", "gaussian", "4.0"), ("adasplash-2", "biweight", "2.0")
        ),
        *run("2026-01-03", "newer", ("ours", "biweight", "1.6"), ("flex", "gaussian", "5.0")),
        *run("2026-01-04", "newer", ("ours", "biweight", "1.7")),
        *run("2026-01-05", "newer", ("ours", "gaussian", "6.0")),
    ]
    rows["attention"][-1]["length"] = "2048"
    first, other, longer, earlier = gpu.times_tables(rows["attention"], "mild", "64").split("commit")
    assert "| n = 2,048 |" in longer
    assert "0.25 / 6" in longer
    assert "0.25 / 1.5" in first
    assert "0.25 / 2 " in first
    assert "In another run (2026-01-03" in first
    assert "In another run (2026-01-05" in other
    assert "0.25 / 1.6" in other
    assert "0.25 / 5" in other
    assert "Only of an earlier version (2026-01-01" in longer
    assert "0.25 / 8" in earlier
    assert "0.25 / 9" not in earlier


def test_training_steps_are_judged_by_both_goals(rows):
    rows["training"] = [
        training_row("transformer", "gaussian", 700_000),
        training_row("mosaic", "sparsemax", 510_000),
        training_row("mosaic", "biweight", 490_000),  # more than 450,000, but the transformer is 1.43 times as fast
    ]
    text = gpu.steps_section()
    assert "| 8 | mosaic, `sparsemax` | parts, graph | 10.00 | 1.25 | 510 | 900 | reached |" in text
    assert "| 8 | mosaic, `biweight` | parts, graph | 10.00 | 1.25 | **490** | 900 | lost |" in text
    assert "goal 500" in text


def test_the_summary_counts_what_is_reached_lost_and_not_measured(rows):
    weights = {"kernel": "sparsemax", "ratio": "0.3", "goal": "0.25"}
    memory = {"kernel": "sparsemax", "shape": "1x1", "above_inputs_mib": "50", "limit_mib": "50"}
    rows |= {"cpu_weights": [weights, weights | {"kernel": "biweight", "ratio": "0.2"}], "cpu_memory": [memory]}
    rows["cpu_mixers"] = [
        {"model": model, "median_ms": time, "goal_ms": "1500"} for model, time in (("gla", "9e2"), ("h3", "2e3"))
    ]
    rows["preparation"] = [preparation_row("gpt2", speed, "10.0", text) for text, speed in (("a", "9.9"), ("b", "10.0"))]
    rows["preparation"] += [preparation_row("bytes", "1.0", "", "a")]
    rows["attention"] = [
        attention_row("ours", "biweight", "1.0"),
        attention_row("adasplash-2", "biweight", "2.0"),
        attention_row("ours", "biweight", "", "wrong: relative error 1 of dq", length=2048),
        attention_row("adasplash-2", "biweight", "2.0", length=2048),
        attention_row("ours", "biweight", "3.0", length=8192),
    ]
    rows["training"] = [training_row("transformer", "gaussian", 500_000), training_row("mosaic", "sparsemax", 400_000)]
    cells = sum(len(goal.kernels) * len(goal.limits) for goal in goals.GOALS) * len(goals.HEAD_DIMS)
    assert report.summary() == (
        "Goals reached of those measured: a training step on a GPU, 0 of 1; weights on a CPU, 1 of 2; "
        "a training step on a CPU, 1 of 2; text to tokens on a CPU, 1 of 2; memory on a CPU, all 1; "
        f"attention on a GPU, 1 of 2. Not measured: {cells - 2} of attention on a GPU and {len(gpu.KERNELS) - 1} kernels "
        "of a training step on a GPU."
    )


def test_small_models_are_shown_beside_plain_training(rows):
    facts = dict.fromkeys(("command", "cpu", "threads", "torch", "python", "date", "commit"), "x")
    facts |= {"device": "GPU", "shared": "MPS"}
    rows["small_models"] = [
        {"model": "h3", "way": way, "steps_per_second": rate, **facts} for way, rate in (("plain", "20"), ("a graph", "50.4"))
    ]
    text = gpu.small_models_section()
    assert "| plain | 20 (1.0 ×) |" in text
    assert "| a graph | 50 (2.5 ×) |" in text
    assert "share the GPU by MPS" in text
    assert "on GPU, torch x" in text


def preparation_row(tokenizer, speed, goal, text="stories.txt"):
    facts = dict.fromkeys(("command", "cpu", "threads", "torch", "python", "date", "commit"), "x")
    size = {"text": text, "tokenizer": tokenizer, "megabytes": "8.0", "documents": "10000"}
    return {**size, "mb_per_core_second": speed, "goal": goal, "mb_per_second": "12.5", **facts}


def test_preparation_shows_its_goal_and_where_it_is_lost(rows):
    rows["preparation"] = [
        preparation_row("gpt2", "11.0", "10.0"),
        preparation_row("bytes", "3.0", ""),
        preparation_row("gpt2", "9.9", "10.0"),  # the newest counts
    ]
    text = report.preparation_section()
    assert "| stories.txt | gpt2 | 8.0 | 10,000 | **9.9**, lost | ≥ 10 | 12.5 |" in text
    assert "| stories.txt | bytes | 8.0 | 10,000 | 3.0 | – | 12.5 |" in text
    assert "11.0" not in text
    assert "`x` on x, x threads" in text


def test_a_number_is_bold_only_where_it_misses_its_goal(rows):
    assert common.mark("0.20", True) == "0.20"
    assert common.mark("0.30", False) == "**0.30**, lost"
    shared = {f"{who}_{what}_ms": "1" for who in ("ours", "peer") for what in ("median", "p20", "p80")}
    shared |= {f"{who}_{kind}": "0" for who in ("ours", "peer") for kind in ("error", "gradient_error")}
    shared |= {"peer": "package", "goal": "0.25"}
    rows["cpu_weights"] = [shared | {"kernel": "sparsemax", "ratio": "0.3"}, shared | {"kernel": "biweight", "ratio": "0.2"}]
    slow, fast = report.weights_table().splitlines()[2:]
    assert "| **0.3**, lost | ≤ 0.25 |" in slow
    assert "| 0.2 | ≤ 0.25 |" in fast


def test_decode_steps_are_shown_beside_sdpa(rows):
    def row(contestant, kernel, ms, skipped=""):
        place = {"data": "random", "length": "131072", "contestant": contestant, "kernel": kernel, "status": "ok"}
        return {**place, "median_ms": ms, "skipped_pages": skipped, "error_output": "1e-3", "command": "bench", **ENVIRONMENT}

    rows["decode"] = [
        row("sdpa", "gaussian", "1.0"),
        row("ours", "biweight", "0.5"),
        row("ours-pages", "biweight", "1.5", "0.25"),
    ]
    text = gpu.decode_section()
    assert "| random | 131,072 | `biweight` | ours | 0.500 | 0.50 | – | 1e-3 |" in text
    assert "| random | 131,072 | `biweight` | ours-pages | 1.500 | **1.50**, lost | 0.25 | 1e-3 |" in text


def test_attention_on_a_cpu_is_shown_beside_pytorch_and_of_the_newest_code_alone(rows):
    def row(kernel, contestant, both, commit="abc"):
        what = {"kernel": kernel, "contestant": contestant, "scores": "mild", "dim": "64", "error": "4e-07"}
        size = {"batch": "4", "heads": "8", "length": "2048", "forward_median_ms": "10", "both_median_ms": both}
        where = {"cpu": "a CPU", "threads": "2", "torch": "2.13", "python": "3.11", "date": "2026-01-02", "commit": commit}
        return what | size | where | {"command": "python -m benchmarks.attention"}

    rows["cpu_attention"] = [
        row("sparsemax", "attend", "999", commit="old"),
        row("gaussian", attention.PEER, "100"),
        row("sparsemax", "attend", "51"),
    ]
    text = attention.section()
    assert "| `gaussian` | PyTorch | 10 / 100 |" in text
    assert "| `sparsemax` | attend | 10 / 51 (0.51) |" in text
    assert "at most 4e-07" in text
    assert "batch · length = 8,192" in text
    assert "999" not in text
