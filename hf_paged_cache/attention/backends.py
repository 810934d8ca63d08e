"""Computes attention over a part of what a query sees, with what is needed to join the parts. Holds nothing.

The log of the sum of a part's exponentials, its *lse*, says how much the part weighs. Every query must see something of
a part: kernels disagree about the lse of a part that is hidden whole.
"""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor


class Part(NamedTuple):
    """`Part` holds some of the keys and values that queries see.

    Shapes: B rows, H heads, L tokens, D head size.

    Attributes:
        key, value: [B, H, L, D]; the sizes of the two may differ.
        mask: [B or 1, 1, T, L], in the dtype of the query, added to the scores; None: queries see all tokens.
    """

    key: Tensor
    value: Tensor
    mask: Tensor | None = None


Attend: TypeAlias = Callable[[Tensor, Part, float | None], tuple[Tensor, Tensor]]


def attend(query: Tensor, part: Part, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Return what queries get of a part, and the part's lse.

    The kernel of the device computes both, unless torch is told to use none.

    Args:
        query: [B, G * H, T, D]: G heads of queries to each head of the part.
        scale: factor of the scores; None: 1 / sqrt(D).

    Returns:
        output [B, G * H, T, D] in the dtype of the query, and lse [B, G * H, T] in fp32, or fp64 for fp64.

    Examples:
        >>> query, key = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 5, 8)
        >>> out, lse = attend(query, Part(key, key))
        >>> out.shape, lse.shape
        (torch.Size([1, 4, 1, 8]), torch.Size([1, 4, 1]))
    """
    same_sizes = query.shape[3] == part.key.shape[3] == part.value.shape[3]
    return (_of_device(query.device.type) if same_sizes else by_operators)(query, part, scale)


def name_of(device_type: str) -> str:
    """Return the name of what `attend` runs on a device as torch is set now, for keys and values of one size.

    Examples:
        >>> name_of("cpu"), name_of("cuda")
        ('flash_of_cpu', 'fused_of_cuda')
        >>> from torch.nn.attention import SDPBackend, sdpa_kernel
        >>> with sdpa_kernel(SDPBackend.MATH):
        ...     name_of("cpu")
        'operators'
    """
    return _of_device(device_type).__name__.removeprefix("by_")


def _of_device(device_type: str) -> Attend:
    settings: Any = torch.backends.cuda  # settings of all devices, whatever the name says
    return _OF_DEVICE.get(device_type, by_operators) if settings.flash_sdp_enabled() else by_operators


def by_flash_of_cpu(query: Tensor, part: Part, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute `attend` by torch's fused kernel for CPUs."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, part.key, part.value, attn_mask=part.mask, scale=scale
    )
    return out, lse


def by_fused_of_cuda(query: Tensor, part: Part, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute `attend` by torch's fused kernels for CUDA; what they do not take is left to `by_operators`.

    The heads of queries to one head of the part become further queries to that head, so no head is repeated.
    """
    key, value, mask = part
    num_rows, num_heads, length, size = query.shape
    if size % 8 or query.dtype == torch.float64:
        return by_operators(query, part, scale)
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


def by_operators(query: Tensor, part: Part, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute `attend` by matrix products, on any device.

    The queries of a long prompt are computed some at a time, because all scores are in memory.
    """
    num_rows, num_heads, length, size = query.shape
    heads, most = part.key.shape[1], max(1, _MOST_SCORES // (num_rows * num_heads * part.key.shape[2]))
    if length > most:
        mask = None if part.mask is None else part.mask.expand(-1, -1, length, -1)
        pieces = [
            by_operators(query[:, :, some], part._replace(mask=None if mask is None else mask[:, :, some]), scale)
            for some in (slice(first, first + most) for first in range(0, length, most))
        ]
        return torch.cat([out for out, _ in pieces], 2), torch.cat([lse for _, lse in pieces], 2)
    exact = torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(num_rows, heads, num_heads // heads, length, size)
    scores = (grouped @ part.key.unsqueeze(2).transpose(3, 4)).to(exact) * (size**-0.5 if scale is None else scale)
    if part.mask is not None:
        scores = scores + part.mask.unsqueeze(2)
    lse = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse).exp().to(query.dtype) @ part.value.unsqueeze(2)
    return out.flatten(1, 2), lse.view(num_rows, num_heads, length)


def merge(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return what queries get of two parts together, in fp32 at least, from what they get of each part.

    Source: Juravsky et al. 2024 (arXiv:2402.05099).
    """
    (out, lse), (other, other_lse) = left, right
    exact = torch.promote_types(out.dtype, torch.float32)
    share = torch.sigmoid(lse - other_lse).unsqueeze(-1)
    return torch.lerp(other.to(exact), out.to(exact), share), torch.logaddexp(lse, other_lse)


_MOST_SCORES = 2**26  # most scores in memory at a time: 256 MiB in fp32
_OF_DEVICE: Mapping[str, Attend] = MappingProxyType(
    {"cpu": by_flash_of_cpu} | ({} if torch.version.hip else {"cuda": by_fused_of_cuda})
)
