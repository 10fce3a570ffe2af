"""Copy, sort and reverse have the published ids and layout; text for people goes there and back."""

import numpy as np
import pytest

from compactattn.data.draws import Draws
from compactattn.data.recall import Recall
from compactattn.data.sequences import TASKS
from compactattn.data.tasks import Copy, Reverse, Sort

REARRANGEMENTS = {"copy": lambda x: x, "sort": np.sort, "reverse": lambda x: x[::-1]}


def draw(task, lengths, longest=None, name="test"):
    lengths = np.array(lengths)
    return task.tokens(Draws(name), np.arange(len(lengths), dtype=np.uint64), lengths, longest or lengths.max())


def test_the_ids_are_the_published_ones():
    mqmtar = TASKS["mqmtar"]
    assert (mqmtar.bos, mqmtar.sep, mqmtar.eos, mqmtar.pad, mqmtar.vocab) == (259, 260, 261, 262, 263)
    for name in REARRANGEMENTS:
        task = TASKS[name]
        assert (task.bos, task.sep, task.eos, task.pad, task.vocab) == (32, 33, 34, 35, 36)
    small = Recall(symbols=16, words=100)
    assert (small.bos, small.sep, small.eos, small.pad, small.vocab) == (19, 20, 21, 22, 23)


@pytest.mark.parametrize("name", REARRANGEMENTS)
def test_a_row_is_bos_source_sep_target_eos_and_padding(name):
    task, lengths = TASKS[name], [1, 2, 7, 63, 64, 64]
    tokens = draw(task, lengths, longest=70)
    assert tokens.shape == (6, 2 * 70 + 3)
    assert tokens.dtype == np.int32
    for row, n in zip(tokens, lengths, strict=True):
        source, target = row[1 : n + 1], row[n + 2 : 2 * n + 2]
        assert row[0] == 32
        assert row[n + 1] == 33
        assert row[2 * n + 2] == 34
        assert (row[2 * n + 3 :] == 35).all()
        assert source.min() >= 0
        assert source.max() < 32
        assert np.array_equal(target, REARRANGEMENTS[name](source))
    assert not np.array_equal(tokens[4], tokens[5])


@pytest.mark.parametrize("name", REARRANGEMENTS)
def test_the_symbols_of_a_source_are_uniform(name):
    tokens = draw(TASKS[name], [64] * 2000)
    counts = np.bincount(tokens[:, 1:65].ravel(), minlength=36)
    expected = 2000 * 64 / 32
    assert not counts[32:].any()
    assert ((counts[:32] - expected) ** 2 / expected).sum() < 31 + 4 * np.sqrt(62)


@pytest.mark.parametrize("name", REARRANGEMENTS)
@pytest.mark.parametrize("longest", [1, 64, 1000])
def test_the_solver_of_a_rearrangement_agrees_with_the_labels(name, longest):
    task = TASKS[name]
    lengths = [1, longest, *np.arange(300) % longest + 1]
    for row in draw(task, lengths):
        prompt, answer = task.split(row)
        assert task.solve(prompt) == answer


def test_the_solvers_know_small_cases_by_heart():
    for task, answer in ((Copy(), "7 31 0 7 2 <eos>"), (Reverse(), "2 7 0 31 7 <eos>"), (Sort(), "0 2 7 7 31 <eos>")):
        assert task.render(task.solve(task.read("<bos> 7 31 0 7 2 <sep>"))) == answer
        assert answer in task.__doc__


@pytest.mark.parametrize("name", REARRANGEMENTS)
def test_the_whole_answer_counts_and_all_of_it_but_eos_is_judged(name):
    counted, judged = TASKS[name].masks(np.array([3, 1]), 9)  # <bos> s s s <sep> t t t <eos>
    assert counted.astype(int).tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0, 0, 0]]
    assert judged.astype(int).tolist() == [[0, 0, 0, 0, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("task", [*TASKS.values(), Recall(symbols=5, words=20, width=3), Sort(symbols=7)], ids=lambda t: t.name)
def test_text_goes_there_and_back(task):
    everything = list(range(task.vocab))
    assert task.read(task.render(everything)) == everything
    assert len(set(task.render(everything).split())) == task.vocab
    assert task.render([task.bos, task.utilities, task.bos - 1]) == f"<bos> 0 {task.symbols - 1}"


def test_a_prompt_may_leave_out_its_frame():
    task = TASKS["sort"]
    for text in ("3 1", "<bos> 3 1", "3 1 <sep>", "  <bos>  3 1 <sep>\n"):
        assert task.read_prompt(text) == [32, 3, 1, 33]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3 x", "word 2, 'x', is not a token of sort; write numbers from 0 to 31, <bos>"),
        ("32", "word 1, '32', is not"),
        ("-1", "word 1, '-1', is not"),
        ("[0]", "word 1, '[0]', is not"),
        ("", "the prompt '' holds no source"),
        ("<bos> <sep>", "holds no source"),
        ("3 <sep> 3 <eos>", "<sep> cannot stand inside a prompt"),
    ],
)
def test_a_bad_prompt_is_refused_with_its_reason(text, message):
    with pytest.raises(ValueError) as error:
        TASKS["sort"].read_prompt(text)
    assert message in str(error.value)


def test_bad_tokens_are_refused():
    task = TASKS["copy"]
    for call, message in (
        (lambda: task.render([36]), "token 36 is not one of the 36 tokens of copy (0 to 35)"),
        (lambda: task.render([-1]), "token -1 is not one"),
        (lambda: task.split([32, 1, 2]), "no <sep> (token 33) in a sequence of 3 tokens"),
        (lambda: task.solve([1, 2]), "runs from <bos> to <sep>, got 2 tokens that begin and end with '1 2'"),
        (lambda: task.solve([]), "got 0 tokens"),
        (lambda: task.check(0), "a source of length 0 is empty"),
        (lambda: Copy(symbols=0), "symbols = 0 must be at least 1"),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert message in str(error.value)


def test_an_answer_without_eos_is_kept_as_far_as_it_goes():
    task = TASKS["copy"]
    assert task.split([32, 5, 33, 5]) == ([32, 5, 33], [5])
    assert task.split(np.array([32, 5, 33, 5, 34, 35, 35])) == ([32, 5, 33], [5, 34])
