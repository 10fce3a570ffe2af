"""Models: a residual block around a mixer, the language model of such blocks, named sizes, generation with a cache."""
