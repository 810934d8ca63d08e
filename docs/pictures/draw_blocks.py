"""Draws docs/pictures/blocks.svg, the example of docs/how_it_works.md, from what a cache really does.

python docs/pictures/draw_blocks.py, after a change of what is drawn; a test fails where the file is another.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.blocks import HashChain, PrefixCachingBlockAllocator

sys.path.insert(0, str(Path(__file__).parent))
from svg import legend, svg

PICTURE = Path(__file__).with_name("blocks.svg")
BLOCK_SIZE, NUM_BLOCKS = 4, 13  # one of which is reserved
CELL, HEIGHT, GAP = 47, 26, 8  # pixels: of a word, and between blocks
LEFT, WIDTH = 16, 1010

RULES = ["Answer", "a", "child", ",", "briefly", "."]
CALLS = [  # title, prompt, what the model is made to say: a line for each sample
    ("1. A first question: all of it is computed", "What is ice ?", ["Frozen water ."]),
    ("2. Another question: the blocks before it are shared", "What is snow ?", ["Soft ice ."]),
    (
        "3. The first chat continues: its question and its answer are known",
        "What is ice ? Frozen water . And steam ?",
        ["Hot water ."],
    ),
    (
        "4. Two samples of another prompt: it is computed once, and each has its own answer",
        "Why is snow ?",
        ["Light is mixed .", "It sends light ."],
    ),
]


class Drawn(NamedTuple):
    """What is seen of one call.

    Attributes:
        rows: of each its words, the blocks that keep them, how many words were not computed, and how many are of the
        prompt. pool: of each block 0 for free, 1 for cached, 2 for in use.
    """

    title: str
    rows: list[tuple[list[str], list[int], int, int]]
    pool: list[int]


def play() -> Iterator[Drawn]:
    """Run the calls on a tiny model that is made to say the given words."""
    texts = [word for _, prompt, answers in CALLS for text in (prompt, *answers) for word in text.split()]
    words = list(dict.fromkeys([*RULES, *texts]))
    config = LlamaConfig(
        vocab_size=len(words) + 1, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=None, bos_token_id=None, pad_token_id=len(words),
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    cache = PagedPrefixCache(model, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    for title, prompt, answers in CALLS:
        given = [words.index(word) for word in [*RULES, *prompt.split()]]
        said = [[words.index(word) for word in answer.split()] for answer in answers]
        cache.store.model.generate(
            torch.tensor([given]),
            past_key_values=cache,
            max_new_tokens=len(said[0]),
            do_sample=len(said) > 1,
            num_return_sequences=len(said),
            prefix_allowed_tokens_fn=lambda row, ids, given=given, said=said: [
                said[row % len(said)][len(ids) - len(given)]
            ],
        )
        held = cache._current.rows
        assert held is not None
        rows = []
        for number, (tokens, prompt) in enumerate(zip(held.token_ids(), held.prompts, strict=True)):
            chain = HashChain(prompt.root, BLOCK_SIZE, tokens)
            blocks = cache.store.blocks.allocator.match_prefix(chain.hashes_of())
            num_known = len(given) - cache.last_call.rows[number].computed_tokens
            rows.append(([words[token] for token in tokens], blocks, num_known, len(given)))
        yield Drawn(title, rows, _kinds(cache.store.blocks.allocator))


def _kinds(allocator: PrefixCachingBlockAllocator) -> list[int]:
    """The state of each block but the null block: 0 free, 1 cached, 2 in use."""
    blocks = range(1, allocator.num_blocks)
    return [2 if allocator.ref_count(i) else int(allocator.block_hash_of(i) is not None) for i in blocks]


def draw(calls: Sequence[Drawn]) -> str:
    """All calls, one below the other."""
    shapes, top = [], 0
    for call in calls:
        shapes.append(f'<text x="{LEFT}" y="{top + 26}" class="title">{call.title}</text>')
        top += 40
        for words, blocks, num_known, num_prompt in call.rows:
            shapes += _row(top, words, blocks, num_known, num_prompt)
            top += HEIGHT + 28
        shapes += _pool(top, call.pool)
        top += 52
    of_words = [("reused", "not computed"), ("computed", "computed"), ("said", "generated")]
    of_blocks = [("used", "in use"), ("cached", "cached: nobody holds it, until it is evicted"), ("free", "free")]
    for what, kinds in (("words:", of_words), ("the pool:", of_blocks)):
        shapes += [f'<text x="{LEFT}" y="{top + 21}" class="note">{what}</text>', *legend(LEFT + 64, top + 8, kinds)]
        top += 26
    return svg("The blocks of four calls", WIDTH, top + 14, shapes)


def _row(top: int, words: list[str], blocks: list[int], num_known: int, num_prompt: int) -> Iterator[str]:
    for index, block in enumerate(blocks):
        left = LEFT + index * (BLOCK_SIZE * CELL + GAP)
        yield f'<text x="{left}" y="{top + 10}" class="note">block {block}</text>'
        yield f'<rect x="{left}" y="{top + 14}" width="{BLOCK_SIZE * CELL}" height="{HEIGHT}" rx="4" class="frame"/>'
    for place, word in enumerate(words):
        left = LEFT + place * CELL + place // BLOCK_SIZE * GAP
        kind = "reused" if place < num_known else "computed" if place < num_prompt else "said"
        yield f'<rect x="{left + 1}" y="{top + 15}" width="{CELL - 2}" height="{HEIGHT - 2}" rx="3" class="{kind}"/>'
        yield f'<text x="{left + CELL // 2}" y="{top + 32}" class="word">{word}</text>'


def _pool(top: int, kinds: list[int]) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="{top + 19}" class="note">the pool</text>'
    for number, kind in enumerate(kinds, 1):
        left = LEFT + 64 + (number - 1) * 34
        name = ("free", "cached", "used")[kind]
        yield f'<rect x="{left}" y="{top + 4}" width="30" height="20" rx="3" class="{name}"/>'
        yield f'<text x="{left + 15}" y="{top + 18}" class="word">{number}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(list(play())), "utf-8")
