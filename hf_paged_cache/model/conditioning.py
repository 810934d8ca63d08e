"""What keys and values depend on besides tokens (weights, hooks, adapters, rope, autocast) as one digest.

The digest is part of each row's root. When it changes, blocks of before are not found, so nobody has to reset a cache.
"""

import logging
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.modules import module as everywhere

from ..blocks import root_hash
from ..blocks.roots import Roots
from ..errors import NotPortableError
from ..kv.transfers import read_bytes
from ..locks import new_lock
from .distributed import RankGroup, rank_groups, world
from .fingerprint import Listing, WeightFingerprint
from .identity import ModelIdentity, adapter_state, digest_of_weights, identify, require_readable
from .output_flags import OutputFlags, outputs_of
from .rope import RopeRegime
from .state_traits import NO_TRAITS, StateTraits, read_state_traits
from .support import cache_layers, windows_of

logger = logging.getLogger("hf_paged_cache")

# Hooks and replaced forwards of these packages do not change what a layer computes: they move tensors or record. Of
# accelerate only the hooks, since its mixed precision replaces a forward, too. What PEFT's carry is read below.
_NEUTRAL_PACKAGES = ("accelerate.hooks.", "hf_paged_cache.", "peft.", "torch._dynamo.", "transformers.")
_NOISE = ("drop", "jitter", "noise")  # in the names of rates that are attributes of modules
# Prefixes of settings that keys and values do not depend on.
_NO_CONDITION = ("output_", "return_", "use_cache", "_output_", "_commit_hash", "_name_or_path", "transformers_version")
_MOST_SHARED = 256  # states of a model, remembered
_OF_CLASS, _OF_ALL_MODULES = -1, -2  # in place of a module's number


class Conditioning:
    """The digest of one model, read anew for every call, in any thread. The model is held, never changed.

    Args:
        tried: what a trial has shown of its states; None for a model without any.

    Attributes:
        roots: what the hashes of blocks begin with, for rows that were computed under it.
        is_shared: blocks leave this process by themselves, so digests mean the same in others where they can. Weights that have
            changed since they were read first are not read again: what they compute stays in this process.
    """

    def __init__(self, model: Any, tried: StateTraits | None = None) -> None:
        self.model = model
        self.rope = RopeRegime(())
        self.roots = Roots()
        self.is_shared = False
        self.state_traits = tried or NO_TRAITS  # with what the modules say, as of the last digest
        self._tried = tried
        self._lock = (
            new_lock()
        )  # of what is remembered here; values are fetched under it only of weights that have moved
        self._weights = WeightFingerprint(model)
        self._listing: Listing | None = None  # what is below is of this one
        self._adapters: list[nn.Module] = []
        self._droppers: list[nn.Module] = []
        self._output_flags = OutputFlags(model)
        self._settings: object = None  # of the config, as of the last digest
        self._identifying = new_lock()
        self._identity: tuple[bytes, ModelIdentity] | None = None  # digest, and the identity of then
        self._shared: dict[
            bytes, ModelIdentity | None
        ] = {}  # digest here -> what it means to other processes, if anything
        self._identities: dict[bytes, ModelIdentity] = {}  # digest of an identity -> identity
        self._weights_read: tuple[tuple[bytes, ...], str] | None = (
            None  # weights as they were, and the digest of their values
        )
        self._told: set[str] = set()
        self._numbers: dict[tuple[int, int], tuple[int, Any]] = {}  # ids of objects -> number, references to them
        self._num_numbers = 0
        self._num_suspicions = 0
        self._runs_foreign_code = False  # as of the last digest: hooks, replaced forwards, or weights in files
        self._windows: tuple[object, dict[int, int]] = (None, {})  # settings, and the windows of then
        self._rank_groups: tuple[RankGroup, ...] = ()
        self._ranked: tuple[Listing | None, Any] = (None, None)  # listing and processes that those are of

    def digest(self) -> bytes:
        """What every row of a forward depends on now.

        Cost: passes over flat lists of modules and tensors, 0.9 ms for the 272 weights of SmolLM2 on a CPU; one wait for
        each accelerator. Where blocks are shared, the first one reads all weights.
        """
        digest, weights = self._read()
        if not self.is_shared:
            return digest
        if digest not in self._shared:
            self._share(digest, weights)
        identity = self._shared.get(digest)
        return digest if identity is None else identity.digest

    def shared_identity(self, digest: bytes) -> ModelIdentity | None:
        """What a digest means to other processes; None: nothing."""
        return self._identities.get(digest)

    def shared_identities(self) -> list[ModelIdentity]:
        """Those that rows were computed under."""
        return list(self._identities.values())

    def _share(self, digest: bytes, weights: tuple[bytes, ...]) -> None:
        """Find what a digest means to other processes, or say once why it means nothing there."""
        if len(self._shared) >= _MOST_SHARED:
            self._shared.clear()
        try:
            if self._num_suspicions:
                raise NotPortableError("a look at a cached block has shown that weights had changed unseen")
            if self._weights_read is not None and self._weights_read[0] != weights:
                raise NotPortableError(
                    "weights have changed since they were read; build a new store to share blocks again"
                )
            identity = self.identity()
        except NotPortableError as error:
            self._shared[digest] = None
            if str(error) not in self._told:
                self._told.add(str(error))
                logger.warning("PagedPrefixCache: what is computed now is not shared with other processes: %s", error)
        else:
            self._identities[identity.digest] = identity
            self._shared[digest] = identity

    def _read(self) -> tuple[bytes, tuple[bytes, ...]]:
        """The digest as it is counted in this process; and what is equal as long as no weight is written."""
        with self._lock:
            listing = self._weights.listing()
            if self._listing is not listing:
                self._adapters = [module for module in listing.modules if hasattr(module, "_active_adapter")]
                self._droppers = [module for module in listing.modules if _drops(module)]
                self.rope = RopeRegime(listing.modules)
                self._output_flags.follow(listing.modules)
                if self._tried is not None:
                    self.state_traits = read_state_traits(listing.modules).joined(self._tried)
                self._listing = listing
            rope = self.rope
            hooks = [(number, self._number(function)) for number, function in _functions(listing.modules)]
        self._runs_foreign_code = bool(listing.files) or any(number != _OF_CLASS for number, _ in hooks)
        device_types = sorted(listing.device_types | {"cpu"})
        self._settings = settings = _settings(self.model.config)
        state = (hooks, self._switches(device_types), settings, self._num_suspicions)
        changes = array("q", [self._weights.num_steps, *listing.versions()])
        values = dict(listing.samples)
        for frequencies in rope.static():
            kind = frequencies.device, frequencies.dtype
            values[kind] = [*values.get(kind, ()), frequencies]
        weights = (listing.structure, read_bytes(values), listing.files_now(), changes.tobytes())
        return root_hash(*weights, rope.scales(), repr(state).encode()), weights

    def identity(self) -> ModelIdentity:
        """What the model is, for other processes; see `identify`. Computed anew where `digest` is another one than last time.

        Raises:
            NotPortableError: it cannot be told.
        """
        digest, weights = self._read()
        with self._identifying:
            if self._identity is None or self._identity[0] != digest:
                if self._weights_read is None or self._weights_read[0] != weights:
                    tensors = [weight.tensor for weight in self._weights.listing().weights]
                    require_readable(self._weights.listing())
                    self._weights_read = weights, digest_of_weights(tensors)
                listing = self._weights.listing()
                functions = [
                    (
                        listing.modules[number] if number >= 0 else self.model if number == _OF_ALL_MODULES else None,
                        function,
                    )
                    for number, function in _functions(listing.modules)
                ]
                state = self._switches(sorted(listing.device_types | {"cpu"}))
                found = identify(
                    listing, self.rope, functions, _settings(self.model.config), state, self._weights_read[1]
                )
                if self._read()[0] != digest:
                    raise NotPortableError("the model has changed while its weights were read")
                self._identity = digest, found
            return self._identity[1]

    def may_change_in_a_forward(self) -> bool:
        """Whether another thread runs now, or functions that are not the model's are on its modules, or weights are in files.

        Asked before and after a forward, it costs less than another `digest`, which finds the weights' listing gone from the
        processor's caches. A process that writes into shared memory of this one is not looked for.
        """
        if self._runs_foreign_code:
            return True
        threads = set(
            sys._current_frames()
        )  # without the frames, of which one is this: a cycle would keep what they hold
        return len(threads) > 1 and len(threads - _monitors_of_progress()) > 1

    def windows(self) -> dict[int, int]:
        """Layer index -> its window, for the layers that have one by the model's config as it is now."""
        settings = _settings(self.model.config)
        if self._windows[0] != settings:
            self._windows = settings, windows_of(cache_layers(self.model))
        return self._windows[1]

    def changes_with(self, output_flag: str) -> bool:
        """Whether keys and values may be others where a call asks for this output, as of the last `digest`."""
        flags = self._output_flags
        if not flags.is_read(output_flag):
            return False
        # not where a forward more would leave other frequencies behind, nor where other processes would have to run it
        may_try = not self.rope.depends_on_length and not self.rank_groups()
        return flags.changes(output_flag, self._settings, may_try=may_try)

    def bypass(self) -> str | None:
        """Why a forward may neither reuse nor commit blocks, as of the last `digest`; None if it may."""
        if any(module.training for module in self._droppers):
            return "a dropout or noise is active; call model.eval()"
        embeddings = self.model.get_input_embeddings()
        if getattr(embeddings, "training", False) and getattr(embeddings, "neftune_noise_alpha", None):
            return "NEFTune adds noise to embeddings; call model.eval()"
        if getattr(self.model.config.get_text_config(decoder=True), "is_causal", None) is False:
            return "keys and values depend on what follows them (config.is_causal is False)"
        for name in outputs_of(self.model.config):
            if self.changes_with(name):
                return f"keys and values of this model depend on {name}, which its config asks for"
        if self._listing is not None and self._listing.unwatched is not None:
            return f"the weight {self._listing.unwatched} is kept where changes of it cannot be seen"
        for hook, passed in self._peft_hooks():
            if "alora_offsets" in passed:
                return "activated LoRA changes keys and values at an offset of each row"
            if passed.keys() - {"adapter_names"}:
                return f"PEFT passes arguments of the call to its layers ({_module_name(hook)})"
        return None

    def adapter_names(self) -> list[str] | None:
        """The adapter of each row if PEFT was given `adapter_names`, else None."""
        given = (passed.get("adapter_names") for _, passed in self._peft_hooks())
        return next((list(names) for names in given if names is not None), None)

    def rank_groups(self) -> tuple[RankGroup, ...]:
        """The processes over which the weights are split; see `distributed.rank_groups`. Looked for once a listing."""
        processes = world()
        if processes is None:
            return ()
        if self._listing is None or self._ranked[0] is not self._listing or self._ranked[1] != processes:
            self._rank_groups = rank_groups(self.model)
            self._ranked = (self._listing, processes)
        return self._rank_groups

    def suspect(self) -> None:
        """Forget all blocks: the model has changed in a way that `digest` does not see."""
        self._num_suspicions += 1

    def _switches(self, device_types: list[str]) -> tuple[object, ...]:
        """What is switched on: adapters, autocast, and outputs that the config asks for, where the model's code looks at that."""
        return (
            [adapter_state(module) for module in self._adapters],
            [(kind, torch.get_autocast_dtype(kind)) for kind in device_types if torch.is_autocast_enabled(kind)],
            [name for name in outputs_of(self.model.config) if self._output_flags.is_read(name)],
        )

    def _peft_hooks(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """PEFT's hooks, and the arguments of a call that each passes on. All layers have the same, so one is read."""
        for module in (self.model, *self._adapters[:1]):
            for hook in module._forward_pre_hooks.values():
                if f"{_module_name(hook)}.".startswith("peft."):
                    yield hook, getattr(hook, "keywords", {"": None})

    def _number(self, thing: Any) -> int:
        """A number of this object alone. References are weak where they can be: a hook may hold much memory."""
        function = getattr(thing, "__func__", thing)  # a bound method is another object each time it is read
        owner = getattr(thing, "__self__", None)
        key = (id(function), id(owner))
        found = self._numbers.get(key)
        if found is None:
            self._num_numbers += 1
            watched = [_watched(part, partial(self._numbers.pop, key, None)) for part in (function, owner)]
            found = self._numbers[key] = (self._num_numbers, watched)
        return found[0]


def _functions(modules: list[nn.Module]) -> Iterator[tuple[int, Any]]:
    """(module number, function) for every function that may change what a module computes.

    `_OF_CLASS` stands for the forward of a class, `_OF_ALL_MODULES` for hooks of all modules.
    """
    for number, module in enumerate(modules):
        attributes = module.__dict__
        hooks, pre_hooks = attributes["_forward_hooks"], attributes["_forward_pre_hooks"]
        if hooks or pre_hooks or "forward" in attributes:  # few modules have any
            for function in (*hooks.values(), *pre_hooks.values(), attributes.get("forward")):
                if not _is_neutral(function, module):
                    yield number, function
    for kind in dict.fromkeys(type(module) for module in modules):
        yield _OF_CLASS, kind.forward
    for hooks in (everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks):
        for function in hooks.values():
            yield _OF_ALL_MODULES, function


def _monitors_of_progress() -> set[int | None]:
    """The threads that progress bars of tqdm leave behind, such as that of loading a model: they redraw bars, no more."""
    kind = getattr(sys.modules.get("tqdm"), "TMonitor", ())
    return {thread.ident for thread in threading.enumerate() if isinstance(thread, kind)}


def _watched(thing: Any, on_end: Callable[[], Any]) -> Any:
    """A weak reference that calls `on_end` at the end; `thing` itself if its type has no weak references."""
    try:
        return ref(thing, lambda _: on_end())
    except TypeError:
        return thing


def _drops(module: nn.Module) -> bool:
    """Whether a module in train mode drops values or adds noise."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return any(
        isinstance(value, float) and value > 0 and any(part in name for part in _NOISE)
        for name, value in module.__dict__.items()
    )


def _is_neutral(function: Any, module: nn.Module) -> bool:
    """Whether a function, and every function that it wraps except the module's forward, is of a neutral package."""
    while function is not None and getattr(function, "__func__", function) is not type(module).forward:
        if not f"{_module_name(function)}.".startswith(_NEUTRAL_PACKAGES):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _module_name(function: Any) -> str:
    """The module that defines a function. Not `__module__`, which `functools.wraps` copies."""
    function = getattr(function, "func", function)  # functools.partial
    function = getattr(function, "__func__", function)
    written = getattr(function, "__globals__", None)
    return str(written["__name__"]) if written is not None else type(function).__module__


def _settings(config: Any) -> list[tuple[str, object]]:
    """Numbers, flags, strings, lists and tuples of a model's config, and of the text config inside it, that forwards may read."""
    text = config.get_text_config(decoder=True)
    return [
        (name, tuple(value) if isinstance(value, list) else value)  # one may be written into
        for part in ((config,) if text is config else (config, text))
        for name, value in part.__dict__.items()
        if isinstance(value, bool | int | float | str | list | tuple) and not name.startswith(_NO_CONDITION)
    ]
