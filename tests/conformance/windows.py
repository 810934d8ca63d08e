"""Windows shorter than the prompt, of every length at which they end at a block's border or beside it.

Blocks are of 3 tokens, so a window of 17 blocks takes 51. A hit is seen failing with zeros in all blocks, and with
zeros in the window blocks alone.
"""

from typing import Any

from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache.model.layers import windows_of

from ..reference import batch, row
from . import zoo_settings
from .player import Player
from .zoo import configuration, instantiate

BLOCK_SIZE = 3
# In tokens: 1, 2, 15, 16 and 17 blocks, and one token less or more.
WINDOWS = tuple(blocks * BLOCK_SIZE + beside for blocks in (1, 2, 15, 16, 17) for beside in (-1, 0, 1))


def windowed_layers(config: Any) -> dict[int, int]:
    """Index of a layer that has a window, which a sequence may reach -> how long it is."""
    windows = windows_of(DynamicCache(config=config).layers)
    return {layer_idx: window.size for layer_idx, window in windows.items() if window.size < zoo_settings.POSITIONS}


def build_with(name: str, window: int, seed: int = 0) -> PreTrainedModel:
    """The tiny model of a type or variant, with another window in the layers that have one."""
    model_class, config = configuration(name)
    for part in {id(part): part for part in (config, config.get_text_config(decoder=True))}.values():
        for setting, value in list(vars(part).items()):
            if value in (zoo_settings.WINDOW, 2 * zoo_settings.WINDOW) and setting in _SETTINGS:
                setattr(part, setting, value // zoo_settings.WINDOW * window)
    return instantiate(model_class, config, seed)


_SETTINGS = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "local_attention_window_len",
    "window_size",
    "local_attention",
)


def ends_a_chunk(config: Any, num_tokens: int) -> bool:
    """Whether attention is in chunks, and the next token starts one: it sees nothing before itself there."""
    chunk = getattr(config.get_text_config(decoder=True), "attention_chunk_size", None)
    return bool(chunk) and num_tokens % chunk == 0


def short_window(play: Player) -> None:
    """Prompts longer than any window, and hits in a previous row, in whole blocks, and in padded rows.

    One token is new: with a window of 2 it sees only one column back. Where attention is in chunks, 61 tokens fill
    none, nor 58 and 31 together; whole blocks fill those of one block.
    """
    play.build(block_size=BLOCK_SIZE)
    if play.has_states:  # which are known after 57 tokens then
        play.fill(**batch(row((1, 58))))
    play.fill(**batch(row((1, 61))))
    play.hit(**batch(row((1, 61), (2, 1))), reused=61)
    play.cache.reset()
    play.hit(**batch(row((1, 58))), reused=57, sees_windows=not ends_a_chunk(play.model.config, 57))
    play.cache.reset()
    rows = row((1, 58)), row((4, 31))
    play.fill(**batch(*rows))
    play.hit(**batch(*(tokens + row((5, 1)) for tokens in rows)), at_least=58)
