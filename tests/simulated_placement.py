"""Many workers and many prompts, without a model: how much is reused, and how even the load is, placed by prefix or at random.

Run it with `python -m tests.simulated_placement --workers 1000 --prompts 1000000`.

A prompt is a system prompt, perhaps a task with its examples, and a conversation or a question of its own. System prompts and tasks are as
popular as words (Zipf); a conversation comes back with each of its turns. Prompts are paths of pieces, not tokens, so a million
fit; what a worker computes is each piece of each path once, as if its pool held one path.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

import numpy as np

from hf_paged_cache.jobs.order import Branch, ordered, partition

_NEW_TOKENS = 64


class Traffic(NamedTuple):
    """Prompts as paths: [prompts, 3] piece numbers, and the tokens of each of those pieces."""

    pieces: np.ndarray  # of a column, equal numbers are equal pieces after equal paths
    lengths: np.ndarray


class Outcome(NamedTuple):
    """What a placement comes to."""

    hit_rate: float  # tokens of prompts that are not computed
    imbalance: float  # the most tokens that a worker computes, over the mean


def traffic(num_prompts: int, seed: int = 0) -> Traffic:
    """Random prompts: 500 system prompts, 20 tasks for each, 1 to 8 turns a conversation."""
    rng = np.random.default_rng(seed)
    system = _popular(rng, 500, num_prompts)
    task = system * 21 + _popular(rng, 21, num_prompts)
    conversation = np.repeat(np.arange(num_prompts), rng.integers(1, 9, num_prompts))[:num_prompts]
    first = np.unique(conversation, return_index=True)[1][conversation]
    system, task = system[first], task[first]  # a conversation keeps its own
    of_system = rng.integers(200, 3000, 500)
    of_task = rng.integers(0, 2000, 500 * 21)
    turn = np.arange(num_prompts) - first
    pieces = np.stack([system, task, conversation], 1)
    return Traffic(pieces, np.stack([of_system[system], of_task[task], 60 * (1 + turn)], 1))


def _popular(rng: np.random.Generator, num_kinds: int, size: int) -> np.ndarray:
    weights = 1 / np.arange(1, num_kinds + 1)
    return rng.choice(num_kinds, size, p=weights / weights.sum())


def tree_of(given: Traffic) -> tuple[Branch, list[int]]:
    """The prefix tree, and the tokens of each prompt. Each turn of a conversation is a branch within that of the turn before."""
    root, nodes = Branch(0), {}
    ends = given.lengths.cumsum(1)
    for number, (path, tokens) in enumerate(zip(given.pieces.tolist(), ends.tolist(), strict=True)):
        parent = root
        for depth in (0, 1):
            key = (depth, path[depth])
            if key not in nodes:
                nodes[key] = Branch(tokens[depth])
                parent.branches.append(nodes[key])
            parent = nodes[key]
        before = nodes.get((2, path[2]), parent)
        nodes[2, path[2]] = turn = Branch(tokens[2], [number])
        before.branches.append(turn)
    for branch in reversed([*root.walk()]):
        branch.num_prompts = len(branch.prompts) + sum(each.num_prompts for each in branch.branches)
    return root, ends[:, -1].tolist()


def outcome(given: Traffic, worker: np.ndarray, num_workers: int) -> Outcome:
    """What is computed where prompt i runs on `worker[i]`: each piece once a worker, of a conversation its longest turn."""
    load = np.bincount(worker, minlength=num_workers).astype(float) * _NEW_TOKENS
    for depth in range(given.pieces.shape[1]):
        pair = worker.astype(np.int64) * (given.pieces[:, depth].max() + 1) + given.pieces[:, depth]
        order = np.lexsort((given.lengths[:, depth], pair))
        last = np.append(pair[order][1:] != pair[order][:-1], True)
        chosen = order[last]  # the longest of each piece on each worker
        load += np.bincount(worker[chosen], given.lengths[chosen, depth], num_workers)
    computed = load.sum() - _NEW_TOKENS * len(worker)
    return Outcome(1 - computed / given.lengths.sum(), load.max() / load.mean())


def simulate(num_workers: int, num_prompts: int, seed: int = 0) -> dict[str, Outcome]:
    """By prefix, at random, and all on one worker, which is the most that can be had."""
    given = traffic(num_prompts, seed)
    worker = np.empty(num_prompts, np.int64)
    for number, own in enumerate(partition([*ordered(*tree_of(given))], num_workers, _NEW_TOKENS)):
        worker[[each.prompt for each in own]] = number
    at_random = np.random.default_rng(seed).integers(0, num_workers, num_prompts)
    return {
        "by prefix": outcome(given, worker, num_workers),
        "at random": outcome(given, at_random, num_workers),
        "on one worker": outcome(given, np.zeros(num_prompts, np.int64), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name, each in simulate(given.workers, given.prompts, given.seed).items():
        busiest = f"the busiest worker has {each.imbalance:.2f} times the mean"
        sys.stdout.write(f"{name:14} {each.hit_rate:6.1%} of prompt tokens reused, {busiest}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
