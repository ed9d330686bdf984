"""Passes: what changes a part before it is compiled.

``rewriter`` shows a part as an FX graph, the passes change it, and its new description is compiled in place of the
recorded one; ``registry`` runs them in order, users' passes last. Marid's own do what Inductor does not, and only with
``marid.settings.fast_math``; algebra, repeated subexpressions, dead code and the like are Inductor's.
"""
