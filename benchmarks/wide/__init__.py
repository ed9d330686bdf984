"""``python -m benchmarks.wide``: many small programs of unlike kinds, by eager PyTorch and by Marid.

Where ``benchmarks.suite`` looks closely at a few workloads and many peers, this looks at what ordinary PyTorch costs
beyond its kernels. ``workloads/`` has the programs, a module for each kind; ``worker`` is the process in which one of
them is measured; ``checks`` compares outputs; ``harness`` starts the processes; ``table`` prints figures and the
summary line; ``__main__`` is the command line. ``overhead`` divides the time of an operation into its parts.
"""
