"""Below fp32, do more prompts get other tokens than `DynamicCache` gives them itself? `python benchmarks/precision.py`.

In bf16 and fp16 the same prompt computed in two other pieces gives other roundings, so no cache keeps every token,
`DynamicCache` included: it differs from itself when it goes on from a prefix that it computed before. What is promised
is measured here, on SmolLM2-135M, greedy, for each precision on three disjoint sets of prompts. All ways get the same
batches of prompts of one length, so that nothing is padded:
    reference           `DynamicCache`, the whole prompt at once
    recipe, k blocks    `DynamicCache` filled by a forward of the prompt's first k * 16 tokens, then `generate`
    recipe, mid-block   the same behind a prefix that ends inside a block
    ours, cold          nothing is known
    ours, k blocks      the same k * 16 tokens are known from a call of another cache of the store
    ours, mid-block     the same prefix is known from the call before, whose prompt went on in another way
For each prompt: the first token that is not the reference's, the gap there between the reference's two best logits, and
the *error*, the largest difference of any logit up to that step; behind it the two go on from different tokens and
cannot be compared.

What must hold, or the exit status is 1:
    counts   in every set, ours has at most as many prompts with another token as the recipe behind the same prefix
    (cold: as the recipe
             behind k blocks), within the recipe's own spread over the three sets
    gaps     where ours gives another token, the gap is at most the largest error of the recipes in that set: they could
    have done the same errors   the median error of ours is at most twice the recipe's
    control  the same batch with zeros in place of all that is reused breaks both counts and gaps
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import models
import tables
import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_cache import PagedPrefixCache, PrefixStore
from hf_paged_cache.cli.demo import QUESTIONS, SHOTS
from hf_paged_cache.cli.demo_model import DEMO_MODEL

ROOT = Path(__file__).parents[1]
BLOCK_SIZE = 16
LENGTHS = (100, 300)  # tokens of a prompt, least and most
SHORT = (64, 128)  # where a CPU multiplies slowly
UNKNOWN = (16, 40)  # tokens behind the known prefix, least and most
EXTRA = 7  # tokens by which the prompt of the call before is longer
MIN_WORDS = 5  # of a sentence that goes into a prompt
NUM_SETS = 3
PROMPTS_A_SET = 40
NUM_TOKENS = 64
CONTROL_TOKENS = 8


@dataclass(frozen=True)
class Precision:
    """What the weights are, and what autocast makes of them; None: it is off. `lengths` are those of prompts."""

    weights: torch.dtype
    autocast: torch.dtype | None = None
    lengths: tuple[int, int] = LENGTHS

    def context(self, device_type: str) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device_type, self.autocast)


PRECISIONS = {
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16, lengths=SHORT),
    "autocast bf16": Precision(torch.float32, torch.bfloat16),
    "fp32": Precision(torch.float32),
}
MEASURED = ("bf16", "fp16", "autocast bf16")  # unless others are asked for


@dataclass(frozen=True)
class Group:
    """Prompts of one length, [rows, tokens], and how many of their first tokens will be known."""

    ids: Tensor
    whole_blocks: int
    mid_block: int

    @property
    def otherwise(self) -> Tensor:
        """Longer prompts that share exactly `mid_block` tokens with these, and go on as the next row does."""
        tails = torch.cat((self.ids.roll(1, dims=0)[:, self.mid_block :], self.ids[:, :EXTRA]), dim=1)
        same = tails[:, 0] == self.ids[:, self.mid_block]
        tails[same, 0] += 1
        return torch.cat((self.ids[:, : self.mid_block], tails), dim=1)


@dataclass(frozen=True)
class Outcome:
    """One prompt, one way, against the reference.

    Attributes:
        step: the first token generated that is another; None if all are the same.
        gap: there, the reference's best logit less its second best.
        error: the largest difference of any logit up to and with that step.
    """

    step: int | None
    gap: float | None
    error: float


class Runner:
    """A model in one precision, and the ways to run a group of prompts on it."""

    def __init__(self, model: Any, precision: Precision, num_tokens: int) -> None:
        self.model = model
        self.num_tokens = num_tokens
        self._precision = precision

    def generate(self, ids: Tensor, cache: Any = None, num_tokens: int | None = None) -> Any:
        """Greedy, with the raw logits of every step."""
        with self._precision.context(self.model.device.type):
            return self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=num_tokens or self.num_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )

    def reference(self, group: Group) -> Any:
        return self.generate(group.ids)

    def recipe(self, ids: Tensor, num_known: int) -> Any:
        cache = DynamicCache(config=self.model.config)
        with torch.no_grad(), self._precision.context(self.model.device.type):
            self.model(ids[:, :num_known], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return self.generate(ids, cache)

    def cold(self, group: Group) -> Any:
        return self._reusing(PagedPrefixCache(self.model), group.ids, 0)

    def behind_blocks(self, group: Group, *, zeros: bool = False, num_tokens: int | None = None) -> Any:
        store = PrefixStore(self.model, block_size=BLOCK_SIZE)
        self.generate(group.ids[:, : group.whole_blocks], PagedPrefixCache(store), num_tokens=1)
        if zeros:
            serve_zeros(store)
        return self._reusing(PagedPrefixCache(store), group.ids, group.whole_blocks, num_tokens)

    def mid_block(self, group: Group) -> Any:
        cache = PagedPrefixCache(self.model, block_size=BLOCK_SIZE)
        self.generate(group.otherwise, cache, num_tokens=1)
        return self._reusing(cache, group.ids, group.mid_block)

    def _reusing(self, cache: PagedPrefixCache, ids: Tensor, num_known: int, num_tokens: int | None = None) -> Any:
        """
        Raises:
            RuntimeError: a row reused more or fewer tokens than this way is about.
        """
        output = self.generate(ids, cache, num_tokens)
        reused = {row.reused_tokens for row in cache.last_call.rows}
        if reused != {num_known}:
            raise RuntimeError(f"{sorted(reused)} tokens were reused, not {num_known}")
        return output


WAYS: dict[str, Callable[[Runner, Group], Any]] = {
    "recipe, k blocks": lambda runner, group: runner.recipe(group.ids, group.whole_blocks),
    "recipe, mid-block": lambda runner, group: runner.recipe(group.ids, group.mid_block),
    "ours, cold": Runner.cold,
    "ours, k blocks": Runner.behind_blocks,
    "ours, mid-block": Runner.mid_block,
}
BASELINES = {  # ours -> the recipe that it is held against
    "ours, cold": "recipe, k blocks",
    "ours, k blocks": "recipe, k blocks",
    "ours, mid-block": "recipe, mid-block",
}


CONTROL = "zeros"


def serve_zeros(store: PrefixStore) -> None:
    """Put zeros in place of all keys and values held. Caches made from here on reuse zeros."""
    for tensor in store.blocks.pool.all.named().values():
        tensor.zero_()


def compare(reference: Any, output: Any, num_prompt: int) -> list[Outcome]:
    """Row by row, as long as the tokens are the same.

    Shapes: `logits` of both are as many [rows, vocabulary] as tokens were generated; the reference may have more.
    """
    columns = slice(num_prompt, num_prompt + len(output.logits))
    differs = output.sequences[:, columns] != reference.sequences[:, columns]
    pairs = zip(reference.logits, output.logits, strict=False)
    errors = torch.stack([(got - wanted).abs().amax(-1) for wanted, got in pairs], dim=1)
    outcomes = []
    for row, steps in enumerate(differs):
        step = int(steps.nonzero()[0]) if steps.any() else None
        gap = None
        if step is not None:
            best, second = reference.logits[step][row].topk(2).values.tolist()
            gap = best - second
        compared = errors[row] if step is None else errors[row, : step + 1]
        outcomes.append(Outcome(step, gap, float(compared.nan_to_num(nan=torch.inf).max())))
    return outcomes


def sentences() -> list[str]:
    """What prompts are made of: the sentences of this repository's texts and examples."""
    texts = [f"{question} {answer}" for question, answer in SHOTS] + list(QUESTIONS)
    for line in (ROOT / "examples/reviews.jsonl").read_text(encoding="utf-8").splitlines():
        review = json.loads(line)
        texts.append(f"{review['text']} ({review['label']})")
    for path in (ROOT / "LICENSE", ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))):
        prose = re.sub(r"^```.*?^```|^[|#].*?$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for paragraph in re.split(r"\n\s*\n|^- ", prose, flags=re.MULTILINE):
            texts += re.split(r"(?<=[.!?;])\s+", " ".join(paragraph.split()))
    return [text for text in dict.fromkeys(texts) if len(text.split()) >= MIN_WORDS]


def make_sets(
    tokenizer: Any, lengths: tuple[int, int], options: argparse.Namespace, device: torch.device
) -> list[list[Group]]:
    """Disjoint sets of prompts: each prompt some sentences in an order of its own, cut to its group's length.

    Raises:
        RuntimeError: two prompts are the same.
    """
    rng, num_prompts, rows = random.Random(options.seed), options.prompts, options.rows
    texts = sentences()
    seen: set[bytes] = set()
    sets = []
    for _ in range(options.sets):
        groups = []
        for first in range(0, num_prompts, rows):
            num_tokens = rng.randint(*lengths)
            whole_blocks = (num_tokens - rng.randint(*UNKNOWN)) // BLOCK_SIZE * BLOCK_SIZE
            prompts = [_prompt(tokenizer, texts, num_tokens, rng) for _ in range(min(rows, num_prompts - first))]
            for prompt in prompts:
                digest = hashlib.sha256(repr(prompt).encode()).digest()
                if digest in seen:
                    raise RuntimeError("a prompt was drawn twice")
                seen.add(digest)
            mid_block = whole_blocks + rng.randint(1, BLOCK_SIZE - 1) - BLOCK_SIZE * rng.randint(0, 1)
            groups.append(Group(torch.tensor(prompts, device=device), whole_blocks, mid_block))
        sets.append(groups)
    return sets


def _prompt(tokenizer: Any, texts: Sequence[str], num_tokens: int, rng: random.Random) -> list[int]:
    order = iter(rng.sample(texts, len(texts)))
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += tokenizer(next(order) + rng.choice([" ", "\n", "\n\n"]), add_special_tokens=False)["input_ids"]
    return tokens[:num_tokens]


def measure(runner: Runner, group: Group, *, control: bool) -> dict[str, list[Outcome]]:
    """Way -> outcomes of a group's prompts; with `control` also those of zeros, of a few tokens."""
    started = time.perf_counter()
    reference = runner.reference(group)
    outcomes = {}
    for name, way in WAYS.items():
        outcomes[name] = compare(reference, way(runner, group), group.ids.shape[1])
        gc.collect()
    if control:
        zeros = runner.behind_blocks(group, zeros=True, num_tokens=min(runner.num_tokens, CONTROL_TOKENS))
        outcomes[CONTROL] = compare(reference, zeros, group.ids.shape[1])
    differ = ", ".join(f"{name} {_num_differ(got)}" for name, got in outcomes.items())
    seconds = time.perf_counter() - started
    print(f"  {tuple(group.ids.shape)}, differ: {differ}; {seconds:.0f} s", file=sys.stderr, flush=True)
    return outcomes


def summary(outcomes: Sequence[Sequence[Outcome]]) -> dict[str, Any]:
    """What one way gave, set by set."""
    everything = [outcome for each in outcomes for outcome in each]
    gaps = [outcome.gap for outcome in everything if outcome.gap is not None]
    return {
        "differ": [_num_differ(each) for each in outcomes],
        "largest_error": [max(outcome.error for outcome in each) for each in outcomes],
        "median_error": statistics.median(outcome.error for outcome in everything),
        "largest_gap": [max((o.gap for o in each if o.gap is not None), default=None) for each in outcomes],
        "median_gap": statistics.median(gaps) if gaps else None,
        "first_differences": [
            [[o.step, round(o.gap or 0.0, 6)] for o in each if o.step is not None] for each in outcomes
        ],
    }


def judge(ways: dict[str, dict[str, Any]], control: Sequence[Outcome], num_prompts: int) -> dict[str, Any]:
    """What must hold -> whether it does, for one precision."""
    holds: dict[str, bool] = {}
    allowed_gaps = [
        max(errors) for errors in zip(*(ways[way]["largest_error"] for way in set(BASELINES.values())), strict=True)
    ]
    for way, baseline in BASELINES.items():
        ours, theirs = ways[way], ways[baseline]
        spread = max(theirs["differ"]) - min(theirs["differ"])
        counts = zip(ours["differ"], theirs["differ"], strict=True)
        gaps = zip(ours["largest_gap"], allowed_gaps, strict=True)
        holds[f"{way}: counts"] = all(mine <= other + spread for mine, other in counts)
        holds[f"{way}: gaps"] = all(gap is None or gap <= allowed for gap, allowed in gaps)
        holds[f"{way}: errors"] = ours["median_error"] <= 2 * theirs["median_error"] and _is_finite(ours, theirs)
    gaps = [outcome.gap for outcome in control if outcome.gap is not None]
    num_expected = max(count for way in set(BASELINES.values()) for count in ways[way]["differ"]) / num_prompts
    holds["control: zeros are noticed"] = len(gaps) / len(control) > num_expected and max(gaps, default=0.0) > max(
        allowed_gaps
    )
    return {"allowed_gap": allowed_gaps, "holds": holds}


def run_precision(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One precision: the ways' outcomes, and what holds."""
    precision, commit = PRECISIONS[name], harness.commit()
    started = time.perf_counter()
    model, tokenizer = models.load(options.model, models.default_device(), precision.weights)
    model.generation_config.eos_token_id = None  # every prompt gives as many tokens as were asked for
    runner = Runner(model, precision, options.tokens)
    outcomes: dict[str, list[list[Outcome]]] = {way: [[] for _ in range(options.sets)] for way in (*WAYS, CONTROL)}
    for number, groups in enumerate(make_sets(tokenizer, precision.lengths, options, model.device)):
        for group in groups:
            for way, more in measure(runner, group, control=number == 0).items():
                outcomes[way][number] += more
    control = outcomes.pop(CONTROL)[0]
    ways = {way: summary(each) for way, each in outcomes.items()}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "seconds": round(time.perf_counter() - started),
        "num_prompts": options.prompts,
        "lengths": list(precision.lengths),
        "ways": ways,
        "control": {
            "differ": _num_differ(control),
            "of": len(control),
            "largest_gap": max((o.gap or 0.0 for o in control), default=0.0),
        },
        **judge(ways, control, options.prompts),
    }


def _is_finite(*ways: dict[str, Any]) -> bool:
    return all(math.isfinite(error) for way in ways for error in way["largest_error"])


def _num_differ(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.step is not None for outcome in outcomes)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--precisions", default=",".join(MEASURED), help=f"some of {', '.join(PRECISIONS)}; default: %(default)s"
    )
    parser.add_argument("--sets", type=int, default=NUM_SETS, help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=PROMPTS_A_SET, help="of each set; default: %(default)s")
    parser.add_argument("--rows", type=int, default=20, help="prompts run together; default: %(default)s")
    parser.add_argument(
        "--tokens", type=int, default=NUM_TOKENS, help="generated for each prompt; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a folder or a name on the hub; default: SmolLM2-135M-Instruct")
    parser.add_argument(
        "--json",
        type=Path,
        help="where to write, beside what is there; default: results/precision.json, unless less is run",
    )
    options = parser.parse_args()
    options.precisions = [name.strip() for name in options.precisions.split(",")]
    unknown = [name for name in options.precisions if name not in PRECISIONS]
    if unknown:
        parser.error(f"no such precision: {', '.join(unknown)}; there are {', '.join(PRECISIONS)}")
    if min(options.sets, options.prompts, options.rows, options.tokens) < 1:
        parser.error("--sets, --prompts, --rows and --tokens must be at least 1")
    return options


def main() -> int:
    options = parse_options()
    size = (options.sets, options.prompts, options.tokens)
    path = options.json or (
        harness.RESULTS / "precision.json" if size == (NUM_SETS, PROMPTS_A_SET, NUM_TOKENS) else None
    )
    precisions = {}
    for name in options.precisions:
        print(f"{name} ...", file=sys.stderr, flush=True)
        precisions[name] = run_precision(name, options)
        gc.collect()
    kept = json.loads(path.read_text(encoding="utf-8"))["precisions"] if path and path.exists() else {}
    results = {
        "conditions": {
            "model": Path(options.model or DEMO_MODEL).name,
            "device": models.default_device().type,
            "threads": torch.get_num_threads(),
            "rows": options.rows,
            "new_tokens": options.tokens,
            "seed": options.seed,
        },
        "precisions": {**kept, **precisions},
    }
    stamped = {"date": time.strftime("%Y-%m-%d"), "commit": harness.commit(), "machine": harness.machine(), **results}
    print(tables.precision_table(stamped))
    if path is not None:
        harness.write_results("precision", results, path)
    return int(not all(holds for each in precisions.values() for holds in each["holds"].values()))


if __name__ == "__main__":
    sys.exit(main())
