"""``marid.place``: the layers of a model over several devices."""
