"""How much of what could be reused our eviction keeps: `python benchmarks/bench_eviction.py`. No model, no torch.

A seeded program makes a trace of requests in the order of their time: conversations of several turns that come back
after a pause, mostly short and sometimes long, behind one of a few system prompts; turns asked again (another answer)
and conversations that go on from an earlier turn (branches); and, in one of the two traces, bursts of long documents
that nobody asks for again (floods). One request runs at a time, as on one `PagedPrefixCache`.

`ours`, what the cache does, is replayed through the allocator and block tables that the cache itself uses. The others
are simulated over the same prefix tree. `clairvoyant` evicts the leaf that is asked for again last: Belady's
rule, and as a block is asked for no later than its descendants, never at the cost of a better victim. `fifo` evicts
what was computed first, whatever hangs on it; were it to spare blocks with descendants, it would do what `lru` does,
for each turn adds the leaf it ends in. `segmented` resists floods: what was never hit goes before all that was, either
side least recently used first (segmented LRU without a bound on the side that is spared). Where nothing is evicted, the
simulation must hit exactly the same tokens in every request as the real allocator, or the run fails.

The working set is the number of distinct full blocks of a whole trace, the floods' own among them; a third row of
results shows the floods in pools that are shares of the working set without floods. Hit rate: prompt tokens found in
whole blocks over all prompt tokens. `unbounded` never evicts: the most that any policy could hit.

`--trace FILE` replays others' requests in the order of the file: JSON lines, of each the `hash_ids` of its blocks,
which name a block and all before it (the traces that Mooncake published are such). Beside are LFU, ARC and S3-FIFO, for
which each block of a request is an object that is asked for, the last one first.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple, Protocol

import harness
from replay import replay_blocks

from hf_paged_cache.blocks import BlockTable, PrefixCachingBlockAllocator, root_hash

BLOCK_SIZE = 16
SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)  # size of the pool / working set
POLICIES = ("fifo", "segmented", "lru", "ours", "clairvoyant")
TRACES = ("no floods", "floods", "floods, small pools")
GAP = 0.10  # LRU this far behind on the first two traces at one share would be worth another policy
NEVER = sys.maxsize


@dataclass(frozen=True)
class Habits:
    """What people do.

    Times in minutes, lengths in tokens; `mean_*` of exponential distributions, (least, most) of uniform ones.
    """

    minutes: float = 240.0
    num_sessions: int = 240
    num_system_prompts: int = 6  # the n-th is chosen 1/n times as often as the first
    system_prompt: tuple[int, int] = (200, 1500)
    mean_turns: float = 5.0
    mean_short_pause: float = 2.0
    mean_long_pause: float = 60.0
    long_pauses: float = 0.2  # share of the pauses
    message: tuple[int, int] = (10, 250)
    answer: tuple[int, int] = (30, 400)
    retries: float = 0.08  # share of turns asked once more
    forks: float = 0.08  # share of turns that go on from an earlier one
    num_floods: int = 6
    documents_in_flood: int = 20
    document: tuple[int, int] = (3000, 8000)
    instruction: int = 64  # tokens before every document, always the same


class Request(NamedTuple):
    """One call of `generate`: its prompt, and the prompt with the answer's tokens that are run through the model."""

    prompt: array[int]
    computed: array[int]


def make_trace(habits: Habits, seed: int, *, with_floods: bool) -> list[Request]:
    """The requests in the order of their time; the same conversations with floods and without."""
    rng, flood_rng = random.Random(f"sessions {seed}"), random.Random(f"floods {seed}")
    prompts = [_text(rng, *habits.system_prompt) for _ in range(habits.num_system_prompts)]
    popularity = [1 / number for number in range(1, len(prompts) + 1)]
    timed: list[tuple[float, int, Request]] = []
    for _ in range(habits.num_sessions):
        system_prompt = rng.choices(prompts, popularity)[0]
        for minute, request in _session(rng, habits, rng.uniform(0, habits.minutes), system_prompt):
            timed.append((minute, len(timed), request))
    if with_floods:
        instruction = _text(flood_rng, habits.instruction, habits.instruction)
        for _ in range(habits.num_floods):
            minute = flood_rng.uniform(0, habits.minutes)
            for number in range(habits.documents_in_flood):
                document = instruction + _text(flood_rng, *habits.document)
                request = _answered(flood_rng, habits, document)[0]
                timed.append((minute + 0.1 * number, len(timed), request))
    return [request for _, _, request in sorted(timed, key=lambda entry: entry[:2])]


def _session(
    rng: random.Random, habits: Habits, minute: float, system_prompt: array[int]
) -> list[tuple[float, Request]]:
    """Turns of one conversation, each with its minute."""
    made: list[tuple[float, Request]] = []
    history = [system_prompt]  # what the conversation holds before each of its turns, and now
    while minute < habits.minutes:
        if len(history) > 2 and rng.random() < habits.forks:
            del history[rng.randrange(1, len(history) - 1) + 1 :]
        prompt = history[-1] + _text(rng, *habits.message)
        request, whole = _answered(rng, habits, prompt)
        made.append((minute, request))
        if rng.random() < habits.retries:
            minute += rng.expovariate(2 / habits.mean_short_pause)
            request, whole = _answered(rng, habits, prompt)
            made.append((minute, request))
        history.append(whole)
        if rng.random() < 1 / habits.mean_turns:
            break
        is_long = rng.random() < habits.long_pauses
        minute += rng.expovariate(1 / (habits.mean_long_pause if is_long else habits.mean_short_pause))
    return made


def _answered(rng: random.Random, habits: Habits, prompt: array[int]) -> tuple[Request, array[int]]:
    """A request, and its prompt with the whole answer; the answer's last token is never run through the model."""
    whole = prompt + _text(rng, *habits.answer)
    return Request(prompt, whole[:-1]), whole


def _text(rng: random.Random, least: int, most: int) -> array[int]:
    return array("q", rng.choices(range(50_000), k=rng.randint(least, most)))


class Tree:
    """The prefix tree of a trace: each distinct full block is a node, numbered as it first comes.

    Attributes:
        parents: node -> the node before it, -1 for a first block.
        paths: request -> nodes of its full blocks.
        num_asked: request -> how many of these lie in its prompt, and so can be hit.
        num_blocks: request -> blocks it holds at its end, the last one perhaps not full.
        asked_at: node -> the requests whose prompts have it, in order.
    """

    def __init__(self, trace: Sequence[Request]) -> None:
        self.num_asked = [len(request.prompt) // BLOCK_SIZE for request in trace]
        self.num_blocks = [-(-len(request.computed) // BLOCK_SIZE) for request in trace]
        size = BLOCK_SIZE
        self._grow(
            [computed[start : start + size].tobytes() for start in range(0, len(computed) // size * size, size)]
            for _, computed in trace
        )

    @classmethod
    def of_blocks(cls, requests: Sequence[Sequence[Hashable]]) -> Tree:
        """Of requests that are given as their blocks, all of which can be hit."""
        tree = cls(())
        tree.num_asked = tree.num_blocks = [*map(len, requests)]
        tree._grow(requests)
        return tree

    def _grow(self, requests: Iterable[Sequence[Hashable]]) -> None:
        nodes: dict[tuple[int, Hashable], int] = {}
        self.parents: list[int] = []
        self.paths: list[list[int]] = []
        self.asked_at: list[list[int]] = []
        for number, blocks in enumerate(requests):
            path: list[int] = []
            node = -1
            for block in blocks:
                key = (node, block)
                node = nodes.setdefault(key, len(self.parents))
                if node == len(self.parents):
                    self.parents.append(key[0])
                    self.asked_at.append([])
                if len(path) < self.num_asked[number]:
                    self.asked_at[node].append(number)
                path.append(node)
            self.paths.append(path)

    def next_use(self, node: int, now: int) -> int:
        """The next request behind `now` that asks for a node, or NEVER."""
        uses = self.asked_at[node]
        index = bisect_right(uses, now)
        return uses[index] if index < len(uses) else NEVER

    def was_hit(self, node: int, now: int) -> bool:
        """Whether more than one request up to `now` asked for a node."""
        return bisect_right(self.asked_at[node], now) > 1


class Policy(NamedTuple):
    """Which block goes first: that of the least rank. A rank is given when a request that has the block ends."""

    rank: Callable[[Tree, int, int], int]  # tree, node, number of the request
    keeps_rank: bool = False  # a block that was cached already keeps the rank it had
    spares_parents: bool = True  # none is evicted before the blocks that go on from it


SIMULATED = {
    "fifo": Policy(lambda _, __, now: now, keeps_rank=True, spares_parents=False),
    "segmented": Policy(lambda tree, node, now: now + len(tree.paths) * tree.was_hit(node, now)),
    "lru": Policy(lambda _, __, now: now),
    "clairvoyant": Policy(lambda tree, node, now: -tree.next_use(node, now)),
}


def simulate(tree: Tree, policy: Policy, num_blocks: int) -> list[int]:
    """Blocks hit by each request, in a pool of `num_blocks` blocks."""
    ranks: dict[int, tuple[int, int]] = {}  # cached node -> rank, and a number that tells equal ranks apart
    num_children = [0] * len(tree.parents)
    heap: list[tuple[tuple[int, int], int]] = []  # what may be evicted, and entries that are no longer true
    hits: list[int] = []
    clock = 0

    def evict(held: set[int]) -> None:
        while True:
            rank, node = heapq.heappop(heap)
            if ranks.get(node) == rank and not num_children[node] and node not in held:
                break
        del ranks[node]
        parent = tree.parents[node]
        if parent >= 0 and policy.spares_parents:
            num_children[parent] -= 1
            if not num_children[parent]:
                heapq.heappush(heap, (ranks[parent], parent))

    for number, path in enumerate(tree.paths):
        num_hits = 0
        while num_hits < tree.num_asked[number] and path[num_hits] in ranks:
            num_hits += 1
        hits.append(num_hits)
        held = set(path[:num_hits])
        for _ in range(len(ranks) + tree.num_blocks[number] - num_hits - num_blocks):
            evict(held)
        for node in reversed(path):  # as our tables do: the last block is given back first
            if node not in ranks and tree.parents[node] >= 0 and policy.spares_parents:
                num_children[tree.parents[node]] += 1
            if node not in ranks or not policy.keeps_rank:
                clock += 1
                ranks[node] = (policy.rank(tree, node, number), clock)
            if not num_children[node]:
                heapq.heappush(heap, (ranks[node], node))
    return hits


class ObjectCache(Protocol):
    """A policy that knows nothing of prefixes."""

    def __contains__(self, key: int) -> bool: ...

    def ask(self, key: int) -> None:
        """Ask for an object, which is there afterwards."""


class Lfu:
    """Of what was asked for least often since it came, the least recently used goes first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.counts: dict[int, int] = {}
        self.lists: dict[int, OrderedDict[int, None]] = {}
        self.least = 1

    def __contains__(self, key: int) -> bool:
        return key in self.counts

    def ask(self, key: int) -> None:
        count = self.counts.get(key, 0)
        if count:
            del self.lists[count][key]
            if count == self.least and not self.lists[count]:
                self.least = count + 1
        else:
            if len(self.counts) >= self.size:
                gone, _ = self.lists[self.least].popitem(last=False)
                del self.counts[gone]
            self.least = 1
        self.counts[key] = count + 1
        self.lists.setdefault(count + 1, OrderedDict())[key] = None


class Arc:
    """Megiddo and Modha, FAST 2003."""

    def __init__(self, size: int) -> None:
        self.size, self.wanted = size, 0.0  # of `recent`
        self.recent, self.frequent, self.recent_ghosts, self.frequent_ghosts = (
            OrderedDict[int, None]() for _ in range(4)
        )

    def __contains__(self, key: int) -> bool:
        return key in self.recent or key in self.frequent

    def _replace(self, was_frequent: bool) -> None:
        if self.recent and (len(self.recent) > self.wanted or (was_frequent and len(self.recent) == self.wanted)):
            self.recent_ghosts[self.recent.popitem(last=False)[0]] = None
        else:
            self.frequent_ghosts[self.frequent.popitem(last=False)[0]] = None

    def ask(self, key: int) -> None:
        recent, frequent, ghosts, others = self.recent, self.frequent, self.recent_ghosts, self.frequent_ghosts
        if key in self:
            recent.pop(key, None)
            frequent.pop(key, None)
            frequent[key] = None
        elif key in ghosts or key in others:
            if key in ghosts:
                self.wanted = min(self.size, self.wanted + max(1.0, len(others) / len(ghosts)))
            else:
                self.wanted = max(0.0, self.wanted - max(1.0, len(ghosts) / len(others)))
            self._replace(key in others)
            ghosts.pop(key, None)
            others.pop(key, None)
            frequent[key] = None
        else:
            if len(recent) + len(ghosts) == self.size:
                if len(recent) < self.size:
                    ghosts.popitem(last=False)
                    self._replace(False)
                else:
                    recent.popitem(last=False)
            elif (total := len(recent) + len(frequent) + len(ghosts) + len(others)) >= self.size:
                if total == 2 * self.size:
                    others.popitem(last=False)
                self._replace(False)
            recent[key] = None


class S3Fifo:
    """Yang et al., SOSP 2023: a tenth for what is new, and what was asked for again moves on."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.small, self.main, self.ghosts = (OrderedDict[int, None]() for _ in range(3))
        self.counts: dict[int, int] = {}

    def __contains__(self, key: int) -> bool:
        return key in self.counts

    def ask(self, key: int) -> None:
        if key in self.counts:
            self.counts[key] = min(3, self.counts[key] + 1)
            return
        while len(self.counts) >= self.size:
            self._evict()
        self.counts[key] = 0
        if key in self.ghosts:
            del self.ghosts[key]
            self.main[key] = None
        else:
            self.small[key] = None

    def _evict(self) -> None:
        if self.small and (len(self.small) >= self.size / 10 or not self.main):
            key, _ = self.small.popitem(last=False)
            if self.counts[key] > 1:
                self.main[key] = None
                return
            self.ghosts[key] = None
            if len(self.ghosts) > self.size:
                self.ghosts.popitem(last=False)
        else:
            key, _ = self.main.popitem(last=False)
            if self.counts[key]:
                self.counts[key] -= 1
                self.main[key] = None
                return
        del self.counts[key]


def simulate_objects(tree: Tree, cache: ObjectCache) -> int:
    """Blocks hit by all requests."""
    num_hits = 0
    for path in tree.paths:
        num_hits += next((index for index, node in enumerate(path) if node not in cache), len(path))
        for node in reversed(path):
            cache.ask(node)
    return num_hits


def run_file(path: Path, sizes: Sequence[int]) -> None:
    """Print the share of the blocks of a file of requests that each policy hits."""
    requests = [json.loads(line)["hash_ids"] for line in path.read_text("utf-8").splitlines()]
    tree, total = Tree.of_blocks(requests), sum(map(len, requests))
    columns = ("blocks", "lru", "lfu", "arc", "s3-fifo", "ours", "clairvoyant")
    print(f"{path.name}: {len(requests):,} requests, {total:,} blocks, {len(tree.parents):,} distinct")
    print("".join(f"{column:>12}" for column in columns))
    for size in sizes:
        if size < max(map(len, requests)):
            print(f"{size:>12,} are too few for the longest request")
            continue
        numbers = [sum(simulate(tree, SIMULATED["lru"], size))]
        numbers += [simulate_objects(tree, of(size)) for of in (Lfu, Arc, S3Fifo)]
        numbers += [sum(replay_blocks(requests, size)), sum(simulate(tree, SIMULATED["clairvoyant"], size))]
        print(f"{size:>12,}" + "".join(f"{number / total:>12.4f}" for number in numbers))


def replay(trace: Sequence[Request], num_blocks: int) -> tuple[list[int], int]:
    """Blocks hit by each request, and evictions, of the allocator and the block tables that the cache uses."""
    allocator = PrefixCachingBlockAllocator(num_blocks + 1, BLOCK_SIZE)  # and the null block
    root = root_hash(b"eviction")
    hits: list[int] = []
    for request in trace:
        with BlockTable(allocator, root) as table:
            hits.append(table.allocate(request.prompt) // BLOCK_SIZE)
            table.append_tokens(request.computed[len(request.prompt) :])
            table.commit_full_blocks(table.num_tokens)
    allocator.check()
    return hits, allocator.num_evictions


def run_seed(habits: Habits, seed: int) -> dict[str, dict]:
    """Results of one seed: trace -> as `run_trace`."""
    plain, flooded = (make_trace(habits, seed, with_floods=with_floods) for with_floods in (False, True))
    trees = Tree(plain), Tree(flooded)
    sizes = [len(tree.parents) for tree in trees]
    return {
        "no floods": run_trace(plain, trees[0], sizes[0]),
        "floods": run_trace(flooded, trees[1], sizes[1]),
        "floods, small pools": run_trace(flooded, trees[1], sizes[0]),
    }


def run_trace(trace: Sequence[Request], tree: Tree, working_set: int) -> dict[str, object]:
    """Hit rates of one trace: policy -> one for each share of the working set, and what the trace is."""
    largest = max(tree.num_blocks)
    num_prompt_tokens = sum(len(request.prompt) for request in trace)

    def rate(hits: Sequence[int]) -> float:
        return sum(hits) * BLOCK_SIZE / num_prompt_tokens

    unbounded, num_evictions = replay(trace, len(tree.parents) + largest)
    if num_evictions:
        raise AssertionError(f"{num_evictions} evictions where none was needed")
    if simulate(tree, SIMULATED["lru"], len(tree.parents) + largest) != unbounded:
        raise AssertionError(f"the simulation hits other tokens than the allocator ({len(trace)} requests)")
    rates: dict[str, list[float]] = {name: [] for name in POLICIES}
    for share in SHARES:
        num_blocks = round(share * working_set)
        if num_blocks < largest:
            raise AssertionError(f"a pool of {num_blocks} blocks is too small for a request of {largest}")
        simulated = {name: simulate(tree, policy, num_blocks) for name, policy in SIMULATED.items()}
        simulated["ours"], _ = replay(trace, num_blocks)
        for name, hits in simulated.items():
            rates[name].append(rate(hits))
    return {
        "requests": len(trace),
        "prompt_tokens": num_prompt_tokens,
        "working_set_blocks": working_set,
        "largest_request_blocks": largest,
        "unbounded": rate(unbounded),
        "rates": rates,
    }


def summarise(runs: Sequence[dict]) -> dict[str, object]:
    """Means over the seeds, and least and greatest of each rate."""
    return {
        "requests": round(mean(run["requests"] for run in runs)),
        "prompt_tokens": round(mean(run["prompt_tokens"] for run in runs)),
        "working_set_blocks": round(mean(run["working_set_blocks"] for run in runs)),
        "largest_request_blocks": max(run["largest_request_blocks"] for run in runs),
        "unbounded": mean(run["unbounded"] for run in runs),
        "rates": {
            name: [
                {"mean": mean(values), "minimum": min(values), "maximum": max(values)}
                for values in zip(*(run["rates"][name] for run in runs), strict=True)
            ]
            for name in POLICIES
        },
    }


def gaps(traces: dict[str, dict]) -> list[dict[str, object]]:
    """By how much LRU hits less than the clairvoyant policy, at each share, on each trace."""
    rows = []
    for index, share in enumerate(SHARES):
        behind = {
            name: of["rates"]["clairvoyant"][index]["mean"] - of["rates"]["lru"][index]["mean"]
            for name, of in traces.items()
        }
        on_both = behind["no floods"] > GAP and behind["floods"] > GAP
        rows.append({"share": share, "behind": behind, "on_both": on_both})
    return rows


def plot(traces: dict[str, dict], path: Path) -> None:
    """Hit rate against the size of the pool, a panel a trace."""
    import matplotlib.pyplot as plt

    styles = {"clairvoyant": ("tab:green", "^"), "ours": ("tab:red", "D"), "lru": ("tab:blue", "o")}
    styles |= {"segmented": ("tab:purple", "v"), "fifo": ("tab:orange", "s")}
    figure, axes = plt.subplots(1, len(traces), figsize=(10, 3.2), sharey=True, layout="constrained")
    for panel, (name, of) in zip(axes, traces.items(), strict=True):
        panel.axhline(of["unbounded"], color="grey", linestyle="--", label="unbounded")
        for policy, (colour, marker) in styles.items():
            cells = of["rates"][policy]
            means = [cell["mean"] for cell in cells]
            panel.plot(SHARES, means, color=colour, marker=marker, label=policy)
            panel.fill_between(
                SHARES,
                [cell["minimum"] for cell in cells],
                [cell["maximum"] for cell in cells],
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
        panel.set(title=name, xscale="log", xlabel="pool / working set", ylim=(0.4, 1))
        panel.set_xticks(SHARES, labels=["1/8", "1/4", "1/2", "1"])
        panel.minorticks_off()
    axes[0].set_ylabel("hit rate, prompt tokens")
    axes[0].legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="traces of each kind; the means are shown")
    parser.add_argument("--long-pauses", type=float, default=None, help="share of pauses that are long; writes nothing")
    parser.add_argument("--trace", type=Path, default=None, help="replay this file of requests instead; writes nothing")
    parser.add_argument("--sizes", default="1000,3000,10000,30000", help="of the pool, in blocks, for --trace")
    parser.add_argument("--json", type=Path, default=None, help="where to write; default results/eviction.json")
    parser.add_argument("--plot", type=Path, default=harness.RESULTS / "eviction.png", help="where to draw")
    options = parser.parse_args()

    if options.trace is not None:
        run_file(options.trace, [*map(int, options.sizes.split(","))])
        return 0
    habits = Habits() if options.long_pauses is None else Habits(long_pauses=options.long_pauses)
    traces: dict[str, dict] = {}
    seeds = [run_seed(habits, seed) for seed in range(options.seeds)]
    for name in TRACES:
        traces[name] = of = summarise([runs[name] for runs in seeds])
        print(
            f"{name}: {of['requests']:,} requests, {of['prompt_tokens']:,} prompt tokens, working set "
            f"{of['working_set_blocks']:,} blocks, largest request {of['largest_request_blocks']:,}"
        )
        print(f"  {'pool / working set':20}" + "".join(f"{share:>10g}" for share in SHARES))
        for policy, cells in of["rates"].items():
            print(f"  {policy:20}" + "".join(f"{cell['mean']:>10.1%}" for cell in cells))
        print(f"  {'unbounded':20}{of['unbounded']:>10.1%}\n")
    behind = gaps(traces)
    for row in behind:
        cells = ", ".join(f"{100 * gap:.1f} points ({name})" for name, gap in row["behind"].items())
        print(
            f"  LRU behind clairvoyant at {row['share']:g}: {cells}{'  MORE THAN 10 ON BOTH' if row['on_both'] else ''}"
        )
    if options.long_pauses is not None:
        return 0
    results = {
        "conditions": {"block_size": BLOCK_SIZE, "seeds": options.seeds},
        "habits": asdict(habits),
        "shares": SHARES,
        "traces": traces,
        "gaps": behind,
    }
    harness.write_results("eviction", results, options.json)
    plot(traces, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
