import math

import pytest
import torch

import compactattn
from compactattn import Kernel, ball, biweight, entmax, epanechnikov, gaussian, parse, relumax, topk_softmax, triweight
from compactattn.kernels import (
    FAMILY,
    GAUSSIAN,
    NAMES,
    RULES,
    STEP,
    Anchored,
    Fixed,
    Nearest,
    Normalising,
    Profile,
    decode_rule,
    encode,
)
from compactattn.report.paper import name_kernel

PROFILES = [STEP, Profile(1), Profile(2), Profile(3), Profile(4.25), GAUSSIAN]
RULE_OBJECTS = [Fixed(), Fixed(1.25), Anchored(), Anchored(0.3), Normalising(), Nearest(1), Nearest(16)]
SOME = {"alpha | r=": (1.4,), "k": (3,), "k, r=1": (3,)}  # arguments of the members that need some
CELLS = [(p, r) for p in PROFILES for r in RULE_OBJECTS if not (p == STEP and r == Normalising())]


@pytest.mark.parametrize(("profile", "rule"), CELLS, ids=str)
def test_every_cell_of_the_family_is_a_kernel_whose_text_parses_back(profile, rule):
    kernel = Kernel(profile, rule)
    assert parse(str(kernel)) == kernel
    assert hash(parse(str(kernel))) == hash(kernel)


@pytest.mark.parametrize(("profile", "rule"), CELLS, ids=str)
def test_a_kernel_survives_its_code(profile, rule):
    kernel = Kernel(profile, rule)
    r, name, value = encode(kernel)
    assert Kernel(Profile(r), decode_rule(name, value)) == kernel
    assert RULES[name] is type(kernel.rule)


def test_classical_and_attention_names_are_the_same_kernels():
    assert parse("softmax") == gaussian() == parse("gaussian") == entmax(1) == parse("entmax(1)")
    assert parse("sparsemax") == epanechnikov() == parse("epanechnikov") == entmax(2) == parse("entmax(2)")
    assert parse("entmax15") == biweight() == parse("biweight") == entmax(1.5) == parse("entmax(3/2)")
    assert parse("entmax43") == triweight() == parse("triweight") == entmax(4 / 3) == parse("entmax(4/3)")
    assert entmax(r=3) == triweight() == parse("entmax(r=3)")
    assert parse("norm_relu") == parse("rectified(1)") == parse("rectified(r=1, b=1/2)")
    assert parse("relumax") == relumax(1, 1) == parse(" RELUMAX ( b = 1 , r = 1 ) ")
    assert parse("topk_epanechnikov(5)") == parse("topk_rectified(5, r=1)")


def test_a_power_of_order_zero_is_the_step_by_its_own_name():
    for power, step in (
        ("relumax(r=0)", "margin"),
        ("0-ReLUmax", "margin"),
        ("relumax(0, b=2)", "margin(b=2)"),
        ("rectified(r=0)", "ball"),
        ("topk_rectified(3, r=0)", "topk_uniform(3)"),
    ):
        assert parse(power) == parse(step)
        assert str(parse(power)) == str(parse(step))
        assert str(parse(power)).startswith(step.partition("(")[0])


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("1.5-entmax", "biweight"),
        ("4/3-entmax", "triweight"),
        ("1.7-Entmax", "entmax(1.7)"),
        ("1-ReLUmax", "relumax"),
        (" 2-ReLUmax ", "relumax(r=2)"),
        ("normReLU", "norm_relu"),
        ("normalised ReLU", "norm_relu"),
        ("normReLU^2", "rectified(2)"),
        ("Gaussian kNN, k=32", "topk_softmax(32)"),
        ("uniform kNN, k=8", "topk_uniform(8)"),
    ],
)
def test_what_the_paper_writes_parses(written, text):
    assert parse(written) == parse(text)


def test_what_reports_call_a_kernel_parses_back():
    for member in FAMILY:
        kernel = member.make(*SOME.get(member.parameters, ()))
        assert parse(name_kernel(kernel)) == kernel


def test_every_name_that_parses_can_be_imported():
    for name, member in NAMES.items():
        assert getattr(compactattn, name) is member.make


def test_every_name_has_a_formula_and_makes_a_kernel():
    assert len(NAMES) == sum(1 + len(member.aliases) for member in FAMILY)
    for member in FAMILY:
        assert isinstance(member.make(*SOME.get(member.parameters, ())), Kernel)
        assert member.formula
        assert member.paper


@pytest.mark.parametrize("n", range(1, 200))
def test_entmax_of_one_plus_one_over_n_is_exactly_the_nth_power(n):
    assert entmax(1 + 1 / n).r == n


def test_compact_says_whether_zeros_are_possible():
    assert not gaussian().compact
    assert all(parse(text).compact for text in ("sparsemax", "entmax(1.01)", "topk_softmax(3)", "truncated_gaussian", "ball"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sparsmax", ["'sparsmax'; did you mean 'sparsemax'? Known kernels: gaussian", "topk_uniform"]),
        ("foo", ["unknown kernel 'foo'. Known kernels: gaussian"]),
        ("bi-weight", ["does not read as name or name(arguments)", "biweight"]),
        ("", ["does not read as name", "gaussian"]),
        ("entmax(1.5", ["does not read as name or name(arguments)"]),
        ("relumax(r=1, r=2)", ["gives r twice"]),
        ("relumax(r=1e400)", ["'1e400' is not a number in range"]),
        ("relumax(1e999999999)", ["'1e999999999' is not a number in range"]),
        ("relumax(1e-100000)", ["'1e-100000' is not a number in range"]),
        ("relumax(1e-400)", ["'1e-400' is not a number in range"]),
        (f"relumax({'9' * 100_000})", ["9…' is not a number in range"]),
        ("entmax", ["entmax takes (alpha | r=)"]),
        ("entmax(0.9)", ["alpha = 0.9 is outside 1 ≤ alpha ≤ 2, where 1 is softmax and 2 sparsemax"]),
        ("entmax(2.5)", ["2.5", "1 ≤ alpha ≤ 2"]),
        ("3-entmax", ["alpha = 3 is outside 1 ≤ alpha ≤ 2"]),
        ("entmax(nan)", ["'nan' is not a number"]),
        ("entmax(1.5, 2)", ["entmax takes (alpha | r=)"]),
        ("entmax(1/0)", ["'1/0' is not a number"]),
        ("relumax(c=1)", ["relumax takes (r=1, b=1)"]),
        ("relumax(r=0.5)", ["r = 0.5", "r ≥ 1"]),
        ("relumax(b=0)", ["b = 0", "positive"]),
        ("relumax(b=-1)", ["b = -1", "positive"]),
        ("topk_softmax(0)", ["k = 0", "≥ 1"]),
        ("topk_softmax(2.5)", ["k = 2.5", "whole number"]),
        ("topk_uniform(-3)", ["k = -3", "≥ 1"]),
        ("topk_softmax", ["topk_softmax takes (k)"]),
    ],
)
def test_a_bad_text_is_refused_with_the_remedy(text, words):
    with pytest.raises(ValueError) as error:
        parse(text)
    for word in words:
        assert word in str(error.value)


def test_bad_objects_are_refused():
    with pytest.raises(ValueError, match="cannot normalise itself"):
        Kernel(STEP, Normalising())
    with pytest.raises(ValueError, match="outside the family"):
        Profile(-1)
    with pytest.raises(ValueError, match="outside the family"):
        Profile(math.nan)
    with pytest.raises(ValueError, match="whole number"):
        topk_softmax(True)
    with pytest.raises(TypeError, match="Kernel or its text"):
        parse(3)
    with pytest.raises(TypeError, match=r"call it, as in topk_softmax\(k\)"):
        parse(topk_softmax)
    with pytest.raises(ValueError, match="only a normalising kernel"):
        Kernel(Profile(0, torch.tensor([1.5, 2.0])), Anchored())
    with pytest.raises(ValueError, match=r"shape \(\) or \(heads,\)"):
        Profile(0, torch.ones(2, 2))


def test_a_learned_alpha_is_checked_where_that_is_free():
    assert entmax(torch.tensor([1.5, 2.0])).learned
    assert str(entmax(torch.tensor(1.5))) == "entmax(alpha)"
    for bad in ([1.5, 0.9], [2.1], [math.nan]):
        with pytest.raises(ValueError, match="outside 1 ≤ alpha ≤ 2, where 1 is softmax"):
            entmax(torch.tensor(bad))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: relumax(x), "r"),
        (lambda x: entmax(r=x), "r"),
        (lambda x: relumax(b=x), "b"),
        (lambda x: ball(x), "b"),
        (lambda x: topk_softmax(x), "k"),
    ],
)
@pytest.mark.parametrize("x", [torch.full((8,), 2.0), torch.tensor(2.0)], ids=["eight", "one"])
def test_only_alpha_may_be_a_tensor(make, name, x):
    with pytest.raises(TypeError, match=f"^{name} is a number; only entmax's alpha may be a tensor, got one of shape"):
        make(x)


def test_learned_kernels_are_equal_if_they_learn_the_same_tensor():
    alpha = torch.full((2,), 1.5)
    assert entmax(alpha) == entmax(alpha)
    assert hash(entmax(alpha)) == hash(entmax(alpha))
    assert entmax(alpha) != entmax(alpha.clone())
    assert entmax(alpha) != entmax(1.5)
    assert len({entmax(1.5), biweight(), entmax(alpha)}) == 2
