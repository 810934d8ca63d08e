"""SmolLM2 in one process computes a long prefix; in the next its first question is answered from files.

Run it with `python -m tests.next_process --tokens 4096`. Each process is a real one. What is timed there begins when the model is
loaded and the store is built, and ends with the first token: reading the weights' digest, the files and the new tokens' forward. The
files are in the page cache. It fails unless that is 8 times faster than computing, and tokens and logits are the same.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

NUM_QUESTION = 12
LEAST_SPEEDUP = 8.0
LEAST_SHARE = 0.5  # of the speed of a plain read
TOLERANCE = 1e-4  # of the largest logit


def tokens_of(model: Any, number: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100, model.config.vocab_size), k=number)


def load(threads: int) -> Any:
    from hf_paged_cache.cli.demo_model import load_demo_model

    torch.set_num_threads(threads)
    model, _ = load_demo_model(dtype=torch.float32, progress=False)
    return model.eval()


def ask(model: Any, ids: list[int], cache: Any = None) -> tuple[float, Any]:
    """Seconds to the first token, and its logits and a few tokens more's."""
    given = {} if cache is None else {"past_key_values": cache}
    inputs = torch.tensor([ids])
    arguments = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs), "do_sample": False, **given}
    start = time.perf_counter()
    first = model.generate(**arguments, max_new_tokens=1, return_dict_in_generate=True, output_logits=True)
    return time.perf_counter() - start, first.logits[0]


def compute(folder: Path, num_tokens: int, threads: int) -> None:
    """The first process: compute, save, and leave what is right."""
    from hf_paged_cache import PagedPrefixCache

    model = load(threads)
    prefix, question = tokens_of(model, num_tokens, 1), tokens_of(model, NUM_QUESTION, 2)
    ask(model, question)  # what is done once
    seconds, logits = ask(model, prefix + question)
    cache = PagedPrefixCache(model)
    cache.prefill(prefix)
    start = time.perf_counter()
    saved = cache.store.save(folder)
    saving = time.perf_counter() - start
    size = f"{saved.num_blocks} blocks, {saved.num_bytes / 2**20:.0f} MiB"
    tqdm.write(f"computing {seconds:.2f} s; saving {size}, {saving:.2f} s, the weights' digest included")
    torch.save({"logits": logits, "seconds": seconds}, folder / "right.pt")


def answer(folder: Path, num_tokens: int, threads: int, *, is_tier: bool) -> None:
    """The next process: its first question."""
    from hf_paged_cache import PagedPrefixCache
    from hf_paged_cache.tiers.saved_file import saved_paths

    model = load(threads)
    prefix, question = tokens_of(model, num_tokens, 1), tokens_of(model, NUM_QUESTION, 2)
    ask(model, question)
    right = torch.load(folder / "right.pt", weights_only=True)
    plain = read_plainly(saved_paths(folder))
    cache = PagedPrefixCache(model, disk_folder=folder if is_tier else None)
    start = time.perf_counter()
    cache.store.conditioning.identity()
    identifying = loading = time.perf_counter() - start
    if not is_tier:
        loaded = cache.store.load(folder)
        loading = time.perf_counter() - start - identifying
    seconds, logits = ask(model, prefix + question, cache)
    seconds += identifying + (0.0 if is_tier else loading)
    assert cache.last_call.reused_tokens == num_tokens, cache.last_call
    distance = float((logits - right["logits"]).abs().max() / right["logits"].abs().max())
    speedup = right["seconds"] / seconds
    how = "disk_folder" if is_tier else "store.load"
    told = f"{how}: first token after {seconds:.3f} s, {speedup:.1f}x; weights' digest {identifying:.2f} s; "
    told += f"logits within {distance:.1e}; a plain read {plain / 1e9:.2f} GB/s"
    speed = plain
    if not is_tier:
        speed = loaded.num_bytes / loading
        told += f", loading {speed / 1e9:.2f} GB/s"
    tqdm.write(told)
    is_right = distance <= TOLERANCE and bool((logits.argmax(-1) == right["logits"].argmax(-1)).all())
    if not is_right or speedup < LEAST_SPEEDUP or speed < LEAST_SHARE * plain:
        sys.exit(1)


def read_plainly(paths: list[Path]) -> float:
    """Bytes a second of reading the files as they are, the better of two times."""
    found = 0.0
    for _ in range(2):
        start = time.perf_counter()
        num_bytes = sum(len(path.read_bytes()) for path in paths)
        found = max(found, num_bytes / (time.perf_counter() - start))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--role", choices=["compute", "load", "tier"])
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.role == "compute":
        compute(given.folder, given.tokens, given.threads)
        return 0
    if given.role is not None:
        answer(given.folder, given.tokens, given.threads, is_tier=given.role == "tier")
        return 0
    with tempfile.TemporaryDirectory() as name:
        rest = ["--folder", name, "--tokens", str(given.tokens), "--threads", str(given.threads)]
        return max(
            subprocess.run([sys.executable, "-m", "tests.next_process", "--role", role, *rest]).returncode
            for role in ("compute", "load", "tier")
        )


if __name__ == "__main__":
    sys.exit(main())
