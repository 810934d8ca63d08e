"""Handles a prompt that `generate` computes in chunks (`prefill_chunk_size`), so that it always gives the same bits.

A forward gives the same bits if its shapes, inputs and the machine's settings are the same. So chunks have a root that
names their size, the rows and padding of the batch, and the settings. What is known is used in whole chunks alone.
"""

from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from ..blocks import root_hash
from ..errors import CacheArgumentError, ForwardMismatchError
from ..model.support import has_experts
from ..rows.request import Chunks, ForwardRequest
from .generate_arguments import GenerateArguments

IN_CHUNKS = "prefill_chunk_size was given, and known tokens are used in whole chunks alone"
_VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
SLICES_CHUNKS = _VERSION >= (5, 23)  # `generate` passes only the chunks after what the cache's rows hold


def require_slices(given: GenerateArguments) -> None:
    """Raise CacheArgumentError for chunks of a prompt whose rows resume, if transformers reran what the rows hold."""
    if given.chunk_size is not None and not SLICES_CHUNKS and not given.verifies_drafts:
        raise CacheArgumentError(
            "before 5.23 transformers runs a prompt in chunks from its first column on, also where the rows of a cache "
            "resume; leave prefill_chunk_size out"
        )


@dataclass
class ChunkedPrompt:
    """`ChunkedPrompt` is the prompt of one `generate`, in chunks."""

    chunks: Chunks
    has_experts: bool
    num_logits: int  # number of last columns whose logits are asked for
    _shape: bytes = b""  # digest of what shapes the prompt's forwards
    prompt: ForwardRequest | None = None  # that rows have begun with

    def arguments(self, model: Any, given: GenerateArguments, *, takes_positions: bool) -> dict[str, Any] | None:
        """Return what a forward of the whole prompt would be passed; None: only `generate` knows."""
        passed = given.passed
        ids, mask = passed.get("input_ids"), passed.get("attention_mask")
        own = getattr(type(model), "_prepare_position_ids_for_generation", None)
        if not SLICES_CHUNKS or own is not GenerationMixin._prepare_position_ids_for_generation:
            return None
        is_custom = passed.get("custom_generate") is not None or passed.get("inputs_embeds") is not None
        if is_custom or not isinstance(ids, Tensor) or ids.dim() != 2:
            return None
        if mask is None:
            if given.pad_token_id is not None and bool((ids == given.pad_token_id).any()):
                return None  # `generate` may take these ids for padding
            mask = torch.ones_like(ids)
        if not isinstance(mask, Tensor) or mask.shape != ids.shape:
            return None
        arguments = {name: value for name, value in passed.items() if name not in _names_of_generate()}
        if takes_positions and arguments.get("position_ids") is None:
            arguments["position_ids"] = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
        arguments |= {**given.outputs, "input_ids": ids, "attention_mask": mask}
        copies = max(1, given.limits.num_rows // max(1, ids.shape[0]))
        of_rows = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and copies > 1}
        return arguments | {name: value.repeat_interleave(copies, dim=0) for name, value in of_rows.items()}

    def require(self, request: ForwardRequest, before: int) -> None:
        """Raise ForwardMismatchError if a forward does not continue what the rows have begun with."""
        if self.prompt is None:
            return
        stop = before + request.num_new_columns
        for new, whole in zip(request.rows, self.prompt.rows, strict=True):
            tokens = whole.token_ids[max(0, before - whole.pad) : max(0, stop - whole.pad)]
            is_other = new.token_ids != tokens or new.pad != min(whole.pad, stop)
            if is_other or (tokens and new.root != whole.root) or request.bypass:
                raise ForwardMismatchError(
                    f"generate was to continue its prompt after {before} cached columns, and runs something else; "
                    "leave out prefill_chunk_size, or pass input_ids and attention_mask of the prompt alone"
                )

    def why_bypassed(self, request: ForwardRequest, block_size: int) -> str | None:
        """Return why nothing may be reused, if a token's bits follow from more than the tokens before it; else None."""
        are_alike = all(row.token_ids == request.rows[0].token_ids for row in request.rows)
        if not self.has_experts or (are_alike and not block_size % self.chunks.size):
            return None
        return (
            "experts compute all rows and tokens of a chunk together, so rows must be alike, and blocks hold whole "
            f"chunks: build the store with a block_size that is a multiple of prefill_chunk_size={self.chunks.size}"
        )

    def shape_of(self, number: int, request: ForwardRequest) -> bytes:
        """Return a digest, 32 bytes, of what a row's bits follow from besides tokens and model."""
        if not self._shape:  # this is the first forward; `request` is of the whole prompt, or of its first chunk
            pads = ",".join(str(row.pad) for row in request.rows)
            self._shape = root_hash(str(self.chunks.size).encode(), pads.encode(), *_settings())
        return root_hash(self._shape, str(number).encode())


def chunked_prompt(model: Any, given: GenerateArguments) -> ChunkedPrompt | None:
    """Return the chunked prompt of a `generate` that begins; None: it computes its prompt in one forward."""
    size = given.chunk_size
    if given.verifies_drafts or not isinstance(size, int) or size < 1:  # other sizes are refused by transformers
        return None
    return ChunkedPrompt(
        Chunks(size, given.limits.num_prompt_columns // size * size), has_experts(model), given.num_logits
    )


@cache
def _names_of_generate() -> frozenset[str]:
    """Return the arguments of `generate` that are not passed on to the model."""
    options = GenerationConfig()  # type: ignore[no-untyped-call]
    return frozenset({*vars(options), *signature(GenerationMixin.generate).parameters})


def _settings() -> list[bytes]:
    """Return the settings of the process and its device under which kernels round differently."""
    backends: Any = torch.backends.cuda
    settings = [
        *(torch.__version__, torch.get_num_threads(), torch.get_float32_matmul_precision()),
        *(torch.backends.cpu.get_cpu_capability(), torch.cuda.is_available() and torch.cuda.get_device_name()),
        *(backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled()),
    ]
    return [str(setting).encode() for setting in settings]
