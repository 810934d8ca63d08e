"""Captured calls on a CUDA device, with DynamicCache beside them in turn: `python benchmarks/bench_gpu.py`.

A Llama with random weights. Every call has other tokens behind the same known ones. *Same* is the share of tokens that
a DynamicCache gives which is continued from the known prefix: below fp32 that is what rounding can be held to. At the
end, how long each graph takes alone. About three minutes on an H100; on a CPU it runs with `--shape tiny`, where a call
of the forward stands in for each graph.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.rows.graphs import Arena

SHAPES = {  # hidden size, intermediate size, layers, heads, heads of keys, vocabulary
    "tiny": (64, 128, 4, 4, 2, 512),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}
NUM_NEW = 16  # tokens of each prompt behind the known ones
NUM_QUESTIONS, NUM_ROWS = 100, 25


class Machine:
    """A model, and calls of it.

    Args:
        shape: of the model, one of `SHAPES`.
        num_known: tokens that all prompts of one kind begin with.
        is_eager: nothing is captured.

    Attributes:
        profiles: the folder where one more call of each scene leaves its profile; None: nowhere.
    """

    profiles: Path | None = None

    def __init__(self, shape: str, dtype: torch.dtype, num_known: int, *, is_eager: bool = False) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        hidden, intermediate, layers, heads, key_heads, self.vocabulary = SHAPES[shape]
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=131072,
            dtype=dtype,
        )
        torch.set_default_dtype(dtype)
        with torch.device(self.device):
            self.model: Any = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
        self.model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=None)
        self._generator = torch.Generator().manual_seed(1)
        self.known = self.tokens(1, num_known)
        self.dtype, self.heads = dtype, (heads, key_heads, hidden // heads)
        capture: Any = False if is_eager else "auto" if self.device.type == "cuda" else "dry"
        self.cache = PagedPrefixCache(self.model, capture=capture)

    def tokens(self, *sizes: int) -> torch.Tensor:
        """Random ones, of that shape."""
        return torch.randint(3, self.vocabulary, sizes, generator=self._generator)

    def asked(self, num_rows: int, num_new: int = NUM_NEW) -> torch.Tensor:
        """Prompts of known tokens and new ones."""
        return torch.cat([self.known.expand(num_rows, -1), self.tokens(num_rows, num_new)], 1).to(self.device)

    def unknown(self, num_rows: int) -> torch.Tensor:
        """Prompts of the same length that nobody has seen."""
        return self.tokens(num_rows, self.known.shape[1] + NUM_NEW).to(self.device)

    def run(self, cache: Any, ids: torch.Tensor, num_new: int, num_beams: int = 1) -> torch.Tensor:
        """Token ids of a greedy `generate`, or of one by beams."""
        given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "num_beams": num_beams}
        said: torch.Tensor = self.model.generate(ids, max_new_tokens=num_new, past_key_values=cache, **given)
        return said

    def dynamic(self) -> DynamicCache:
        """Another cache as transformers makes it."""
        return DynamicCache(config=self.model.config)

    def continued(self, ids: torch.Tensor, num_new: int) -> torch.Tensor:
        """What a DynamicCache says that holds the known tokens already."""
        cache, num_known = self.dynamic(), self.known.shape[1]
        with torch.no_grad():
            self.model(ids[:, :num_known], past_key_values=cache, logits_to_keep=1)
        return self.run(cache, ids, num_new)

    def seconds(self, function: Callable[[], Any]) -> tuple[float, Any]:
        """Of one call, all of its kernels included, and what it returns."""
        self.wait()
        began = time.perf_counter()
        result = function()
        self.wait()
        return time.perf_counter() - began, result

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def compare(
    on: Machine, make: Callable[[int], torch.Tensor], rows: int, num_new: int, rounds: int, num_beams: int = 1
) -> dict[str, Any]:
    """One scene: both caches on the same prompts in turn; the first two rounds do not count."""
    taken: dict[str, list[float]] = {"dynamic": [], "ours": []}
    for number in range(rounds + 2):
        ids = make(rows)
        for name, cache in (("dynamic", on.dynamic()), ("ours", on.cache)):
            seconds, said = on.seconds(lambda cache=cache, ids=ids: on.run(cache, ids, num_new, num_beams))
            taken[name] += [seconds] if number >= 2 else []
    if on.profiles is not None:
        number = len([*on.profiles.iterdir()])
        with cProfile.Profile() as profile:
            on.seconds(lambda: on.run(on.cache, make(rows), num_new, num_beams))
        profile.dump_stats(on.profiles / f"{number}_{rows}_rows_{num_new}_new.pstats")
    is_continued = make == on.asked and num_beams == 1
    reference = on.continued(ids, num_new) if is_continued else on.run(on.dynamic(), ids, num_new, num_beams)
    dynamic, ours = (1e3 * statistics.median(taken[name]) for name in ("dynamic", "ours"))
    same = float((said == reference).float().mean())
    captured = str(on.cache.last_call.captured)
    return {"dynamic_ms": dynamic, "ours_ms": ours, "ratio": dynamic / ours, "same": same, "captured": captured}


def each_shape_once(on: Machine) -> dict[str, Any]:
    """Twenty calls of other rows and lengths: what captures cost where nothing comes again."""

    def sweep(make: Callable[[], Any]) -> None:
        for number in range(20):
            on.run(make(), on.asked(1, 5 + 13 * number).expand(1 + number % 5, -1).contiguous(), 12 + number)

    dynamic, ours = on.seconds(lambda: sweep(on.dynamic))[0], on.seconds(lambda: sweep(lambda: on.cache))[0]
    return {"dynamic_ms": 1e3 * dynamic, "ours_ms": 1e3 * ours, "ratio": dynamic / ours}


def questions(on: Machine) -> dict[str, Any]:
    """A hundred questions behind one prompt, in batches."""
    asked = on.asked(NUM_QUESTIONS)
    seconds = [on.seconds(lambda: [on.run(on.cache, each, 16) for each in asked.split(NUM_ROWS)])[0] for _ in range(3)]
    return {"ours_ms": 1e3 * statistics.median(seconds), "captured": str(on.cache.last_call.captured)}


def long_context(on: Machine) -> dict[str, Any]:
    """One row behind 16,384 known tokens."""
    known, on.known = on.known, on.tokens(1, min(16384, 16 * on.known.shape[1]))
    try:
        return compare(on, on.asked, 1, 17, 2)
    finally:
        on.known = known


def attention(on: Machine) -> dict[str, Any]:
    """Microseconds of one layer's attention of one token, over all but 200 columns: as transformers asks it, with heads
    repeated, and grouped.
    """
    heads, key_heads, size = on.heads
    found = {}
    for rows, columns in ((1, 1536), (8, 1536), (1, 18432)):
        query = torch.randn(rows, heads, 1, size, device=on.device, dtype=on.dtype)
        keys = torch.randn(rows, key_heads, columns, size, device=on.device, dtype=on.dtype)
        mask = (torch.arange(columns, device=on.device) < columns - 200).expand(rows, 1, 1, columns).contiguous()
        packed, repeats = query.view(rows, key_heads, -1, size), heads // key_heads
        ways = {
            "packed": lambda q=packed, k=keys, m=mask: scaled_dot_product_attention(q, k, k, attn_mask=m),
            "repeated": lambda q=query, k=keys, m=mask, repeats=repeats: scaled_dot_product_attention(
                q, *[k.repeat_interleave(repeats, 1)] * 2, attn_mask=m
            ),
            "grouped": lambda q=query, k=keys, m=mask, repeats=repeats: scaled_dot_product_attention(
                q, k, k, attn_mask=m, enable_gqa=True
            ),
        }
        for name, way in ways.items():
            again = way
            way()
            if on.device.type == "cuda":  # by a graph: else launches are timed
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    way()
                again = graph.replay
            seconds = on.seconds(lambda again=again: [again() for _ in range(20)])[0]
            found[f"{rows} x {columns} {name}"] = 1e6 * seconds / 20
    return found


SCENES: dict[str, Callable[[Machine], dict[str, Any]]] = {
    "one1": lambda on: compare(on, on.asked, 1, 1, 9),
    "one33": lambda on: compare(on, on.asked, 1, 33, 4),
    "rows8_1": lambda on: compare(on, on.asked, 8, 1, 5),
    "rows8_33": lambda on: compare(on, on.asked, 8, 33, 3),
    "beams8_33": lambda on: compare(on, on.asked, 1, 33, 2, 8),
    "nohit8": lambda on: compare(on, on.unknown, 1, 8, 4),
    "mixed20": each_shape_once,
    "long16k": long_context,
    "questions": questions,
    "attention": attention,
}


def graphs(on: Machine) -> Iterator[dict[str, Any]]:
    """What is known of each shape, and how long its graph takes alone."""
    for arena in (each for each in gc.get_objects() if type(each) is Arena):
        for (rows, tokens, room, *_), known in arena._graphs.items():
            line = {"rows": rows, "tokens": tokens, "room": room, "saved_s": known.saved_seconds}
            graph = None if known.captured is None else known.captured._graph
            if graph is not None:
                line["replay_ms"] = 100 * on.seconds(lambda graph=graph: [graph.replay() for _ in range(10)])[0]
            yield {**line, "why_not": known.why_not}


def run(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and result of each scene."""
    on = Machine(options.shape, getattr(torch, options.dtype), options.known, is_eager=options.eager)
    began = time.perf_counter()
    on.profiles = options.profiles
    taken = [
        on.seconds(lambda cache=cache: on.run(cache, on.asked(1), 33))[0]
        for cache in (on.dynamic(), on.dynamic(), on.cache)
    ]
    yield "first calls", dict(zip(("dynamic_s", "again_s", "ours_s"), taken, strict=True))
    for name in options.scenes:
        if time.perf_counter() - began < options.limit:
            yield name, SCENES[name](on)
    for number, line in enumerate(graphs(on)):
        yield f"graph {number}", line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--known", type=int, default=1024, help="tokens that prompts begin with; default: 1024")
    parser.add_argument("--scenes", default=",".join(SCENES), help="names with commas between; default: all of them")
    parser.add_argument("--eager", action="store_true", help="with capture=False")
    parser.add_argument("--limit", type=float, default=400, help="seconds after which no scene begins; default: 400")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    parser.add_argument("--profiles", type=Path, help="a folder where one more call of each scene leaves its profile")
    options = parser.parse_args(arguments)
    options.scenes = options.scenes.split(",")
    if unknown := [name for name in options.scenes if name not in SCENES]:
        parser.error(f"no such scene: {', '.join(unknown)}; there are {', '.join(SCENES)}")
    logging.set_verbosity_error()
    results: dict[str, Any] = {}
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", json.dumps(harness.machine()))
    for name, result in run(options):
        results[name] = result
        said = (f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in result.items())
        print(f"{name:12}", ", ".join(said), flush=True)
    if options.json is not None:
        harness.write_results("gpu", {"shape": options.shape, "dtype": options.dtype, **results}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
