"""``python -m benchmarks.suite``: workloads run by Marid and by its peers, each in a process of its own, in turn.

``workloads`` lists what is measured, ``contestants/`` has the code of each workload for each peer, ``worker`` is the
process in which one contestant runs, ``harness`` gives the contestants their turns and checks what they return,
``results`` holds figures and their JSON, ``tables`` prints them, ``__main__`` is the command line.
"""
