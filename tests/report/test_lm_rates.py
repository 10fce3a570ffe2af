"""Lines of other learning rates are called so wherever they are listed or held against each other."""

from lm_examples import make_run
from report_examples import speak, tidy

from compactattn.experiments.language_modelling import LOW
from compactattn.report import lm_tables
from compactattn.report.lm_comparison import compare
from compactattn.report.lm_finding import find, hold_against_paper, list_kernels
from compactattn.report.lm_rates import describe_rates, spell_rate

comparison_of, told = speak(compare, find)
KERNELS = ("gaussian", "norm_relu", "relumax(r=1)", "sparsemax", "relumax(r=2)")


def make_eight(**lowered):
    """The rows of 8 layers with the losses 3.1, 3.2, 3.14, 3.12 and 3.9, where those named have other rates."""
    losses = dict(zip(KERNELS, (3.1, 3.2, 3.14, 3.12, 3.9), strict=True))
    return [make_run(losses[kernel], kernel=kernel, layers=8, **lowered.get(kernel, {})) for kernel in KERNELS]


def make_lowered():
    return make_eight(**{"relumax(r=2)": LOW._asdict()})


def test_the_caption_says_who_has_which_rate():
    transformer = make_run(2.6, kernel="gaussian", architecture="transformer", layers=8, **LOW._asdict())
    comparison = comparison_of(*make_lowered(), transformer)
    text = (
        "Learning rate 0.005, falling to 0.0001; 0.001, falling to 0.00005, for 2-ReLUmax and Transformer. "
        "The paper lowers it for 2-ReLUmax with 8 layers, for its instability."
    )
    assert describe_rates(comparison) == text
    assert text in lm_tables.describe(comparison)
    assert "the Transformer had a learning rate of 0.001 and not 0.005." in told(*make_lowered(), transformer)[1]


def test_one_rate_is_told_as_one():
    assert describe_rates(comparison_of(*make_eight())) == "Learning rate 0.005, falling to 0.0001."
    low = comparison_of(make_run(kernel="relumax(r=2)", layers=8, **LOW._asdict()))
    assert describe_rates(low) == "Learning rate 0.001, falling to 0.00005."
    assert describe_rates(comparison_of(make_run(rate=3e-3, final_rate=3e-3))) == "Learning rate 0.003."
    words = [
        *told(*make_eight()),
        *list_kernels(comparison_of(*make_eight())),
        *hold_against_paper(comparison_of(*make_eight())),
    ]
    assert "rate" not in " ".join(words).replace("separate", "")


def test_a_lowered_rate_that_is_not_the_papers_is_not_called_the_papers():
    comparison = comparison_of(*make_eight(**{"relumax(r=2)": {"rate": 2e-3}}))
    assert describe_rates(comparison) == "Learning rate 0.005, falling to 0.0001; 0.002, falling to 0.0001, for 2-ReLUmax."
    comparison = comparison_of(*make_eight(sparsemax=LOW._asdict()))
    assert "The paper" not in describe_rates(comparison)


def test_the_last_of_another_rate_is_told_with_the_last_of_the_same():
    first = list_kernels(comparison_of(*make_lowered()))[0]
    assert first.endswith(
        "the last, 2-ReLUmax, 0.800 behind (2-ReLUmax had a learning rate of 0.001 and not 0.005; "
        "of those at Gaussian's rate normReLU, 0.100 behind)."
    )
    assert "; 2-ReLUmax had a learning rate of 0.001 and not 0.005." in told(*make_lowered())[1]


def test_the_best_of_another_rate_is_told_with_the_best_of_the_same():
    runs = make_eight(sparsemax={"final_rate": 5e-5})
    clause = "sparsemax had a last learning rate of 0.00005 and not 0.0001"
    headline, _ = told(*runs)
    assert headline.endswith(f"Gaussian attention at 3.100 (one seed each); {clause}.")
    first = list_kernels(comparison_of(*runs))[0]
    assert f"the best, sparsemax, is 0.020 behind ({clause}; of those at Gaussian's rate 1-ReLUmax, 0.040 behind)" in first
    assert "the last, 2-ReLUmax, 0.800 behind." in first


def test_a_claim_is_also_counted_over_the_pairs_of_one_rate():
    claims = tidy("\n".join(hold_against_paper(comparison_of(*make_lowered()))))
    clause = "one learning rate (2-ReLUmax had a learning rate of 0.001 and not 0.005)"
    assert (
        f"r-ReLUmax is better than normReLU with 8 and 12 layers. Here: holds for 1 of 2 pairs, 1 of 1 at {clause};" in claims
    )
    assert "sparsemax and entmax are consistently better than normReLU. Here: holds for 1 of 1 pairs; the best" in claims
    alone = [make_run(3.2, kernel="norm_relu", layers=8), make_run(3.9, kernel="relumax(r=2)", layers=8, **LOW._asdict())]
    (claim,) = [text for text in hold_against_paper(comparison_of(*alone)) if "r-ReLUmax is better" in text]
    assert f"holds for 0 of 1 pairs, none at {clause};" in claim


def test_claims_without_pairs_tell_other_rates_too():
    runs = [
        make_run(3.1, kernel="gaussian", layers=8),
        make_run(3.2, layers=8, rate=2e-3),
        make_run(kernel="biweight", layers=8),
    ]
    runs.append(make_run(3.3, kernel="topk_softmax(32)", layers=8, rate=1e-3))
    claims = hold_against_paper(comparison_of(*runs))
    clause = "apart; sparsemax had a learning rate of 0.002 and not 0.005; the others lie between 1.5-entmax"
    assert any(clause in claim for claim in claims)
    assert any("with Gaussian kNN, k=32; Gaussian kNN, k=32 had a learning rate of 0.001" in claim for claim in claims)


def test_rates_are_spelt_in_plain_digits():
    assert [spell_rate(rate) for rate in (5e-3, 1e-4, 5e-5, 0.0, 1.0)] == ["0.005", "0.0001", "0.00005", "0.0", "1.0"]
