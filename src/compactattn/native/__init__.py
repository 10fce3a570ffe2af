"""The kernels on a CPU: attend.c, compiled once by the machine's own C compiler."""
