"""The op on a GPU: the same family in Triton, forward and backward, with scores that never leave the chip."""
