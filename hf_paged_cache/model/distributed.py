"""Whether all processes that run a model must run the same number of forwards."""

from typing import Any

import torch.distributed


def ranks_must_match(model: Any) -> bool:
    """Whether a forward that only this process runs would wait for the others for ever.

    True where weights are split over processes: FSDP, DeepSpeed's ZeRO 3, tensor parallelism. False for data
    parallelism, where every process has a whole copy.
    """
    processes = torch.distributed
    if not processes.is_available() or not processes.is_initialized() or processes.get_world_size() == 1:
        return False
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return True
    return any(hasattr(weight, "ds_id") or hasattr(weight, "device_mesh") for weight in model.parameters())
