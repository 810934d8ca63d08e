"""Describes a model so that the description means the same in another process and on another machine.

`Fingerprint.digest` counts writes and numbers functions, which mean nothing elsewhere. An identity has only names,
values, shapes and versions, and costs a pass over all weights. A model with something that cannot be named so has no
identity: its keys and values stay in their process.
"""

import hashlib
import importlib.metadata
import inspect
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import NotPortableError
from ..tiers.saved_file import ModelIdentity
from .foreign_code import Function, module_name, name_of
from .rope import RopeRegime
from .weights import Listing, WeightFingerprint, plain_tensors

_CHUNK_BYTES = 2**26  # most bytes of a device's weights that are on the host at a time
_THREADS = 4  # number of threads that hash; SHA-256 lets other threads run meanwhile
_NO_SETTINGS = {"_name_or_path", "transformers_version", "name_or_path"}
Settings = list[tuple[str, object]]  # (name, value) of each setting of a config
_PACKAGES = ("torch", "transformers")  # packages whose versions are part of an identity, so that their code is not


class Look(NamedTuple):
    """`Look` describes a model as it is now; `digest` is the digest of all the rest, for this process.

    Attributes:
        switches: state of adapters and autocast, numbers and names alone.
    """

    digest: bytes
    listing: Listing
    functions: list[Function]
    settings: Settings
    switches: tuple[object, ...]


def identify(look: Look, rope: RopeRegime, weights_digest: str) -> ModelIdentity:
    """Describe what a model is.

    Args:
        weights_digest: see `digest_of_weights`.

    Raises:
        NotPortableError: there is a hook, or a forward that is a closure: nobody could name it elsewhere.
    """
    modules, weights = look.listing.modules, look.listing.weights
    code = {name for function in look.functions for name in _code_of(function)}
    kinds = [type(module).__qualname__ for module in modules]
    shapes = [f"{weight.key}{tuple(weight.tensor.shape)}{weight.tensor.dtype}" for weight in weights]
    dtypes = {weight.tensor.dtype for weight in weights if weight.tensor.is_floating_point()}
    named = {name: repr(value) for name, value in look.settings}
    first = type(modules[0])
    facts = {
        "model": f"{first.__module__.rpartition('.')[2]}.{first.__qualname__}",
        "dtype": ", ".join(sorted(map(str, dtypes))),
        "modules": _sha256("\n".join([*kinds, *shapes]).encode()),
        "weights": weights_digest,
        "rope": _sha256(b"".join(map(_bytes_of, rope.static())) + rope.scales()),
        "settings": _sha256(json.dumps(named, sort_keys=True).encode()),
        "adapters and autocast": repr(look.switches),
        "code": _sha256("\n".join(sorted(code)).encode()),
        "transformers": _version("transformers"),
        "torch": _version("torch"),
    }
    return ModelIdentity(facts, named)


def sampled_digest(model: Any) -> str:
    """Return a digest of settings, adapters in use and a few values of each weight, the same in every process.

    It is cheap, and so no proof: a model in which a few values have changed may have the same digest.
    """
    listing = WeightFingerprint(model).listing()
    settings = {name: value for name, value in model.config.to_diff_dict().items() if name not in _NO_SETTINGS}
    adapters = [adapter_state(module) for module in listing.modules if hasattr(module, "_active_adapter")]
    weights = [(weight.key, tuple(weight.tensor.shape), weight.tensor.dtype) for weight in listing.weights]
    values = [_bytes_of(sample) for weight in listing.weights for sample in weight.samples]
    return _sha256(repr((sorted(settings.items()), adapters, weights)).encode() + b"".join(values))


def adapter_state(module: nn.Module) -> list[object]:
    """Return what a layer with PEFT's adapters heeds besides weights: numbers and names."""
    names = "_active_adapter", "_disable_adapters", "scaling", "merged_adapters"
    return [getattr(module, name, None) for name in names]


def digest_of_weights(weights: Iterable[Tensor]) -> str:
    """Return a SHA-256 digest over the digests of all tensors, with shape and dtype; the same on every device.

    Cost: reads all tensors.

    Raises:
        NotPortableError: a tensor is kept where it cannot be read.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        digests = list(threads.map(_digest, weights))
    return _sha256("\n".join(digests).encode())


def _digest(tensor: Tensor) -> str:
    found = hashlib.sha256(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
    for part in plain_tensors(tensor):
        if part.layout != torch.strided or part.is_meta:
            raise NotPortableError(f"a weight of this model is offloaded, or cannot be read ({part.layout})")
        flat = part.detach().contiguous().view(-1)
        step = max(1, _CHUNK_BYTES // flat.element_size())
        for start in range(0, flat.numel(), step):
            found.update(_bytes_of(flat[start : start + step]))
    return found.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the values of a 1-D tensor as bytes."""
    return tensor.cpu().contiguous().view(torch.uint8).numpy().data


def _code_of(function: Function) -> Iterator[str]:
    """Yield names of the code of a class's forward, and of the functions that it wraps.

    Code of packages whose versions are in the identity is left out.
    """
    code: Any
    _, where, code = function
    if where:
        raise NotPortableError(
            f"{_full_name(code)} hooks or replaces the forward of a {where}, and what it does cannot be named for "
            "another process; take it off"
        )
    while code is not None:
        code = getattr(code, "__func__", code)
        if module_name(code).partition(".")[0] not in _PACKAGES:
            if "<locals>" in name_of(code):
                raise NotPortableError(
                    f"{_full_name(code)} computes a forward, and is defined inside another function, so that it cannot "
                    "be named for another process"
                )
            try:
                source = Path(inspect.getfile(code)).read_bytes()
            except (OSError, TypeError) as error:
                raise NotPortableError(f"the source of {_full_name(code)} cannot be read: {error}") from error
            yield f"{name_of(code)} {_sha256(source)}"
        code = getattr(code, "__wrapped__", None)


def _full_name(function: Any) -> str:
    return f"{module_name(function)}.{name_of(function)}"


def _version(package: str) -> str:
    return importlib.metadata.version(package).partition("+")[0]  # the version without the name of a build


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
