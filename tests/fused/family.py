"""The kernels that the tests of the fused paths go through: every member of the family, and powers of every kind."""

from compactattn import parse
from compactattn.kernels import FAMILY, RULES, encode

KERNELS = [
    "gaussian",
    "epanechnikov",
    "biweight",
    "triweight",
    "entmax(1.7)",
    "norm_relu",
    "rectified(r=3, b=1)",
    "relumax",
    "relumax(r=2, b=2)",
    "topk_softmax(3)",
    "topk_uniform(3)",
    "topk_epanechnikov(4)",
    "topk_biweight(4)",
    "topk_triweight(5)",
    "topk_rectified(4, r=1.5)",
    "ball",
    "margin",
    "truncated_gaussian(1.5)",
]
ONE_OF_EACH_RULE = ["biweight", "norm_relu", "relumax", "topk_epanechnikov(9)"]
assert {member.name for member in FAMILY} == {name.partition("(")[0] for name in KERNELS}
assert {encode(parse(name))[1] for name in ONE_OF_EACH_RULE} == set(RULES)
