"""Which derivatives the operators have: one backward, also under torch.func. Others are refused, never silently zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.library import CustomOpDef


def refuse_second(*_: Any) -> NoReturn:
    """Stands for the gradient of a gradient."""
    raise RuntimeError(
        "attend and weights have no second derivative; detach their gradients, or take differences of them instead"
    )


def refuse_forward(ctx: Any = None, *_: Any) -> NoReturn:
    """Stands for the derivative in forward mode."""
    raise NotImplementedError(
        "attend, weights and decode have no forward-mode derivative (jvp, jacfwd); "
        "differentiate attend or weights backwards, with torch.func.grad, vjp or jacrev"
    )


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Refuses dual tensors, whose tangents an operator would drop without a word."""
    if any(x is not None and unpack_dual(x).tangent is not None for x in tensors):
        refuse_forward()


def may_need_gradient(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may follow. Under torch.func a tensor does not tell: vmap hides it."""
    if not torch.is_grad_enabled():
        return False
    return torch._C._are_functorch_transforms_active() or any(x is not None and x.requires_grad for x in tensors)


def differentiable(op: CustomOpDef, pull: Callable[..., Any], save: Callable[..., None] | None = None) -> Callable[..., Any]:
    """The operator with a backward formula; `save` keeps for `pull` what it needs of the inputs and outputs.

    torch.func asks for a Function with a setup_context of its own, which those of torch.library lack: it gets another one.
    """
    op.register_autograd(pull, setup_context=save)

    class Transformed(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return op(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if save is not None:
                save(ctx, inputs, output)

        backward = staticmethod(pull)
        jvp = staticmethod(refuse_forward)

    def call(*inputs: Any) -> Any:
        # a graph can hold the operator under vmap, but no Function with a jvp
        transformed = torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()
        return (Transformed.apply if transformed else op)(*inputs)

    return call
