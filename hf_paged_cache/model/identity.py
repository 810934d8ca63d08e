"""Describes a model so that the description means the same in another process and on another machine.

A digest counts changes, which mean nothing elsewhere. An identity has only names, values, shapes
and versions, and costs a pass over all weights. What cannot be named so stays in its process.
"""

import hashlib
import importlib.metadata
import inspect
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import NotPortableError
from ..tiers.saved_file import ModelIdentity
from .foreign_code import full_name, functions_of, module_name, name_of
from .weights import Listing, plain_tensors

_CHUNK_BYTES = 2**26  # most bytes of a device's weights that are on the host at a time
_THREADS = 4  # number of threads that hash
# what a config says of a model beside how it computes; `save_pretrained` sets the last two
_NO_SETTINGS = {"_name_or_path", "transformers_version", "name_or_path", "architectures", "dtype"}
Settings = list[tuple[str, object]]  # (name, value) of each setting of a config
_PACKAGES = ("torch", "transformers")  # packages whose versions are part of an identity, so that their code is not


class Look(NamedTuple):
    """`Look` is what a look at a model has found. It keeps no hook alive."""

    digest: bytes  # of all the rest, for this process
    of_weights: bytes  # the first bytes of `digest`, which depend on weights alone
    listing: Listing
    scales: list[object]  # of rotary frequencies
    settings: Settings
    switches: tuple[object, ...]  # state of adapters and autocast, numbers and names alone


def identity_of(look: Look, code: list[str], of_weights: str) -> ModelIdentity:
    """Describe what a model is, given names of the code of its forwards and the digest of its weights."""
    modules, weights = look.listing.modules, look.listing.weights
    kinds = [type(module).__qualname__ for module in modules]
    shapes = [f"{key}{tuple(tensor.shape)}{tensor.dtype}" for key, tensor in weights]
    dtypes = {tensor.dtype for _, tensor in weights if tensor.is_floating_point()}
    rope = b"".join([_bytes_of(each.detach().flatten()) for each in look.listing.frequencies])
    named = {name: repr(value) for name, value in look.settings}
    first = type(modules[0])
    facts = {
        "model": f"{first.__module__.rpartition('.')[2]}.{first.__qualname__}",
        "dtype": ", ".join(sorted(map(str, dtypes))),
        "modules": _sha256("\n".join([*kinds, *shapes]).encode()),
        "weights": of_weights,
        "rope": _sha256(rope + repr(look.scales).encode()),
        "settings": _sha256(json.dumps(named, sort_keys=True).encode()),
        "adapters and autocast": repr(look.switches),
        "code": _sha256("\n".join(code).encode()),
        "transformers": _version("transformers"),
        "torch": _version("torch"),
    }
    return ModelIdentity(facts, named)


def sampled_digest(model: Any) -> str:
    """Return a cheap digest of settings, adapters in use and a few values of each weight, the same in every process."""
    listing = Listing(model)
    settings = {name: value for name, value in model.config.to_diff_dict().items() if name not in _NO_SETTINGS}
    adapters = [adapter_state(module) for module in listing.modules if hasattr(module, "_active_adapter")]
    weights = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in listing.weights]
    return _sha256(repr((sorted(settings.items()), adapters, weights, listing.read().values)).encode())


def adapter_state(module: nn.Module) -> list[object]:
    """Return what a layer with PEFT's adapters heeds besides weights: numbers and names."""
    names = "_active_adapter", "_disable_adapters", "scaling", "merged_adapters"
    return [getattr(module, name, None) for name in names]


def digest_of_weights(listing: Listing) -> str:
    """Return a digest of all weights, or raise NotPortableError. SHA-256 lets other threads run meanwhile."""
    with ThreadPoolExecutor(_THREADS) as threads:
        digests = [*threads.map(_digest, (tensor for _, tensor in listing.weights))]
    return _sha256("\n".join(digests).encode())


def _digest(tensor: Tensor) -> str:
    """Return a digest of a whole tensor that is the same on every device, or raise NotPortableError."""
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


def code_of(listing: Listing) -> list[str]:
    """Return names of forwards and of what they wrap, but for code of packages whose versions are in the identity."""
    found = set[str]()
    for code, where in [(each.code, each.where) for each in functions_of(listing.modules)]:
        if where:
            raise NotPortableError(
                f"{full_name(code)} hooks or replaces the forward of a {where}, and what it does cannot be named for "
                "another process; take it off"
            )
        while code is not None:
            code = getattr(code, "__func__", code)
            if module_name(code).partition(".")[0] not in _PACKAGES:
                if "<locals>" in name_of(code):
                    raise NotPortableError(
                        f"{full_name(code)} computes a forward, and is defined inside another function, so that it "
                        "cannot be named for another process"
                    )
                try:
                    source = Path(inspect.getfile(code)).read_bytes()
                except (OSError, TypeError) as error:
                    raise NotPortableError(f"the source of {full_name(code)} cannot be read: {error}") from error
                found.add(f"{name_of(code)} {_sha256(source)}")
            code = getattr(code, "__wrapped__", None)
    return sorted(found)


def _version(package: str) -> str:
    return importlib.metadata.version(package).partition("+")[0]  # the version without the name of a build


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
