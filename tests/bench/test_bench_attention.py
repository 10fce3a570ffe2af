"""The benchmark of attention holds everyone to the truth before it takes a time, and leaves rows that tell all."""

import csv
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from compactattn import Causal, attend, cli, entmax, weights
from compactattn.bench import __main__ as program
from compactattn.bench import attention, contestants
from compactattn.bench.ahead import gather
from compactattn.bench.attention import check, measure, measure_all, plan, share_active_tiles
from compactattn.bench.contestants import CONTESTANTS, KERNELS, OURS, PEERS, Cell, Contestant, name_kernels
from compactattn.bench.goals import GOALS, HEAD_DIMS, LENGTHS, format_goals, serves_a_goal
from compactattn.bench.regimes import MEMORY, REGIMES, Problem, draw
from compactattn.bench.results import append, choose, describe_run, read
from compactattn.fused import launch
from compactattn.training.config import RunError

CPU = torch.device("cpu")
SMALL = Problem("mild", batch=1, heads=2, length=128, head_dim=16)


def prepare_reference(kernel):
    return lambda q, k, v, scale, offset: attend(q, k, v, kernel, scale=scale, mask=Causal(offset), backend="reference")


def time_nothing(call):
    call()
    return [1.0, 2.0, 3.0]


HONEST = Contestant("honest", "the reference", prepare_reference, strict=True)


# -- regimes and tiles ---------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "dim", "share"), [(2048, 64, 0.60), (8192, 64, 0.25), (2048, 128, 0.41)])
def test_local_scores_empty_the_tiles_that_they_should(length, dim, share):
    got = share_active_tiles(Problem("local", 1, 1, length, dim), "biweight", 0, CPU)
    assert got == pytest.approx(share, abs=0.06)


def test_mild_scores_empty_no_tile_and_sharp_ones_fewer_than_local():
    mild, sharp, local = (
        share_active_tiles(Problem(name, 1, 1, 2048, 64), "biweight", 0, CPU) for name in ("mild", "sharp", "local")
    )
    assert mild > 0.98
    assert local < sharp


@pytest.mark.parametrize("kernel", [*KERNELS, "ball", "topk_uniform(3)"])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("regime", ["sharp", "memory"])  # in a memory of random keys norm_relu reaches none and weighs all
def test_active_tiles_are_those_with_a_weight(kernel, offset, regime):
    problem = Problem(regime, 1, 2, 129, 16)  # its last tile is a single key, which a strict mask hides
    q, k, _, _ = (x.detach().float() for x in draw(problem, CPU))
    legal = torch.ones(129, 129, dtype=torch.bool).tril(-offset)
    w = weights((q @ k.mT).masked_fill(~legal, -math.inf), kernel, scale=problem.scale)[0]
    tiles = [(slice(64 * i, 64 * i + 64), slice(64 * j, 64 * j + 64)) for i in range(3) for j in range(3)]
    active = sum(bool(w[head][tile].any()) for tile in tiles for head in range(2))
    assert share_active_tiles(problem, kernel, offset, CPU) == active / sum(2 * bool(legal[tile].any()) for tile in tiles)


@pytest.mark.parametrize("regime", REGIMES)
def test_inputs_hang_on_problem_and_seed_alone(regime):
    problem = replace(SMALL, regime=regime, head_dim=10)  # a quarter of 10 is no whole number
    first, again, other = (draw(problem, CPU, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert first.q.shape == first.do.shape == (1, 2, 128, 10)


# -- correctness first ---------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "checked", "batch"), [(512, 512, 4), (2048, 2048, 4), (8192, 2048, 16)])
def test_what_is_timed_is_checked_where_it_skips_tiles(length, checked, batch, monkeypatch):
    seen = []
    monkeypatch.setattr(attention, "_check", lambda cell, device: seen.append(cell.problem) or ({}, ""))
    check(Cell(replace(SMALL, batch=4, length=length), OURS, "biweight"), CPU)
    assert seen == [replace(SMALL, batch=batch, length=checked)]
    assert attention.CHECKED > launch.TRACK_FROM


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(
    ("peer", "kernel"), [("entmax", "sparsemax"), ("entmax", "biweight"), ("entmax", "triweight"), ("sdpa-flash", "gaussian")]
)
def test_peers_that_run_on_a_cpu_compute_what_the_registry_says(regime, peer, kernel):
    pytest.importorskip(CONTESTANTS[peer].package or "torch")
    errors, trouble = check(Cell(replace(SMALL, regime=regime, length=512), CONTESTANTS[peer], kernel), CPU)
    assert not trouble
    assert set(errors) == {"output", "dq", "dk", "dv"}
    assert all(0 < error < 0.02 for error in errors.values())


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(
    ("peer", "kernel"), [("adasplash-1", "sparsemax"), ("adasplash-1", "triweight"), ("adasplash-2", "biweight")]
)
def test_adasplash_is_given_queries_that_make_up_for_its_own_scale(regime, peer, kernel, monkeypatch):
    def stand_in(q, k, v, alpha=1.5, is_causal=True):
        assert is_causal
        return attend(q, k, v, entmax(alpha), mask=Causal())

    module = SimpleNamespace(adasplash_v1=stand_in, adasplash_v2=stand_in)
    monkeypatch.setattr(contestants, "import_module", lambda name: module)
    monkeypatch.setattr(contestants, "_load_adasplash", lambda: module)
    _, trouble = check(Cell(replace(SMALL, regime=regime, heads=1, length=512), CONTESTANTS[peer], kernel), CPU)
    assert not trouble


@pytest.mark.parametrize(
    "plant",
    [
        lambda call, q, k, v, scale, offset: call(q, k, v, 1.1 * scale, offset),
        lambda call, q, k, v, scale, offset: call(q, k, v, scale, 1 - offset),
        lambda call, q, k, v, scale, offset: call(q, k.detach(), v, scale, offset) + 0 * k.sum(),
        lambda call, q, k, v, scale, offset: call(q, k, v, scale, offset) * math.nan,
    ],
    ids=["scale", "mask", "no dk", "nan"],
)
def test_a_wrong_contestant_is_shown_as_wrong_and_not_timed(plant):
    def prepare(kernel):
        return lambda *inputs: plant(prepare_reference(kernel), *inputs)

    cell = Cell(SMALL, replace(HONEST, prepare=prepare), "biweight")
    row = measure(cell, draw(SMALL, CPU), timer=lambda call: pytest.fail("was timed"))
    assert row["status"].startswith("wrong: relative error")
    assert row["both_median_ms"] == ""
    assert row["error_dk"]


def test_a_contestant_that_fails_has_a_row_and_the_next_has_its_turn():
    def prepare(kernel):
        def call(*inputs):
            raise AssertionError("N_CTX must be a power of two.\nand more")

        return call

    cells = [Cell(SMALL, replace(HONEST, prepare=prepare), "biweight"), Cell(SMALL, HONEST, "biweight")]
    rows = list(measure_all(cells, CPU, lambda: False, time_nothing))
    assert [row["status"] for row in rows] == ["failed: AssertionError: N_CTX must be a power of two.", "ok"]
    assert rows[0].keys() == rows[1].keys()
    assert (rows[1]["both_p20_ms"], rows[1]["both_median_ms"], rows[1]["both_p80_ms"]) == (1.4, 2.0, 2.6)


def test_a_contestant_without_a_strict_mask_is_judged_and_timed_on_the_plain_one():
    problem = replace(SMALL, regime="memory")
    rows = [
        measure(Cell(problem, replace(HONEST, strict=strict), "biweight"), draw(problem, CPU), time_nothing)
        for strict in (True, False)
    ]
    assert [(row["mask"], row["status"]) for row in rows] == [("strict", "ok"), ("causal", "ok")]


# -- the plan ------------------------------------------------------------------------------------


@pytest.fixture
def everyone_installed(monkeypatch):
    monkeypatch.setattr(contestants, "find_spec", lambda name: name)


def make_plan(**changes):
    given = {"kernels": KERNELS, "peers": [peer.name for peer in PEERS], "regimes": list(REGIMES), "lengths": LENGTHS}
    return plan(**{**given, "head_dims": HEAD_DIMS, **changes})


def test_what_the_goals_need_comes_first_and_slow_peers_last(everyone_installed):
    cells = make_plan()
    needed = {
        (name, kernel, goal.regime, length, dim)
        for goal in GOALS for length in goal.limits for dim in HEAD_DIMS
        for name, kernel in [*(("ours", kernel) for kernel in goal.kernels), (goal.peer, goal.peer_kernel)]
    }  # fmt: skip
    keys = [(c.contestant.name, c.kernel, c.problem.regime, c.problem.length, c.problem.head_dim) for c in cells]
    assert set(keys[: len(needed)]) == needed
    assert all(serves_a_goal(*key) for key in needed)
    slow = [cell.contestant.slow for cell in cells]
    assert slow == sorted(slow)
    assert len(set(keys)) == len(keys)


def test_kernels_that_will_be_timed_are_compiled_ahead_each_in_one_process(everyone_installed):
    work = gather(make_plan(kernels=["biweight", "sparsemax"], lengths=[512, 2048]))
    named = [(name, kernel, {(p.length, p.head_dim) for p in problems}) for name, kernel, problems in work]
    tuned = [("adasplash-2", "biweight", {(length, dim)}) for dim in (64, 128) for length in (512, 2048)]
    assert named[:4] == tuned  # the longest work first
    ours = [("ours", kernel, {(512, dim), (2048, dim)}) for dim in (64, 128) for kernel in ("biweight", "sparsemax")]
    assert sorted(map(str, named[4:])) == sorted(map(str, ours))


def test_a_plan_holds_only_what_was_asked_for_and_what_is_installed(monkeypatch, capsys):
    monkeypatch.setattr(contestants, "find_spec", lambda name: None)
    cells = make_plan(kernels=["biweight"], peers=["sdpa-cudnn", "adasplash-2"], regimes=["memory"])
    assert [(cell.contestant.name, cell.kernel) for cell in cells] == [("ours", "biweight"), ("sdpa-cudnn", "gaussian")]
    assert all(cell.problem == MEMORY for cell in cells)
    assert "adasplash-2 is left out: the package adasplash is not installed" in capsys.readouterr().out


def test_kernels_are_known_by_any_of_their_names():
    assert name_kernels("entmax15, softmax,relumax(r=2, b=1), relumax(r=2, b=3)") == [
        "biweight",
        "gaussian",
        "relumax(2)",
        "relumax(r=2, b=3)",
    ]
    assert name_kernels("all") == list(KERNELS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernels": "sparsemaxx"}, "sparsemaxx"),
        ({"peers": "sdpa"}, "peer 'sdpa' is unknown; choose from sdpa-cudnn"),
        ({"regimes": "wild"}, "regime 'wild' is unknown; choose from mild"),
        ({"lengths": "512,many"}, "lengths '512,many' do not read as whole numbers"),
        ({"head_dims": "0"}, "head dims '0' must be at least 1"),
    ],
)
def test_a_mistake_in_the_options_is_told_in_a_sentence(options, words, monkeypatch):
    monkeypatch.setattr(attention, "require_gpu", lambda: CPU)
    with pytest.raises(RunError) as error:
        attention.run(**options)
    assert words in str(error.value)


# -- rows and goals ------------------------------------------------------------------------------


@pytest.fixture
def on_a_cpu(monkeypatch):
    """The whole command, on a CPU, with our reference in the place of the fused kernels."""
    monkeypatch.setattr(attention, "require_gpu", lambda: CPU)
    monkeypatch.setattr(attention, "OURS", replace(OURS, prepare=prepare_reference))
    monkeypatch.setattr(attention, "TOKENS", 128)
    monkeypatch.setattr(attention.measure_all, "__defaults__", (time_nothing,))
    monkeypatch.setattr("sys.argv", ["compactattn", "bench", "attention", "--out", "/home/somebody/a.csv", "--minutes", "1"])
    monkeypatch.setenv("COMPACTATTN_COMMIT", "abc1234")


def test_the_command_adds_rows_one_by_one_and_ends_with_the_goals(on_a_cpu, tmp_path, capsys):
    out = tmp_path / "new" / "attention.csv"
    seen = []
    real = attention.append
    attention_rows = lambda path, rows: (real(path, rows), seen.append(len(read(out))))  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "append", attention_rows)
        attention.run("biweight", "entmax", "mild", "64", "64", 1.0, 0, out)
    rows = read(out)
    assert seen == [1, 2]
    assert [(row["contestant"], row["status"]) for row in rows] == [("ours", "ok"), ("entmax", "ok")]
    assert {row["commit"] for row in rows} == {"abc1234"}
    assert {row["command"] for row in rows} == {"compactattn bench attention --minutes 1"}
    text = capsys.readouterr().out
    assert "not measured (≤ 0.6)" in text
    assert f"2 rows added to {out}" in text


def test_no_new_cell_is_begun_after_the_minutes(on_a_cpu, tmp_path, capsys):
    attention.run("biweight", "none", "mild", "64", "64", 0.0, 0, tmp_path / "a.csv")
    assert "1 of 1 cells were left out after 0 minutes; give more with --minutes" in capsys.readouterr().out
    assert read(tmp_path / "a.csv") == []


def test_the_command_of_the_module_is_written_as_it_was_typed(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/bench/__main__.py", "attention", "--kernels", "all"])
    assert describe_run(CPU)["command"] == "python -m compactattn.bench attention --kernels all"


def test_a_file_with_other_columns_is_refused(tmp_path):
    append(tmp_path / "a.csv", [{"x": 1}])
    append(tmp_path / "a.csv", [{"x": 2}])
    with pytest.raises(RunError) as error:
        append(tmp_path / "a.csv", [{"y": 1}])
    assert "has columns ['x'], this run has ['y']; move the old file away" in str(error.value)
    with (tmp_path / "a.csv").open() as file:
        assert list(csv.reader(file)) == [["x"], ["1"], ["2"]]


def goal_row(contestant, kernel, ms, started="2026-01-01", status="ok", length=2048):
    place = {"regime": "local", "length": str(length), "head_dim": "64"}
    return {
        "contestant": contestant,
        "kernel": kernel,
        "both_median_ms": str(ms),
        "started": started,
        "status": status,
        **place,
    }


def cell_of(rows, length=2048):
    """What the goals say about biweight against AdaSplash-2 on local scores."""
    line = next(line for line in format_goals(rows, 64).splitlines() if "`biweight` / adasplash-2 | local" in line)
    return line.split(" | ")[2 + LENGTHS.index(length)].rstrip(" |")


def test_goals_mark_lost_cells_and_divide_times_of_one_run_only():
    peer = goal_row("adasplash-2", "biweight", 2.0)
    assert cell_of([peer, goal_row("ours", "biweight", 0.9)]) == "0.45 ≤ 0.5"
    assert cell_of([peer, goal_row("ours", "biweight", 1.5)]) == "**0.75** > 0.5, lost"
    assert cell_of([peer, goal_row("ours", "biweight", 0.9, started="2026-01-02")]) == "not measured (≤ 0.5)"
    assert cell_of([peer, goal_row("ours", "biweight", "", status="wrong: relative error 1 of dq")]).startswith("wrong")
    newer = [goal_row("adasplash-2", "biweight", 4.0, "2026-01-02"), goal_row("ours", "biweight", 1.0, "2026-01-02")]
    assert cell_of([*newer, peer, goal_row("ours", "biweight", 1.5)]) == "0.25 ≤ 0.5"
    assert cell_of([], length=32768) == "not measured (≤ 0.35)"


def test_choices_are_read_with_all_and_none():
    assert choose("peer", "all", "ab") == ["a", "b"]
    assert choose("peer", "none", "ab") == []
    assert choose("peer", "b, b", "ab") == ["b"]


# -- without a GPU -------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["attention", "training", "decode"])
@pytest.mark.parametrize("main", [program.main, lambda arguments: cli.main(["bench", *arguments])], ids=["module", "cli"])
def test_without_a_gpu_the_benchmarks_say_so_and_fail(command, main, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit:
        main([command, "--minutes", "1", "--out", "nowhere.csv"])
    assert exit.value.code == 2
    said, error = capsys.readouterr()
    assert said == ""  # nothing of peers that are missing too
    assert error.startswith("compactattn: benchmarks of the fused kernels need a GPU")
    assert error.count("\n") == 1
