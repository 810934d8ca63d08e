"""Computes attention over a part of what a query sees, and the log of the sum of exponentials, *lse*, to join parts.

Every query must see something of a part: kernels disagree about the lse of a part that is hidden whole.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor


class Part(NamedTuple):
    """`Part` holds some of the keys and values that queries see: of B rows, in H heads of size D, L tokens."""

    key: Tensor  # [B, H, L, D]
    value: Tensor  # [B, H, L, D]
    mask: Tensor | None = None  # [B or 1, 1, T, L], in the dtype of the query, added to the scores


Attend: TypeAlias = Callable[[Tensor, Part, float | None], tuple[Tensor, Tensor]]


def attend(query: Tensor, part: Part, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Return what queries get of a part, and the part's lse, by the kernel of the device.

    Shapes: query and output [B, G * H, T, D], G heads to each head of the part; lse [B, G * H, T] in fp32 at least.
    """
    return _OF_DEVICE[query.device.type](query, part, scale)


def can_attend(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether there is a kernel for such queries, keys and values."""
    kernel, size = _OF_DEVICE.get(query.device.type), query.shape[3]
    if kernel is by_fused_of_cuda and (size % 8 or query.dtype == torch.float64):
        return False
    return kernel is not None and size == key.shape[3] == value.shape[3]


def is_fused() -> bool:
    """Return whether torch may use fused kernels, as it is set now."""
    settings: Any = torch.backends.cuda  # settings of all devices, whatever the name says
    return bool(settings.flash_sdp_enabled())


def by_flash_of_cpu(query: Tensor, part: Part, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute `attend` by torch's fused kernel for CPUs."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, part.key, part.value, attn_mask=part.mask, scale=scale
    )
    return out, lse


def by_fused_of_cuda(query: Tensor, part: Part, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute `attend` by torch's fused kernels for CUDA; heads of queries to one head become queries to that head."""
    key, value, mask = part
    num_rows, num_heads, length, size = query.shape
    folded = query.reshape(num_rows, key.shape[1], -1, size)
    if mask is None and query.dtype != torch.float32 and size <= 256 and _has_flash(query.device):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse = flash(folded, key, value, 0.0, False, False, scale=scale)[:2]
    else:
        if mask is not None:
            mask = mask if length == 1 else mask.repeat(1, 1, num_heads // key.shape[1], 1)
            mask = aligned(mask).expand(*folded.shape[:3], key.shape[2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse = efficient(folded, key, value, mask, True, scale=scale)[:2]
        lse = lse[:, :, : folded.shape[2]]  # the kernel fills lse up to a multiple of 32
    return out.reshape(num_rows, num_heads, length, size), lse.reshape(num_rows, num_heads, length)


def aligned(mask: Tensor) -> Tensor:
    """Return a mask whose rows begin at multiples of 16 numbers, as torch's fused kernels for CUDA want."""
    if mask.device.type != "cuda" or all(stride % 16 == 0 for stride in mask.stride()[:-1]):
        return mask
    columns = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, -columns % 16))[..., :columns]


@cache
def _has_flash(device: torch.device) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def merge(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return what queries get of two parts together, in fp32 at least (Juravsky et al. 2024, arXiv:2402.05099)."""
    (out, lse), (other, other_lse) = left, right
    exact = torch.promote_types(out.dtype, torch.float32)
    share = torch.sigmoid(lse - other_lse).unsqueeze(-1)
    return torch.lerp(other.to(exact), out.to(exact), share), torch.logaddexp(lse, other_lse)


_OF_DEVICE: Mapping[str, Attend] = MappingProxyType(
    {"cpu": by_flash_of_cpu} | ({} if torch.version.hip else {"cuda": by_fused_of_cuda})
)

# Bytes of keys and values of one layer that are read in the time that one more launch, and the merge after it, take.
# On a CPU, 8 rows of SmolLM2's shape were as quick as rows each read by itself where 1.2 MB a layer were saved, and
# 1.06 times as quick with 3.4 MB. On an accelerator a step waits 0.35 ms longer for the Python of a layer that is split
# (H200, Llama 3 8B in bf16). Reading each row by itself takes that long only where torch repeats heads first, as under
# a mask or in fp32: 1.4 ms for 250 MB, and 0.07 ms by its fused kernel.
LAUNCH_BYTES: Mapping[str, int] = MappingProxyType({"cpu": 3 * 2**19})
_OTHER_LAUNCH_BYTES, _OTHER_FUSED_BYTES = 2**28, 2**32


def launch_tokens(tensors: Sequence[Tensor], *, are_padded: bool) -> float:
    """Return how many tokens of one row are read in the time that one more launch, and the merge after it, take.

    Tensors are streams of all layers, [S, H, .., D] each; rows that are padded have a mask.
    """
    num_bytes = sum(tensor.shape[0] * tensor.shape[1] * tensor.shape[-1] * tensor.dtype.itemsize for tensor in tensors)
    num_layers = max(1, sum(tensor.shape[0] for tensor in tensors) // 2)
    is_fused = tensors[0].dtype in (torch.bfloat16, torch.float16) and not are_padded
    other = _OTHER_FUSED_BYTES if is_fused else _OTHER_LAUNCH_BYTES
    return LAUNCH_BYTES.get(tensors[0].device.type, other) * num_layers / num_bytes
