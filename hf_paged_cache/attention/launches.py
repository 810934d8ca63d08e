"""Says what one more launch of attention costs, as the number of tokens that could be read meanwhile.

This decides whether it pays to read once what rows share.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

# Bytes of keys and values of one layer that are read in the time that one more launch, and the merge after it, take.
# On a CPU, 8 rows of SmolLM2's shape were as quick as rows each read by itself where 1.2 MB a layer were saved, and
# 1.06 times as quick with 3.4 MB. On an accelerator a step waits 0.35 ms longer for the Python of a layer that is split
# (H200, Llama 3 8B in bf16). Reading each row by itself takes that long only where torch repeats heads first, as under
# a mask or in fp32: 1.4 ms for 250 MB, and 0.07 ms by its fused kernel.
LAUNCH_BYTES: Mapping[str, int] = MappingProxyType({"cpu": 3 * 2**19})
_OTHER_LAUNCH_BYTES, _OTHER_FUSED_BYTES = 2**28, 2**32


def tokens_of_a_launch(states: Tensor, bytes_per_token: float, *, are_padded: bool) -> float:
    """Return how many tokens of one row are read in the time that one more launch, and the merge after it, take.

    Args:
        states: keys of a layer.
        bytes_per_token: bytes of a token's keys and values in one layer.
        are_padded: True if rows have padding, so that attention has a mask.
    """
    is_fused = states.dtype in (torch.bfloat16, torch.float16) and not are_padded
    other = _OTHER_FUSED_BYTES if is_fused else _OTHER_LAUNCH_BYTES
    return LAUNCH_BYTES.get(states.device.type, other) / bytes_per_token
