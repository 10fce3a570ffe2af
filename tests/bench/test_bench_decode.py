"""The benchmark of decoding holds answers against the truth, and counts the pages that were not read."""

import pytest
import torch

from compactattn.bench import decode
from compactattn.bench.results import read

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(decode, "BATCH", 1)
    monkeypatch.setattr(decode, "HEADS", 2)
    monkeypatch.setattr(decode, "require_gpu", lambda: CPU)
    monkeypatch.setattr(decode.measure, "__defaults__", (lambda call: (call(), [1.0, 2.0, 3.0])[1],))


def test_rows_tell_time_error_and_skipped_pages(tmp_path):
    decode.run("biweight,relumax", "all", "2000", 1.0, tmp_path / "decode.csv")
    rows = read(tmp_path / "decode.csv")
    each = [("sdpa", "gaussian"), *((who, kernel) for kernel in ("biweight", "relumax(1)") for who in ("ours", "ours-pages"))]
    assert [(row["data"], row["contestant"], row["kernel"]) for row in rows] == [
        (kind, *one) for kind in decode.DATA for one in each
    ]
    assert {(row["status"], row["median_ms"]) for row in rows} == {("ok", "2.0")}
    skipped = {(row["data"], row["kernel"]): float(row["skipped_pages"]) for row in rows if row["contestant"] == "ours-pages"}
    assert all(skipped["clustered", kernel] > 0.5 > skipped["random", kernel] for kernel in ("biweight", "relumax(1)"))


def test_a_wrong_answer_is_shown_as_wrong_and_not_timed(monkeypatch):
    monkeypatch.setattr(decode, "decode", lambda q, k, v, kernel, backend: k.mean(2, keepdim=True))
    row = decode.measure("ours", "biweight", decode.draw_cache("random", 300, CPU), lambda call: pytest.fail("was timed"))
    assert row["status"].startswith("wrong: relative error")
