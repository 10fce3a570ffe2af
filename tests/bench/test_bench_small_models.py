"""The steps of runs side by side are counted in the time that all of them share, and never beyond the limit."""

import itertools
import json

import pytest
from benchmarks import small_models
from benchmarks.small_models import WARM, Reading, Together, Way, count_together


def steady(start, rate, readings, interval=20):
    """A run that does `rate` steps a second from some time on."""
    return [Reading(start + step / rate, step) for step in range(interval, interval * (readings + 1), interval)]


def test_a_run_alone_is_counted_from_its_first_warm_reading():
    slow = [Reading(100.0 * number, 20 * number) for number in range(1, WARM + 1)]  # it compiles
    fast = [Reading(one.time + 1000, one.step + 20 * WARM) for one in steady(0, 10, 7)]
    assert count_together([slow + fast]) == Together(pytest.approx(12), pytest.approx(120))
    assert count_together([slow]) is None


def test_runs_count_only_while_all_of_them_run():
    """The second starts 20 s late; a sum of medians would be 10 + 30 at any distance."""
    early, late = steady(0, 10, 20), steady(20, 30, 100)
    start, end = late[WARM].time, early[-1].time
    found = count_together([early, late])
    assert found == Together(pytest.approx(end - start), pytest.approx(40 * (end - start)))
    assert found.rate == pytest.approx(40)
    assert count_together([early, steady(early[-1].time, 30, 100)]) is None


def test_a_run_that_slows_down_beside_another_counts_as_slow_as_it_was():
    alone, beside = steady(0, 40, 10), steady(5, 10, 20)  # 200 steps in 5 s, then a quarter of the speed
    first = alone + [Reading(one.time, one.step + 200) for one in beside]
    assert count_together([first, steady(5, 10, 20)]).rate == pytest.approx(20)


class Process:
    """Stands in for a process: its run logs a reading whenever the clock has moved on."""

    exitcode = None


@pytest.fixture
def clock(monkeypatch):
    """A second passes with each look at the files; each run then has another reading of 20 steps."""
    now = itertools.count()
    folders = []

    def sleep(seconds):
        second = next(now)
        for folder in folders:
            folder.mkdir(exist_ok=True)
            with open(folder / small_models.TIMING, "a") as file:
                file.write(json.dumps({"step": 20 * (second + 1), "time": float(second), "seconds": 1.0}) + "\n")
        monkeypatch.setattr(small_models.time, "monotonic", lambda: float(second))

    class Running:
        def __init__(self, jobs):
            folders.extend(folder for *_, folder in jobs)
            self.jobs = jobs

        def __enter__(self):
            return [Process() for _ in self.jobs]

        def __exit__(self, *_):
            folders.clear()

    monkeypatch.setattr(small_models, "running", Running)
    monkeypatch.setattr(small_models.time, "sleep", sleep)
    monkeypatch.setattr(small_models.time, "monotonic", lambda: -1.0)


@pytest.mark.usefixtures("clock")
def test_a_measurement_lasts_until_all_have_been_warm_for_long_enough():
    assert small_models.measure("h3", Way("both", 2, {}), 60.0) == Together(small_models.SECONDS, 200.0)


@pytest.mark.usefixtures("clock")
def test_a_measurement_that_does_not_end_in_time_is_left_out():
    assert small_models.measure("h3", Way("both", 2, {}), 8.0) is None


@pytest.mark.usefixtures("clock")
def test_a_run_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(Process, "exitcode", 1)
    with pytest.raises(SystemExit, match="a run of h3 ended with status 1"):
        small_models.measure("h3", Way("one", 1, {}), 60.0)


def test_every_way_is_kept_as_soon_as_it_is_measured(monkeypatch, capsys):
    kept, found = [], iter([Together(5.0, 100.0)] * (len(small_models.WAYS) + 2) + [None])
    monkeypatch.setattr(small_models, "measure", lambda *_: next(found))
    monkeypatch.setattr(small_models, "append", lambda name, rows: kept.extend(rows))
    monkeypatch.setattr(small_models.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(small_models.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr("sys.argv", ["small_models", "--minutes", "3", "h3", "mamba", "transformer"])
    small_models.main()
    assert [(row["model"], row["way"], row["steps_per_second"]) for row in kept] == [
        *(("h3", way.name, 20.0) for way in small_models.WAYS),
        *(("mamba", way.name, 20.0) for way in small_models.WAYS[:2]),
    ]
    assert "mamba, transformer: left out after 3 minutes" in capsys.readouterr().out
