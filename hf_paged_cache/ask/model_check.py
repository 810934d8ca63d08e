"""Reports, by `check_model`, whether a model is supported, and what a short trial of the model showed."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module
from transformers import PreTrainedModel

from ..cache import PagedPrefixCache
from ..errors import CacheArgumentError, PagedCacheError
from ..integration.hooks import left_as_it_was
from ..model.layers import cache_layers
from ..model.support import require_supported, takes, unwrapped
from ..model.trial import (
    NUM_CACHED,
    NUM_COLUMNS,
    continue_behind,
    distance,
    dynamic_cache,
    last_logits,
    measure_bytes_per_token,
    require_continuable,
    tolerance,
    trial_inputs,
    undisturbed,
)


@dataclass(frozen=True, slots=True)
class ModelReport:
    """`ModelReport` says what `check_model` found. `print` shows it in a few lines.

    Attributes:
        model: name of the model's class.
        is_supported: True if a `PagedPrefixCache` can be built for the model and passed the trial; else see `reason`.
        distance: largest difference between logits with this cache and without one, as a share of their scale; None:
            not measured.
        own_distance: the same difference for `DynamicCache`.
        reused_tokens: tokens reused of a prompt of `prompt_tokens`, whose first blocks were cached.
        layers: type of cache layer -> how many the model has.
        kv_bytes_per_token: bytes of keys and values of a token in all layers; fewer after a window's end.
        snapshot_bytes: bytes of the model's states at one place; 0: it has none.
        remarks: sentences on what limits reuse, and on whether steps can be captured on a GPU.
    """

    model: str
    is_supported: bool
    reason: str = ""
    distance: float | None = None
    own_distance: float | None = None
    reused_tokens: int | None = None
    prompt_tokens: int | None = None
    layers: Mapping[str, int] | None = None
    kv_bytes_per_token: float | None = None
    snapshot_bytes: int = 0
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.model} is supported" if self.is_supported else f"{self.model} is not supported: {self.reason}"]
        if self.layers:
            lines.append("cache layers: " + ", ".join(f"{count} {kind}" for kind, count in self.layers.items()))
        if self.distance is not None:
            lines.append(
                f"distance from one forward without a cache: {self.distance:.1e} of the logits' scale "
                f"(DynamicCache: {self.own_distance:.1e})"
            )
            lines.append(f"reused {self.reused_tokens} of {self.prompt_tokens} tokens of a prompt that was known")
        if self.kv_bytes_per_token is not None:
            states = f", a snapshot of its states {self.snapshot_bytes / 2**20:,.2f} MiB" if self.snapshot_bytes else ""
            lines.append(f"a token takes {self.kv_bytes_per_token / 2**10:,.1f} KiB of keys and values{states}")
        return "\n".join([*lines, *self.remarks])


def check_model(model: Any) -> ModelReport:
    """Try a model in some twenty short forwards, and report whether it is supported.

    An unsupported model is reported; no error is raised. The model is left as it was.

    Raises:
        CacheArgumentError: `model` is no model at all, such as the name of one.
        torch.OutOfMemoryError: a forward of the model does not fit.

    Examples:
        >>> check_model(model).is_supported
        True
    """
    name, layers = type(model).__name__, None
    try:
        model = unwrapped(model)
        name = type(model).__name__
        require_supported(model)
        layers = dict(Counter(type(layer).__name__ for layer in cache_layers(model)))
        require_continuable(model)
        with left_as_it_was(model), undisturbed(model) as seen:
            return _try(model, name, layers, seen)
    except PagedCacheError as error:
        if not isinstance(model, Module):
            raise CacheArgumentError(str(error)) from None
        return ModelReport(name, False, str(error).removeprefix(f"{name}: "), layers=layers)


def _try(model: PreTrainedModel, name: str, layers: dict[str, int], seen: Iterable[torch.dtype]) -> ModelReport:
    """Run the same columns with `DynamicCache` and with ours, then a prompt whose first blocks are cached; logits are
    computed in the dtypes `seen`.
    """
    inputs, num_compared = trial_inputs(model), NUM_COLUMNS - NUM_CACHED
    whole = last_logits(model(**inputs, use_cache=False), num_compared)
    own = distance(whole, continue_behind(model, inputs, dynamic_cache(model)))
    cache = PagedPrefixCache(model, block_size=8, num_blocks=16)
    ours = distance(whole, continue_behind(model, inputs, cache))
    cache.reset()
    known = {each: inputs[each][:1] for each in ("input_ids", "attention_mask")}
    logits, rows = cache._side_rows.generate(known)
    ours = max(ours, distance(whole[:1, -1:], logits.float().cpu()))
    (counts,), blocks = rows.state.counts, cache.store.blocks
    reason = ""
    if ours > max(tolerance(model, seen), 5 * own):
        reason = f"with our cache its logits differ by {ours:.2g} of their scale"
    elif not counts.reused_tokens and blocks.align < NUM_COLUMNS:  # states may be kept after more tokens than are tried
        reason = f"nothing of a known prompt is reused: {counts.stopped}"
    return ModelReport(
        model=name,
        is_supported=not reason,
        reason=reason,
        distance=ours,
        own_distance=own,
        reused_tokens=counts.reused_tokens,
        prompt_tokens=counts.prompt_tokens,
        layers=layers,
        kv_bytes_per_token=measure_bytes_per_token(model),
        snapshot_bytes=blocks.rules.num_bytes,
        remarks=tuple(_remarks(model, cache)),
    )


def _remarks(model: PreTrainedModel, cache: PagedPrefixCache) -> Iterator[str]:
    why = cache.why_not_captured()
    can = "on a CUDA device its steps can run as graphs (capture='auto')"
    yield f"its steps cannot run as CUDA graphs: {why}" if why else can
    if not takes(model, "position_ids"):
        yield "it takes no position_ids: a prompt is reused only after as much padding as before"
    if cache.store.fingerprint.rope.depends_on_length:
        yield "its rotary frequencies depend on length: a prompt is reused only where they are the same"
    if cache.store.blocks.has_states:
        chunk = cache.store.fingerprint.state_traits.chunk
        multiple = "the block size" if chunk == 1 else f"{chunk} tokens and of the block size"
        yield f"its layers carry states: prompts are reused up to where one was kept, at a multiple of {multiple}"
    if not takes(model, "logits_to_keep"):
        yield "it takes no logits_to_keep: while drafts are verified, the whole prompt is computed"
