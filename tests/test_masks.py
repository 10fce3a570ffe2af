import pytest
import torch

from compactattn import ALiBi, Allowed, Bias, Causal, Packed, Padding
from compactattn.masks import resolve


def visible(mask, shape):
    """(B, H, Q, K) booleans: which keys a query may see."""
    view = resolve(mask, shape, torch.device("cpu"))
    key = torch.arange(shape[3])
    seen = (key >= view.lo[:, None, :, None]) & (key < view.hi[:, None, :, None])
    seen = seen if view.allowed is None else seen & view.allowed
    return seen.expand(shape)


@pytest.mark.parametrize("offset", [-2, 0, 1, 3])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (3, 8), (8, 3)])
def test_causal_sees_keys_up_to_its_position_less_the_offset(offset, queries, keys):
    for start in (None, 0, 2):
        seen = visible(Causal(offset, start), (1, 1, queries, keys))[0, 0]
        first = keys - queries if start is None else start
        expected = torch.tensor([[j <= first + i - offset for j in range(keys)] for i in range(queries)])
        assert torch.equal(seen, expected)


def test_padding_hides_keys_and_empties_padded_queries():
    lengths = torch.tensor([0, 2, 5])
    seen = visible(Padding(lengths, queries=lengths), (3, 2, 5, 5))
    for b, n in enumerate(lengths):
        expected = torch.zeros(5, 5, dtype=torch.bool)
        expected[:n, :n] = True
        assert torch.equal(seen[b, 0], expected)
    assert visible(Padding([0, 2, 5]), (3, 2, 5, 5))[1, 0].sum() == 10


def test_packed_sequences_do_not_see_each_other_and_may_be_empty():
    lengths = [3, 0, 1, 4]
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    seen = visible(Packed(lengths), (1, 1, 8, 8))[0, 0]
    assert torch.equal(seen, owner[:, None] == owner)
    strict = visible(Causal(1) & Packed(torch.tensor(lengths)), (1, 1, 8, 8))[0, 0]
    assert torch.equal(strict, (owner[:, None] == owner).tril(-1))


def test_packed_queries_of_other_lengths_end_where_their_keys_end():
    seen = visible(Packed([4, 3], queries=[2, 1]) & Causal(), (1, 1, 3, 7))[0, 0]
    assert torch.equal(seen.int(), torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1]]).int())


def test_masks_join_in_any_order():
    allowed = torch.rand(2, 1, 6, 6) > 0.3
    parts = [Causal(), Padding([4, 6]), Allowed(allowed), Packed([2, 4])]
    expected = torch.stack([visible(part, (2, 1, 6, 6)) for part in parts]).all(0)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        mask = parts[order[0]]
        for index in order[1:]:
            mask = mask & parts[index]
        assert torch.equal(visible(mask, (2, 1, 6, 6)), expected)


def test_alibi_has_the_published_slopes_and_measures_from_the_query():
    view = resolve(ALiBi() & Causal(), (1, 8, 2, 5), torch.device("cpu"))
    torch.testing.assert_close(view.slopes, torch.tensor([2.0**-i for i in range(1, 9)]))
    assert view.at.tolist() == [[3, 4]]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (Padding([1, 2, 3]), "needs 2 key lengths"),
        (Padding([1, 9]), "must lie in 0..5"),
        (Padding([1, -1]), "must lie in 0..5"),
        (Padding([1, 2], queries=[1]), "needs 2 query lengths"),
        (Packed([2, 2]), "sum to 5, got"),
        (Packed([6, -1]), "sum to 5, got"),
        (Packed([2, 3], queries=[4]), "one length each"),
        (Packed([2, 3]), "give Packed(lengths, queries=...)"),
        (Packed([2, 3], queries=[1, 3]) & Causal(start=2), "Causal without start"),
        (Allowed(torch.ones(3, 5, dtype=torch.bool)), "(3, 5) does not broadcast"),
        (Allowed(torch.ones(2, 5, dtype=torch.bool)), "= (2, 3, 4, 5); a (batch, keys) mask is mask[:, None, None]"),
        (Bias(torch.ones(2, 4, 5)), "= (2, 3, 4, 5); a (batch, queries, keys) mask is mask[:, None]"),
        (Bias(torch.ones(2, 2, 2, 4, 5)), "does not broadcast"),
        (torch.ones(4, 4), "(4, 4) does not broadcast"),
        (Causal(start=0) & Causal(start=0), "two Causal masks with a start"),
        (ALiBi([0.5, 0.1]), "each of 3 heads"),
        (ALiBi() & ALiBi(), "two ALiBi masks"),
        (ALiBi(torch.ones(3, requires_grad=True)), "constants"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_with_the_sizes(mask, words):
    with pytest.raises(ValueError) as error:
        resolve(mask, (2, 3, 4, 5), torch.device("cpu"))
    assert words in str(error.value)


def test_a_bare_tensor_joins_like_the_mask_it_stands_for():
    allowed = torch.rand(4, 5) > 0.4
    expected = visible(Causal() & Allowed(allowed), (2, 3, 4, 5))
    assert torch.equal(visible(Causal() & allowed, (2, 3, 4, 5)), expected)


@pytest.mark.parametrize(
    "lengths", [torch.tensor([3.0, 4.0]), torch.tensor([True, False]), torch.ones(2, 5).bool(), None, [1.5, 2]]
)
def test_lengths_that_are_not_whole_are_refused(lengths):
    with pytest.raises(
        TypeError, match=r"Padding takes whole lengths, got .*; a \(batch, keys\) mask is mask\[:, None, None\]"
    ):
        resolve(Padding(lengths), (2, 3, 4, 5), torch.device("cpu"))


def test_a_fractional_offset_is_refused():
    with pytest.raises(TypeError, match=r"whole numbers, got offset=1\.5"):
        Causal(1.5)


def test_joining_with_none_says_to_leave_it_out():
    for join in (lambda: Causal() & None, lambda: None & Causal()):
        with pytest.raises(TypeError, match=r"None is no mask, .*; use the other mask alone"):
            join()


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (Causal(), "Causal()"),
        (Causal(offset=1, start=4), "Causal(offset=1, start=4)"),
        (Padding([3, 4], queries=torch.ones(2).int()), "Padding(lengths=[3, 4], queries=<int32 of shape (2,)>)"),
        (Packed(list(range(9))), "Packed(lengths=<9 numbers>)"),
        (Allowed(torch.ones(2, 1, 6, 6).bool()), "Allowed(tensor=<bool of shape (2, 1, 6, 6)>)"),
        (Causal(1) & torch.ones(6, 6) & ALiBi(), "Causal(offset=1) & Bias(tensor=<float32 of shape (6, 6)>) & ALiBi()"),
    ],
)
def test_a_printed_mask_tells_sizes_and_not_whole_tensors(mask, text):
    assert repr(mask) == text


def test_a_mask_of_the_wrong_kind_is_refused():
    for mask in (
        Allowed(torch.ones(4, 5)),
        Bias(torch.ones(4, 5, dtype=torch.bool)),
        torch.ones(4, 5, dtype=torch.int),
        "causal",
    ):
        with pytest.raises(TypeError):
            resolve(mask, (2, 3, 4, 5), torch.device("cpu"))
