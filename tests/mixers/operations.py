"""How many operations PyTorch is asked for, which tells a loop over time from products over chunks."""

from torch.utils._python_dispatch import TorchDispatchMode


class Count(TorchDispatchMode):
    """Counts what is dispatched inside of it; an operator of our own is one, whatever it does."""

    calls = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.calls += 1
        return function(*arguments, **keywords or {})


def count_training(mixer, x):
    """Operations of the answer to x and of the gradients."""
    with Count() as count:
        mixer(x).sum().backward()
    return count.calls
