"""The page of the benchmarks is made of the rows that the commands leave."""

import pytest
from benchmarks import report

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
    return {
        "architecture": architecture, "kernel": kernel, "layers": "8", "compile": "parts", "graph": "True", "status": "ok",
        "median_ms": "10.0", "tokens_per_second": str(speed), "memory_mib": "900", "command": "compactattn bench training",
        **ENVIRONMENT,
    }  # fmt: skip


@pytest.fixture
def rows(monkeypatch):
    held = {"attention": [], "training": [], "decode": []}
    monkeypatch.setattr(report, "read", held.__getitem__)
    return held


def test_without_rows_there_is_no_section(rows):
    assert report.attention_section() == report.steps_section() == report.decode_section() == ""


def test_attention_shows_goals_times_lost_cells_and_the_command(rows):
    rows["attention"] = [
        attention_row("ours", "biweight", "1.5"),
        attention_row("adasplash-2", "biweight", "2.0"),
        attention_row("ours", "sparsemax", "", "wrong: relative error 1 of dq"),
        attention_row("ours", "biweight", "3.0", length=2048),
    ]
    text = report.attention_section()
    assert "| `biweight` / adasplash-2 | mild | **0.75** > 0.6, lost | not measured (≤ 0.6) |" in text
    assert "| `biweight` | ours | causal | 0.25 / 1.5 (1.000; 64) | 0.25 / 3 (1.000; 64) |" in text
    assert "| `sparsemax` | ours | causal | wrong: relative error 1 of dq | – |" in text
    assert "`compactattn bench attention` on a GPU, torch 2.11, triton 3.6, adasplash 0.2, 2026-01-02, commit abc1234" in text


def test_training_steps_are_judged_by_both_goals(rows):
    rows["training"] = [
        training_row("transformer", "gaussian", 700_000),
        training_row("mosaic", "sparsemax", 510_000),
        training_row("mosaic", "biweight", 490_000),  # more than 450,000, but the transformer is 1.43 times as fast
    ]
    text = report.steps_section()
    assert "| 8 | mosaic, `sparsemax` | parts, graph | 10.00 | 510 | 900 | reached |" in text
    assert "| 8 | mosaic, `biweight` | parts, graph | 10.00 | 490 | 900 | **lost** |" in text
    assert "goal 500" in text


def test_decode_steps_are_shown_beside_sdpa(rows):
    def row(contestant, kernel, ms, skipped=""):
        place = {"data": "random", "length": "131072", "contestant": contestant, "kernel": kernel, "status": "ok"}
        return {**place, "median_ms": ms, "skipped_pages": skipped, "error_output": "1e-3", "command": "bench", **ENVIRONMENT}

    rows["decode"] = [
        row("sdpa", "gaussian", "1.0"),
        row("ours", "biweight", "0.5"),
        row("ours-pages", "biweight", "1.5", "0.25"),
    ]
    text = report.decode_section()
    assert "| random | 131,072 | `biweight` | ours | 0.500 | 0.50 | – | 1e-3 |" in text
    assert "| random | 131,072 | `biweight` | ours-pages | 1.500 | 1.50, **lost** | 0.25 | 1e-3 |" in text
