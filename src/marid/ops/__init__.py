"""What is known of operators: one record for each, which every other layer asks.

``facts.py`` has the record (``Facts``) and how it is made from an operator's schema, its tags and the row that the
operator has in ``irregular.py``, where it has one. ``autocast_lists.py`` has PyTorch's lists of operators that autocast
changes. ``own_operators.py`` defines operators of Marid's own.
What is *done* for an operator (a handler, a rule, how many numbers it draws) is a function, registered where such
functions are; ``docs/howto/operator.md`` says where.
"""
