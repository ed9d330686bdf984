"""The client's side of a worker: the engine of its device, and what is needed to do work again."""
