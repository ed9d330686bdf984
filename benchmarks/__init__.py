"""What Marid costs and what it saves. Nothing in the package ``marid`` knows of it.

``suite`` compares workloads with eager PyTorch and other frameworks; the scripts beside it each measure one thing.
"""
