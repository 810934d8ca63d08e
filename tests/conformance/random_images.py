"""Random calls with images, on a store that is used and full, beside `DynamicCache`: of each call the result is the same.

python -m tests.conformance.random_images --programs 40 --types llava,qwen2_vl,gemma3
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from hf_paged_cache import PagedPrefixCache, PrefixStore

from ..reference import assert_same, is_tie, run
from .image_zoo import prompt, tiny, tokens

if TYPE_CHECKING:
    pass

TYPES = ("llava", "qwen2_vl", "gemma3", "idefics3", "qwen3_vl", "llava_next")
_WAYS: tuple[dict[str, Any], ...] = (
    *[{}] * 4,
    {"num_beams": 2},
    {"num_return_sequences": 2, "do_sample": True},
    {"prompt_lookup_num_tokens": 2},
    {"output_hidden_states": True},
)


def play(name: str, seed: int, num_calls: int = 8) -> int:
    """One random program; the tokens that it reused. Raises AssertionError where a result is another one."""
    chance = random.Random(f"{name} {seed}")
    model, layout = tiny(name)
    size = chance.choice((7, 8, 16, 16))
    most = 6 * (layout.num_tokens + 40) // size
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"disk_folder": folder} if chance.random() < 0.3 else {}
        store = PrefixStore(model, block_size=size, num_blocks=chance.choice((most, 4 * most)), **options)
        caches = [
            PagedPrefixCache(store, on_full="bypass", cache_salt=salt, attention=chance.choice(("paged", "gather")))
            for salt in (None, None, "tenant")
        ]
        conversations: list[list[list[int] | int]] = [[]]
        num_reused = 0
        for number in range(num_calls):
            rows = [_grown(chance, conversations) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
            given, how, held = prompt(layout, *rows), chance.choice(_WAYS), chance.choice(caches)
            if len(rows) > 1 and "prompt_lookup_num_tokens" in how:
                how = {}
            try:
                reference = run(model, seed=number, **given, **how)
            except ValueError:  # a draft that was looked up in the prompt may have an image's placeholders
                continue
            output = run(model, held, seed=number, **given, **how)
            try:
                assert_same(reference, output)
            except AssertionError as error:
                if not is_tie(model, reference, number, {**given, **how}):
                    raise AssertionError(f"{name} {seed}, call {number} ({how}, rows {rows}): {error}") from error
            num_reused += held.last_call.reused_tokens
            if chance.random() < 0.5:
                held.reset()
            store.check()
        return num_reused


def _grown(chance: random.Random, conversations: list[list[list[int] | int]]) -> list[list[int] | int]:
    """A conversation that goes on from one that was had, or from its middle."""
    before = chance.choice(conversations)
    row = [*before[: chance.randint(0, len(before))], *_parts(chance)]
    kept: list[list[int] | int] = []
    for part in row:
        if not isinstance(part, int):
            kept.append(part)
        elif _images(kept) < 3:  # some models take images side by side for one
            kept += [part, tokens(9, 2)]
    row = kept
    row.append(tokens(chance.randint(1, 3), chance.randint(1, 20)))
    conversations.append(row)
    return row


def _parts(chance: random.Random) -> list[list[int] | int]:
    return [
        chance.randint(1, 3) if chance.random() < 0.5 else tokens(chance.randint(1, 3), chance.choice((1, 5, 11, 16)))
        for _ in range(chance.randint(0, 3))
    ]


def _images(row: list[list[int] | int]) -> int:
    return sum(isinstance(part, int) for part in row)


def main() -> int:
    """Play programs of each type; 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.random_images", description=play.__doc__)
    parser.add_argument("--programs", type=int, default=20, help="of each type")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others count on")
    parser.add_argument("--types", default=",".join(TYPES))
    given = parser.parse_args()
    num_failed = num_reused = 0
    for seed in range(given.seed, given.seed + given.programs):
        for name in given.types.split(","):
            try:
                num_reused += play(name, seed)
            except Exception as error:  # noqa: BLE001 (all are shown, and the next is played)
                num_failed += 1
                print(f"{name} {seed}: {type(error).__name__}: {error}", flush=True)  # noqa: T201
    print(f"{num_failed} failed; {num_reused} tokens reused")  # noqa: T201
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
