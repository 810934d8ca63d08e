"""Whether a model is shared by several processes that must run as many forwards as each other."""

from typing import Any

import torch.distributed


def ranks_must_match(model: Any) -> bool:
    """Whether each forward gathers weights from other processes, so that none may run one that the others do not.

    So it is with FSDP and DeepSpeed's ZeRO 3, and with tensor parallelism, whose processes could agree, but are not
    asked. A process that holds a whole copy of the model (data parallelism) may run what it likes.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    if torch.distributed.get_world_size() == 1:
        return False
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return True
    return any(hasattr(weight, "ds_id") or hasattr(weight, "device_mesh") for weight in model.parameters())
