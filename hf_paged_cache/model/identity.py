"""What a model is, told so that it means the same in another process and on another machine.

`Conditioning.digest` says whether a model is still as it was a moment ago: it counts writes and numbers functions, which mean
nothing elsewhere. An identity has names, values, shapes and versions alone, and costs a pass over all weights. What cannot be
named so has no identity: its keys and values stay in their process.
"""

import hashlib
import importlib.metadata
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import NotPortableError
from ..kv.transfers import read_bytes
from ..tiers.saved_file import facts_digest
from .fingerprint import Listing, plain_tensors
from .rope import RopeRegime

_CHUNK_BYTES = 2**26  # of a device's weights that are on the host at a time
_THREADS = 4  # that hash; SHA-256 lets others run meanwhile
_NUM_SAMPLED = 8  # values of a weight, at most
_NO_SETTINGS = {"_name_or_path", "transformers_version", "name_or_path"}
_PACKAGES = ("torch", "transformers")  # whose versions are part of an identity, so that their code need not be


class ModelIdentity(NamedTuple):
    """All that keys and values depend on besides tokens, as text.

    Attributes:
        facts: name -> what it is. Two models with equal facts compute the same.
        settings: of the config, name -> value; `facts["settings"]` is a digest of them.
    """

    facts: Mapping[str, str]
    settings: Mapping[str, str]

    @property
    def digest(self) -> bytes:
        """32 bytes: of the facts."""
        return facts_digest(self.facts)

    def why_other(self, facts: Mapping[str, str], settings: Mapping[str, str]) -> str | None:
        """What another model has otherwise, in one sentence; None: nothing."""
        apart = [name for name in sorted({*self.facts, *facts}) if self.facts.get(name) != facts.get(name)]
        if not apart:
            return None
        told = []
        for name in apart:
            if name == "settings":
                other = sorted(
                    key for key in {*settings, *self.settings} if settings.get(key) != self.settings.get(key)
                )
                told += [f"{key} is {settings.get(key)}, here {self.settings.get(key)}" for key in other[:3]]
            elif name in _DIGESTS:
                told.append(f"other {_DIGESTS[name]}")
            else:
                told.append(f"{name} is {facts.get(name)}, here {self.facts.get(name)}")
        return "it was computed by another model: " + "; ".join(told)


_DIGESTS = {
    "weights": "weights",
    "modules": "modules or shapes",
    "rope": "rotary frequencies",
    "code": "code of its own",
}


def identify(
    listing: Listing,
    rope: RopeRegime,
    functions: Iterable[tuple[nn.Module | None, Any]],
    settings: Sequence[tuple[str, object]],
    state: object,
    weights_digest: str,
) -> ModelIdentity:
    """Tell what a model is.

    Args:
        functions: those that may change what a module computes: (module, hook or replaced forward), and (None, forward of a
            class).
        settings: of its config.
        state: of adapters and autocast, numbers and names alone.
        weights_digest: see `digest_of_weights`.

    Raises:
        NotPortableError: a hook, a forward that is a closure, or weights on disk: nobody could name them elsewhere.
    """
    require_readable(listing)
    code: list[str] = []
    for module, function in functions:
        if module is not None:
            raise NotPortableError(
                f"{_full_name(function)} hooks or replaces the forward of a {type(module).__name__}, and what it does cannot "
                "be named for another process; take it off"
            )
        code += _code_of(function)
    names = [type(module).__qualname__ for module in listing.modules]
    weights = [weight.tensor for weight in listing.weights]
    shapes = [f"{weight.key}{tuple(weight.tensor.shape)}{weight.tensor.dtype}" for weight in listing.weights]
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for frequencies in rope.static():
        by_kind.setdefault((torch.device("cpu"), frequencies.dtype), []).append(frequencies.cpu())
    values = read_bytes(by_kind) if by_kind else b""
    named = {name: repr(value) for name, value in settings}
    first = type(listing.modules[0])
    facts = {
        "model": f"{first.__module__.rpartition('.')[2]}.{first.__qualname__}",
        "dtype": ", ".join(sorted({str(weight.dtype) for weight in weights if weight.is_floating_point()})),
        "modules": _sha256("\n".join([*names, *shapes]).encode()),
        "weights": weights_digest,
        "rope": _sha256(values + rope.scales()),
        "settings": _sha256(json.dumps(named, sort_keys=True).encode()),
        "adapters and autocast": repr(state),
        "code": _sha256("\n".join(sorted(set(code))).encode()),
        "transformers": _version("transformers"),
        "torch": _version("torch"),
    }
    return ModelIdentity(facts, named)


def sampled_digest(model: Any) -> str:
    """Of settings, adapters in use and a few values of each weight, the same in every process: 64 hexadecimal digits.

    Cheap, and so no proof: a model of which a few values have changed may have the same.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.config.to_diff_dict().items()):
        if name not in _NO_SETTINGS:
            digest.update(f"{name} {value!r}".encode())
    for name, module in model.named_modules():
        if hasattr(module, "_active_adapter"):
            digest.update(f"{name} {adapter_state(module)}".encode())
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        if weight.numel() and weight.device.type != "meta":
            flat = weight.detach().flatten()
            values = flat[:: -(-len(flat) // _NUM_SAMPLED)].cpu().contiguous()
            digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def adapter_state(module: nn.Module) -> list[object]:
    """What a layer with PEFT's adapters heeds besides weights: numbers and names."""
    return [
        getattr(module, name, None) for name in ("_active_adapter", "_disable_adapters", "scaling", "merged_adapters")
    ]


def require_readable(listing: Listing) -> None:
    """Raises NotPortableError where weights lie where their values cannot be read."""
    if listing.files or listing.unwatched is not None:
        raise NotPortableError("weights of this model are offloaded to files, or where they cannot be read")


def digest_of_weights(weights: Iterable[Tensor]) -> str:
    """SHA-256 over the digests of all tensors, with shape and dtype; the same on every device.  Cost: reads all of them."""
    with ThreadPoolExecutor(_THREADS) as threads:
        digests = list(threads.map(_digest, weights))
    return _sha256("\n".join(digests).encode())


def _digest(tensor: Tensor) -> str:
    found = hashlib.sha256(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
    for part in plain_tensors(tensor):
        if part.layout != torch.strided or part.device.type == "meta":
            raise NotPortableError(
                f"a weight of this model has no values that can be read ({part.layout}, {part.device})"
            )
        flat = part.detach().contiguous().view(-1)
        step = max(1, _CHUNK_BYTES // flat.element_size())
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step].cpu()
            found.update(piece.view(torch.uint8).numpy().data)
    return found.hexdigest()


def _code_of(function: Any) -> Iterator[str]:
    """What names the code of a class's forward, and of what it wraps: nothing where the version of a package does.

    Raises:
        NotPortableError: it is a closure, or its source cannot be read.
    """
    while function is not None:
        function = getattr(function, "__func__", function)
        module = getattr(function, "__globals__", {}).get("__name__", getattr(function, "__module__", "") or "")
        if module.partition(".")[0] not in _PACKAGES:
            if "<locals>" in getattr(function, "__qualname__", "<locals>"):
                raise NotPortableError(
                    f"{_full_name(function)} computes a forward, and is defined inside another function, so that it cannot be "
                    "named for another process"
                )
            try:
                source = Path(inspect.getfile(function)).read_bytes()
            except (OSError, TypeError) as error:
                raise NotPortableError(f"the source of {_full_name(function)} cannot be read: {error}") from error
            yield f"{function.__qualname__} {_sha256(source)}"
        function = getattr(function, "__wrapped__", None)


def _full_name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _version(package: str) -> str:
    return importlib.metadata.version(package).partition("+")[0]  # without the name of a build


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
