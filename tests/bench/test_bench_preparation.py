"""The benchmark of preparation times the whole of it, on one core, and does without GPT-2 where its ranks are not to be had."""

import pytest
from benchmarks import common, preparation
from tests.data.text_examples import use_tiny_ranks, write_json_lines

from compactattn.data import tokenizers


@pytest.fixture
def rows(monkeypatch, tmp_path):
    """Runs the benchmark on few stories; what it would append."""
    found = []
    monkeypatch.setattr(preparation, "STORIES", 30)
    monkeypatch.setattr(preparation, "REPEATS", 2)
    monkeypatch.setattr(common.results, "append", lambda path, rows: found.extend(rows))

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["preparation", *map(str, arguments)])
        preparation.main()
        return found

    return run


def test_each_text_has_a_row_for_each_tokenizer(rows, tmp_path, monkeypatch):
    ranks = use_tiny_ranks(monkeypatch, tmp_path)
    file = write_json_lines(tmp_path / "other.jsonl", ["hello world"] * 100)
    found = rows("--ranks", ranks, file)
    assert [(row["text"], row["tokenizer"], row["documents"], row["goal"]) for row in found] == [
        ("demo-stories.txt", "bytes", 30, ""), ("other.jsonl", "bytes", 100, ""),
        ("demo-stories.txt", "gpt2", 30, 10.0), ("other.jsonl", "gpt2", 100, 10.0),
    ]  # fmt: skip


def test_a_core_counts_while_it_is_busy_and_the_clock_beside_it(monkeypatch, tmp_path):
    file = write_json_lines(tmp_path / "text.jsonl", ["x" * 1000] * 100)
    for name, times in (("perf_counter", iter([0.0, 0.5] * 20)), ("process_time", iter([0.0, 1.0] * 20))):
        monkeypatch.setattr(preparation.time, name, lambda times=times: next(times))
    row = preparation.measure(file, tokenizers.Bytes())
    assert (row["megabytes"], row["mb_per_core_second"], row["mb_per_second"], row["core_median_ms"]) == (0.1, 0.1, 0.2, 1000)


def test_without_ranks_bytes_are_measured_alone(rows, monkeypatch, capsys):
    def fail():
        raise ValueError("the ranks of GPT-2 could not be fetched")

    monkeypatch.setattr(tokenizers, "_fetch_ranks", fail)
    assert [row["tokenizer"] for row in rows()] == ["bytes"]
    assert "GPT-2 is left out: the ranks of GPT-2 could not be fetched" in capsys.readouterr().out
