"""What is measured, a module for each family of workloads.

``worker.py`` loads one of them by its path and calls ``prepare(lab)``, which imports the framework, then
``build(lab)``, which makes model and data and returns what is timed. They import nothing of Marid's but Marid itself,
where the peer is Marid.
"""
