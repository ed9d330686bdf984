"""Check the networks of a range of seeds, and print what differs.

    python -m tests.fuzz --seeds 0:1000 [--tier flat|tight|immediate|compiled|replayed] [--worker|--captured] [--shrink]

They run in a process beside this one, so that a crash, of PyTorch's own kernels too, costs one seed.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import os
import time
import unittest.mock
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import torch

import marid
from marid.frontend.engines import assign

from .networks import TIERS, check, network, source, tier_settings, train

SEEDS_OF_A_PROCESS = 1000


@dataclass
class Checked:
    """What was found of one seed: a line for each difference, its kinds, and the calls that fell back to eager."""

    lines: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)


def _prepare(threads: int, worker: bool, captured: bool) -> None:
    torch.set_num_threads(threads)
    if worker:
        marid.connect(workers=1)
    if captured:
        from tests.simulated_graphs import Apart

        assign([(0, Apart.engine())])
    logging.getLogger("marid").setLevel(logging.ERROR)  # fallbacks are counted


def _check(seed: int, tier_name: str, shrink: bool, show_source: bool) -> Checked:
    from .shrinking import minimised, script

    marid.reset_stats()
    net, tier = network(seed), TIERS[tier_name]
    found = check(net, tier)
    seen = Checked(fallbacks=Counter(marid.stats().fallbacks))
    if found:
        seen.kinds = [one.kind for one in found]
        seen.lines.append(f"seed {seed}: " + "; ".join(map(str, found)))
        if show_source:
            seen.lines.append(source(net))
        if shrink:
            seen.lines.append(script(minimised(net, found[0], tier), tier))
    return seen


def _train_on_the_cpu(seed: int, tier_name: str) -> str:
    """A digest of all that is seen of it."""
    tier = TIERS[tier_name]
    with warnings.catch_warnings(), tier_settings(tier):
        warnings.simplefilter("ignore")
        observer = train(tier.changes(network(seed)), "cpu", tier)
    seen = hashlib.sha256()
    for one in observer.seen:
        if isinstance(one.value, torch.Tensor):
            seen.update(one.value.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            seen.update(repr(one.value).encode())
    return seen.hexdigest()


def _pool(options: argparse.Namespace) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        1,
        multiprocessing.get_context("spawn"),
        initializer=_prepare,
        initargs=(options.threads, options.worker, options.captured),
        max_tasks_per_child=SEEDS_OF_A_PROCESS,
    )


def _crashes_without_the_device(seed: int, options: argparse.Namespace) -> bool:
    with _pool(options) as pool:
        pool.submit(network, seed).result()
        try:
            pool.submit(_train_on_the_cpu, seed, options.tier).result()
        except BrokenProcessPool:
            return True
    return False


def _reads_what_nobody_wrote(seed: int, options: argparse.Namespace) -> bool:
    """Whether a training on the CPU depends on what freed memory holds, with which glibc fills it where asked to."""
    seen = set()
    for filled_with in ("0", "85", "170", "255"):
        with unittest.mock.patch.dict(os.environ, MALLOC_PERTURB_=filled_with), _pool(options) as pool:
            seen.add(pool.submit(_train_on_the_cpu, seed, options.tier).result())
    return len(seen) > 1


def _checked(seeds: range, options: argparse.Namespace) -> Iterator[Checked]:
    pool = _pool(options)
    for seed in seeds:
        try:
            found = pool.submit(_check, seed, options.tier, options.shrink, options.source).result()
            if found.kinds and _reads_what_nobody_wrote(seed, options):
                print(f"seed {seed}: reads memory that nobody wrote without the device, too", flush=True)
                continue
            yield found
        except BrokenProcessPool:
            pool.shutdown()
            pool = _pool(options)
            if _crashes_without_the_device(seed, options):
                print(f"seed {seed}: ends the process without the device, too", flush=True)
                continue
            yield Checked([f"seed {seed}: ends the process"], ["crash"])
    pool.shutdown()


def main() -> int:
    """Check a range of seeds; 1 if something differs, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Check the networks of a range of seeds.")
    parser.add_argument("--seeds", default="0:100", help="one seed, or a range such as 0:1000")
    parser.add_argument("--tier", choices=TIERS, default="flat")
    parser.add_argument("--worker", action="store_true", help="the device is a worker process: tiers flat and replayed")
    parser.add_argument(
        "--captured", action="store_true", help="the device captures, played by the CPU: the same tiers"
    )
    parser.add_argument("--shrink", action="store_true", help="print the smallest script that shows each difference")
    parser.add_argument("--source", action="store_true", help="print the source of each network that fails")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of a kernel: one is quickest for small networks"
    )
    options = parser.parse_args()
    if (options.worker or options.captured) and options.tier not in ("flat", "replayed"):
        parser.error(f"the tier {options.tier} is one of the processor in this process; take flat or replayed")
    first, _, stop = options.seeds.partition(":")
    seeds = range(int(first), int(stop or int(first) + 1))
    fallbacks: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    failed = checked = 0
    start = time.perf_counter()
    for seen in _checked(seeds, options):
        checked += 1
        failed += bool(seen.kinds)
        kinds.update(seen.kinds)
        fallbacks.update(seen.fallbacks)
        if seen.lines:
            print("\n".join(seen.lines), flush=True)
    seconds = time.perf_counter() - start
    tier = options.tier + (" on a worker" if options.worker else " captured" if options.captured else "")
    print(f"{checked} networks ({tier}) in {seconds:.0f} s, {failed} differ: {dict(kinds)}")
    print(f"fallbacks: {dict(fallbacks.most_common())}")
    return min(failed, 1)
