"""Computes one digest of all that keys and values depend on besides tokens: weights, hooks, adapters, rope, autocast.

The digest is part of each row's root. When it changes, blocks that were computed before are not found, so nobody has to
reset a cache.
"""

import logging
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count, repeat
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.nn.modules import module as everywhere

from ..blocks import root_hash
from ..blocks.roots import Roots
from ..blocks.sight import Sight
from ..errors import NotPortableError
from ..locks import new_lock
from .distributed import rank_groups, world
from .fingerprint import NOT_LISTED, REPLACED, Listing, WeightFingerprint
from .identity import ModelIdentity, adapter_state, digest_of_weights, identify, readable_weights
from .rope import RopeRegime
from .state_traits import NO_TRAITS, StateTraits, read_state_traits
from .support import attention_of, cache_layers, is_foreign, sights_of

logger = logging.getLogger("hf_paged_cache")

# Hooks and replaced forwards of these packages do not change what a layer computes: they move tensors or record. From
# accelerate only hooks count, since its mixed precision replaces a forward, too. What PEFT's hooks carry is read below.
_NEUTRAL_PACKAGES = ("accelerate.hooks.", "hf_paged_cache.", "peft.", "torch._dynamo.", "transformers.")
# Hooks and replaced forwards of these packages change what a layer computes, but for every token alike, and nobody
# reads what they have seen.
_UNIFORM_PACKAGES = (
    *_NEUTRAL_PACKAGES,
    *("accelerate.", "deepspeed.", "liger_kernel.", "kernels.", "optimum.", "torch.", "trl."),
    *(
        "apex.",
        "causal_conv1d.",
        "einops.",
        "fla.",
        "flash_attn.",
        "mamba_ssm.",
        "timm.",
        "torchaudio.",
        "torchvision.",
        "xformers.",
    ),
    *("awq.", "bitsandbytes.", "compressed_tensors.", "gptqmodel.", "hqq.", "torchao."),
)
_NOISE = ("drop", "jitter", "noise")  # parts of the names of rates that are attributes of modules
# Prefixes of settings that keys and values do not depend on.
_NO_CONDITION = ("output_", "return_", "use_cache", "_output_", "_commit_hash", "_name_or_path", "transformers_version")
OUTPUT_FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")
_MOST_REMEMBERED = 256  # most digests remembered that mean nothing to other processes
_PLAIN = (bool, int, float, str, list, tuple)
_REPLACED = sorted(REPLACED)
_FORWARD = attrgetter("forward")

_Settings = list[tuple[str, object]]  # (name, value) of each setting


class _Look(NamedTuple):
    """`_Look` describes the model as it is now.

    `digest` is the digest of all that follows; `weights` stays the same as long as no weight is written.
    """

    digest: bytes
    weights: tuple[bytes, ...]
    listing: Listing
    functions: list[tuple[int, str, Any]]
    settings: _Settings
    switches: tuple[object, ...]


class Conditioning:
    """`Conditioning` computes the digest of one model, anew for every call, in any thread.

    It holds the model, and never changes it.

    Args:
        model: the model.
        tried: what a trial has shown of the model's states; None for a model without any.
        trusts_hooks: somebody has said that foreign code treats each token alike, whatever its call.

    Attributes:
        trusts_hooks: the argument of that name.
        roots: roots of the rows that were computed under these digests, with which the hashes of blocks begin.
        rope: rotary frequencies of the modules, as of the last digest.
        attention: name of the attention of transformers that the model is set to, as of the last digest.
        outputs: outputs that the config asks for in all calls, as of the last digest.
        state_traits: traits that the trial has shown, joined with those that the modules showed at the last digest.
        is_shared: True if blocks leave this process by themselves, so that digests mean the same in other processes
            where they can. Weights that have changed since they were first read are not read again: what they compute
            stays in this process.
        rank_groups: groups of processes over which the weights are split, as of the last digest; see
            `distributed.rank_groups`.
        foreign_code: code that runs in forwards, and is neither the model's nor that of a library that treats all
            tokens alike, as of the last digest, in words; None: there is none. Such code may heed columns, calls or a
            state of its own.
        own_forward: forward of a module's class that is neither transformers' nor that of such a library, as of the last
            digest, in words; None: there is none. It is the model's, and may change the model from forward to forward.
    """

    def __init__(self, model: Any, tried: StateTraits | None = None, *, trusts_hooks: bool = False) -> None:
        self.model, self.trusts_hooks = model, trusts_hooks
        self.rope = RopeRegime(())
        self.roots = Roots()
        self.is_shared = False
        self.state_traits = tried or NO_TRAITS
        self._tried = tried
        self.attention = self._attention_tried = attention_of(model)
        self._lock = new_lock()  # under it, values are fetched only of weights that have moved
        self._weights = WeightFingerprint(model)
        self.rank_groups = rank_groups(model)
        self._listing = NOT_LISTED  # the attributes below follow from its modules, and from the processes
        self._processes: Any = None  # group of all processes; None where this one is alone
        self._adapters: list[nn.Module] = []
        self._droppers: list[nn.Module] = []
        self._checkpointed: list[nn.Module] = []
        self._configs = _configs(model)
        self._settings = _settings(self._configs)  # as of the last digest
        self.outputs: list[str] = []
        self._peft_hooks: list[tuple[str, dict[str, Any]]] = []
        self._windows: tuple[_Settings | None, dict[int, Sight]] = (None, {})  # settings, and the windows they gave
        self._identifying = new_lock()
        self._identities: dict[bytes, ModelIdentity | None] = {}  # digest -> what it means elsewhere, if anything
        self._weights_read: tuple[tuple[bytes, ...], str] | None = None  # weights when read, digest of their values
        self._told: set[str] = set()
        self._numbers: dict[tuple[int, int], tuple[int, Any]] = {}  # ids of an object -> its number, references to it
        self._next_number = count(1)
        self._num_suspicions = 0
        self.foreign_code: str | None = None
        self.own_forward: str | None = None
        self._numbers_known: list[int] = []  # numbers of the functions that `own_forward` was found among
        self._layer_of_others: str | None = None
        self._weights_of: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()  # digest -> the weights as they were
        # Whether there were hooks, replaced forwards, layers of others, or weights in files, as of the last digest.
        self._runs_foreign_code = False

    def digest(self) -> bytes:
        """Return a digest of all that every row of a forward depends on now.

        Cost: passes over flat lists of modules and tensors, 0.5 to 1.2 ms for 290 weights on a CPU, as far as its
        caches have the lists; one wait for each accelerator. Where blocks are shared, the first digest reads all
        weights.
        """
        look = self._look()
        self._weights_of[look.digest] = look.weights
        if len(self._weights_of) > _MOST_REMEMBERED:
            self._weights_of.popitem(last=False)
        if self.is_shared and look.digest not in self._identities:
            self._share(look)
        identity = self._identities.get(look.digest) if self.is_shared else None
        return look.digest if identity is None else identity.digest

    def shared_identities(self) -> list[ModelIdentity]:
        """Return the identities that rows were computed under."""
        return [identity for identity in [*self._identities.values()] if identity is not None]

    def identity(self) -> ModelIdentity:
        """Return what the model is, for other processes; see `identify`.

        It is computed anew where `digest` has changed since the last time.

        Raises:
            NotPortableError: what the model is cannot be described.
        """
        return self._identify(self._look())

    def roots_of_other_weights(self, digest: bytes) -> set[bytes]:
        """Return the roots of rows that were computed under other weights than those of this digest.

        Other adapters do not count as other weights.
        """
        weights = self._weights_of.get(digest)
        return {
            facts.root()
            for facts in self.roots.all()
            if facts.digest != digest and self._weights_of.get(facts.digest) != weights
        }

    def may_change_in_a_forward(self) -> bool:
        """Return whether the model may change in the middle of a forward.

        It may where another thread runs now, where functions that are not the model's are on its modules, or where
        weights are in files. Asked before and after a forward, this costs less than another `digest`, which finds the
        weights' listing gone from the processor's caches. A process that writes into shared memory of this process is
        not looked for.
        """
        if self._runs_foreign_code:
            return True
        return threading.active_count() > 1 and sum(not _draws_progress(thread) for thread in threading.enumerate()) > 1

    def sights(self) -> dict[int, Sight]:
        """Return layer index -> window, for the layers that have one by the model's config as of the last digest."""
        if self._windows[0] != self._settings:
            self._windows = self._settings, sights_of(cache_layers(self.model))
        return self._windows[1]

    def sights_now(self) -> dict[int, Sight]:
        """Return layer index -> window, for the layers that have one by the model's config as it is now."""
        self._configs = _configs(self.model)
        self._settings = _settings(self._configs)
        return self.sights()

    def bypass(self) -> str | None:
        """Return why a forward may neither reuse nor commit blocks, as of the last `digest`; None if it may."""
        for module in self._droppers:
            if module.training:
                return "a dropout or noise is active; call model.eval()"
        for module in self._checkpointed:
            if module.training and module.gradient_checkpointing:  # the forward is refused when it has returned
                return "gradient checkpointing drops the cache; call model.eval(), or disable it"
        embeddings = self.model.get_input_embeddings()
        if getattr(embeddings, "training", False) and getattr(embeddings, "neftune_noise_alpha", None):
            return "NEFTune adds noise to embeddings; call model.eval()"
        if getattr(self._configs[-1], "is_causal", None) is False:
            return "keys and values depend on what follows them (config.is_causal is False)"
        if is_foreign(attention := self.attention) and attention != self._attention_tried:
            return f"the attention {attention!r} was chosen after the cache was built, so nobody has tried it; build another cache"
        for name in self.outputs:
            return f"the config asks for {name}"
        if self.foreign_code is not None and not self.trusts_hooks:
            return f"{self.foreign_code} (trust_hooks=True says that it treats each token alike, whatever its call)"
        if (unwatched := self._listing.unwatched) is not None:
            return f"the weight {unwatched} is kept where changes of it cannot be seen"
        for source, passed in self._peft_hooks:
            if "alora_offsets" in passed:
                return "activated LoRA changes keys and values at an offset of each row"
            if passed.keys() - {"adapter_names"}:
                return f"PEFT passes arguments of the call to its layers ({source})"
        return None

    def adapter_names(self) -> list[str] | None:
        """Return the adapter of each row if PEFT was given `adapter_names`, as of the last `digest`; else None."""
        for _, passed in self._peft_hooks:
            if (names := passed.get("adapter_names")) is not None:
                return list(names)
        return None

    def suspect(self) -> None:
        """Forget all blocks: the model has changed in a way that `digest` does not see."""
        self._num_suspicions += 1

    def _look(self) -> _Look:
        """Look at the model as it is now; numbers of objects mean something in this process alone."""
        with self._lock:
            listing, changed = self._weights.listing()
            processes = world()
            if self._listing is not listing or self._processes != processes:
                self._follow(listing, processes)
            rope, adapters = self.rope, self._adapters
            functions = _functions(listing.modules, changed)
            modules, _, things = zip(*functions, strict=True)
            numbers = self._numbers_of(things)
        self.foreign_code = _foreign_function(listing.modules, functions) or self._layer_of_others
        self._runs_foreign_code = bool(listing.files or self.foreign_code or functions[0][1])
        if numbers != self._numbers_known:
            self.own_forward, self._numbers_known = _own_forward(functions), numbers
        self._peft_hooks = _peft_hooks(self.model, adapters)
        self._configs = configs = _configs(self.model)
        self._settings = settings = _settings(configs)
        self.outputs = outputs_of(configs)
        self.attention = getattr(configs[-1], "_attn_implementation", None)
        on = [*filter(torch.is_autocast_enabled, listing.device_types)]
        autocast = [*zip(on, map(torch.get_autocast_dtype, on), strict=True)]
        switches = [*map(adapter_state, adapters)], autocast
        state = repr((modules, numbers, switches, settings, self._num_suspicions)).encode()
        changes = array("q", [self._weights.num_steps, *listing.versions()])
        files = listing.files_now() if listing.files else b""
        weights = (listing.structure, listing.values(rope.static()), files, changes.tobytes())
        return _Look(root_hash(*weights, rope.scales(), state), weights, listing, functions, settings, switches)

    def _follow(self, listing: Listing, processes: Any) -> None:
        """Follow the model: these are its modules now, and the processes beside this one."""
        modules = listing.modules
        self.rope = RopeRegime(modules)
        if self._tried is not None:
            self.state_traits = read_state_traits(modules).joined(self._tried)
        self._adapters = [module for module in modules if hasattr(module, "_active_adapter")]
        self._droppers = [module for module in modules if _drops(module)]
        self._layer_of_others = _foreign_layer(modules)
        self._checkpointed = [module for module in modules if hasattr(module, "gradient_checkpointing")]
        self.rank_groups = rank_groups(self.model)
        self._listing, self._processes = listing, processes  # set last: after an interrupt all of this is done again

    def _share(self, look: _Look) -> None:
        """Find what a digest means to other processes, or say once why it means nothing there."""
        try:
            if self._num_suspicions:
                raise NotPortableError("a look at a cached block has shown that weights had changed unseen")
            if self._weights_read is not None and self._weights_read[0] != look.weights:
                raise NotPortableError(
                    "weights have changed since they were read; build a new store to share blocks again"
                )
            self._identify(look)
        except NotPortableError as error:
            if len(self._identities) >= _MOST_REMEMBERED:
                self._identities = {digest: known for digest, known in self._identities.items() if known is not None}
            self._identities[look.digest] = None
            if str(error) not in self._told:
                self._told.add(str(error))
                logger.warning("PagedPrefixCache: what is computed now is not shared with other processes: %s", error)

    def _identify(self, look: _Look) -> ModelIdentity:
        with self._identifying:
            found = self._identities.get(look.digest)
            if found is None:
                if self._weights_read is None or self._weights_read[0] != look.weights:
                    self._weights_read = look.weights, digest_of_weights(readable_weights(look.listing))
                read = self._weights_read[1]
                found = identify(look.listing, self.rope, look.functions, look.settings, look.switches, read)
                if self._look().digest != look.digest:
                    raise NotPortableError("the model has changed while its weights were read")
                self._identities[look.digest] = found
            return found

    def _numbers_of(self, things: Iterable[Any]) -> list[int]:
        """Return a number for each object that no other object has, as long as the object lives.

        References to objects are weak: a hook may hold much memory.
        """
        found, numbers = [], self._numbers
        for thing in things:
            # a bound method is another object each time it is read
            function, owner = getattr(thing, "__func__", thing), getattr(thing, "__self__", None)
            key = id(function), id(owner)
            if key not in numbers:
                forget = partial(_forget, numbers, key)
                numbers[key] = next(self._next_number), [_watched(part, forget) for part in (function, owner)]
            found.append(numbers[key][0])
        return found


def _forget(numbers: dict[tuple[int, int], Any], key: tuple[int, int], _: object) -> None:
    numbers.pop(key, None)


def _functions(modules: list[nn.Module], changed: Iterable[int]) -> list[tuple[int, str, Any]]:
    """List every function that may change what a module computes: (number of the module, name of its class, function).

    Functions on a module come first. Then come hooks of all modules, with number -2 and the name of the model's class.
    Last comes the forward of each class, with number -1 and without a name.

    Args:
        changed: numbers of the modules that may have functions on them.
    """
    found: list[tuple[int, str, Any]] = []
    for number in changed:
        module = modules[number]
        attributes = module.__dict__
        hooks = *attributes["_forward_hooks"].values(), *attributes["_forward_pre_hooks"].values()
        for each in (*hooks, *map(attributes.get, _REPLACED)):
            if each is not None and not _is_neutral(each, module):
                found.append((number, type(module).__name__, each))  # noqa: PERF401  # most modules have none
    of_all = *everywhere._global_forward_hooks.values(), *everywhere._global_forward_pre_hooks.values()
    found.extend(zip(repeat(-2), repeat(type(modules[0]).__name__), of_all))
    found.extend(zip(repeat(-1), repeat(""), map(_FORWARD, dict.fromkeys(map(type, modules)))))
    return found


def _foreign_function(modules: list[nn.Module], functions: Iterable[tuple[int, str, Any]]) -> str | None:
    """Name the first of `_functions` whose package is not known to treat all tokens alike; None: there is none."""
    for number, where, function in functions:
        if where and not _is_neutral(function, modules[max(number, 0)], _UNIFORM_PACKAGES):
            name = getattr(function, "__qualname__", type(function).__qualname__)
            return f"{name} ({_module_name(function)}) hooks or replaces the forward of a {where}"
    return None


def _own_forward(functions: Iterable[tuple[int, str, Any]]) -> str | None:
    """Return, in words, the first forward of a class that no library known here has written; None: there is none."""
    for _, where, function in functions:
        if not where and not f"{_module_name(function)}.".startswith(_UNIFORM_PACKAGES):
            return f"{function.__qualname__} ({_module_name(function)})"
    return None


def _foreign_layer(modules: list[nn.Module]) -> str | None:
    """Name the first layer of somebody else that may compute with what nobody watches; None: there is none.

    Such a layer is round other layers, or has no weight.
    """
    own = f"{type(modules[0]).__module__.partition('.')[0]}."
    for module in modules:
        package = f"{type(module).__module__}."
        has_weight = not module._modules and (hasattr(module, "weight") or hasattr(module, "qweight"))
        if not has_weight and not package.startswith((*_UNIFORM_PACKAGES, own)):
            where = "round a layer" if module._modules else "among the layers"
            return f"a {type(module).__qualname__} ({type(module).__module__}) is {where}"
    return None


def _peft_hooks(model: nn.Module, adapters: list[nn.Module]) -> list[tuple[str, dict[str, Any]]]:
    """List the modules that define PEFT's hooks, and the arguments of a call that each hook passes on.

    All layers have the same hooks, so those of one layer are read.
    """
    if "peft" not in sys.modules:
        return []
    return [
        (name, getattr(hook, "keywords", {"": None}))
        for module in (model, *adapters[:1])
        for hook in module._forward_pre_hooks.values()
        if (name := _module_name(hook)).partition(".")[0] == "peft"
    ]


def _draws_progress(thread: threading.Thread) -> bool:
    """Return whether a thread was left behind by a progress bar of tqdm, such as that of loading a model.

    Such a thread redraws bars, and does nothing else.
    """
    return isinstance(thread, getattr(sys.modules.get("tqdm"), "TMonitor", ()))


def _watched(thing: Any, on_end: Callable[[Any], Any]) -> Any:
    """Return a weak reference that calls `on_end` at the end; `thing` itself if its type has no weak references."""
    try:
        return ref(thing, on_end)
    except TypeError:
        return thing


def _drops(module: nn.Module) -> bool:
    """Return whether a module drops values or adds noise in train mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return any(
        isinstance(value, float) and value > 0 and any(part in name for part in _NOISE)
        for name, value in module.__dict__.items()
    )


def _is_neutral(function: Any, module: nn.Module, packages: tuple[str, ...] = _NEUTRAL_PACKAGES) -> bool:
    """Return whether a function is from these packages, as is all that it wraps except the module's forward."""
    while function is not None and getattr(function, "__func__", function) is not type(module).forward:
        if not f"{_module_name(function)}.".startswith(packages):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _module_name(function: Any) -> str:
    """Return the module that defines a function. It is not `__module__`, which `functools.wraps` copies."""
    function = getattr(function, "func", function)  # functools.partial
    function = getattr(function, "__func__", function)
    written = getattr(function, "__globals__", None)
    return str(written["__name__"]) if written is not None else type(function).__module__


def outputs_of(configs: Iterable[Any]) -> list[str]:
    """List the outputs that a model's configs ask for in all calls."""
    return sorted({name for config in configs for name in OUTPUT_FLAGS if getattr(config, name, None)})


def _configs(model: Any) -> tuple[Any, ...]:
    """Return a model's config, followed by its text's config where that is another one."""
    config = model.config
    text = config.get_text_config(decoder=True)
    return (config,) if text is config else (config, text)


def _settings(configs: Iterable[Any]) -> _Settings:
    """List numbers, flags, strings, lists and tuples of configs that forwards may read."""
    settings: _Settings = []
    for config in configs:
        for name, value in config.__dict__.items():
            if isinstance(value, _PLAIN) and not name.startswith(_NO_CONDITION):
                settings.append((name, tuple(value) if isinstance(value, list) else value))  # a list may change
    return settings
