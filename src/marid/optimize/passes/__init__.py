"""Passes: what makes a program that comes again do less, with the same results.

``rewriter`` shows a program as an FX graph, the passes change it, ``lowering`` makes a program of it again and knows
how to go on as recorded when that stops halfway; ``registry`` runs them in order, users' passes last.
"""
