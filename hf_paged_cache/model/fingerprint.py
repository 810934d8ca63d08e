"""Computes one digest of all that keys and values depend on besides tokens: weights, hooks, adapters, rope, autocast.

The digest is part of each row's root. When it changes, blocks that were computed before are not found, so nobody has to
reset a cache.
"""

import logging
import sys
import threading
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..blocks import OF_WEIGHTS, Roots, Window, root_hash
from ..errors import NotPortableError
from ..locks import new_lock
from ..tiers.saved_file import ModelIdentity
from .foreign_code import Function, foreign_layer, full_name, functions_of, passed_by_peft
from .identity import Look, Settings, adapter_state, code_of, digest_of_weights, identity_of
from .layers import cache_layers, windows_of
from .rope import RopeRegime
from .support import StateTraits, attention_of, is_foreign, read_state_traits
from .weights import Listing, RankGroup, rank_groups, watch_optimizers

logger = logging.getLogger("hf_paged_cache")

_NOISE = ("drop", "jitter", "noise")  # parts of the names of rates that are attributes of modules
# Prefixes of settings that keys and values do not depend on.
_NO_CONDITION = (
    *("output_", "return_", "use_cache", "_output_", "_commit_hash", "_name_or_path", "transformers_version"),
    *("id2label", "label2id"),
)
OUTPUT_FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")
_PLAIN = (bool, int, float, str, list, tuple)
_TRAINS = attrgetter("training")


class Fingerprint:
    """`Fingerprint` looks at one model, anew for every call, in any thread. It never changes the model."""

    # as of the last look
    windows: dict[int, Window]  # layer index -> window, for the layers that have one by the model's config
    outputs: list[str]  # outputs that the config asks for in all calls
    rank_groups: tuple[RankGroup, ...]  # groups of processes over which the weights are split
    # code in forwards that is neither the model's nor that of a library that treats all tokens alike, in words: it may
    # heed columns, calls or a state of its own
    foreign_code: str | None
    # forward of a class that neither transformers nor such a library has written, in words: it is the model's, and may
    # change the model from forward to forward
    own_forward: str | None
    adapter_names: list[str] | None  # the adapter of each row, where PEFT was given `adapter_names`

    def __init__(self, model: Any, tried: StateTraits | None = None, *, trusts_hooks: bool = False) -> None:
        self.model, self.trusts_hooks = model, trusts_hooks
        self._tried = tried  # what a trial has shown of the model's states; None for a model without any
        self.state_traits = tried or StateTraits()
        self.roots = Roots()  # of the rows that were computed under these digests
        # True if blocks leave this process by themselves: digests mean the same in other processes where they can.
        # Weights are read once, and what they compute after a change stays in this process.
        self.is_shared = False
        self.num_changes = 0  # that are told: steps of optimizers, and what a check of blocks has found
        self._attention_tried = attention_of(model)
        self._lock = new_lock()  # held while the model is looked at
        self._naming = new_lock()  # held while weights are read
        self._known: dict[bytes, ModelIdentity] = {}
        self._weights_read = b"", ""  # part of a digest of weights, digest of their values
        self._told = set[str]()
        self._settings: Settings | None = None
        self._facts: tuple[object, ...] = ()
        self._weights: tuple[object, ...] = ()
        self._forwards: list[Function] = []
        self._num_weights = self._num_forwards = 0  # how often they have changed
        self._read_config()
        self._follow()
        self._look()
        watch_optimizers(self)

    def digest(self) -> bytes:
        """Return a digest of all that every row of a forward depends on now.

        Cost: a pass over lists of all weights, and one wait for each accelerator; the first shared one reads weights.
        """
        look = self._look()
        if not self.is_shared:
            return look.digest
        try:
            if self._weights_read[0] not in (b"", look.of_weights):
                raise NotPortableError(
                    "weights have changed since they were read; build a new store to share blocks again"
                )
            return self._identity_of(look).digest
        except NotPortableError as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                logger.warning("PagedPrefixCache: what is computed now is not shared with other processes: %s", error)
            return look.digest

    def identity(self) -> ModelIdentity:
        """Return what the model is now, for other processes, or raise NotPortableError."""
        return self._identity_of(self._look())

    def identities(self) -> list[ModelIdentity]:
        """Return the identities that rows were computed under."""
        return [*self._known.values()]

    def may_change_in_a_forward(self) -> bool:
        """Return whether the model may change in the middle of a forward.

        It may where another thread runs now, or where functions that are not the model's are on its modules. A process
        that writes into shared memory of this process is not looked for.
        """
        if self._runs_foreign_code:
            return True
        return threading.active_count() > 1 and sum(not _draws_progress(thread) for thread in threading.enumerate()) > 1

    def bypass(self) -> str | None:
        """Return why a forward may neither reuse nor commit blocks, as of the last look; None if it may."""
        for module in filter(_TRAINS, self.listing.modules):
            if _drops(module):
                return "a dropout or noise is active; call model.eval()"
            if getattr(module, "gradient_checkpointing", False):  # the forward is refused when it has returned
                return "gradient checkpointing drops the cache; call model.eval(), or disable it"
        return self._why_unfit

    def _look(self) -> Look:
        """Look at the model as it is now; numbers of changes mean something in this process alone."""
        with self._lock:
            if not self.listing.is_as_found():
                self._follow()
            if self.model.config is not self._config or self._configs != self._configs_read:
                self._read_config()
            listing, reading = self.listing, self.listing.read()
            on = [*filter(torch.is_autocast_enabled, listing.device_types)]
            switches = [*map(adapter_state, self._adapters)], [*zip(on, map(torch.get_autocast_dtype, on), strict=True)]
            weights = reading.values, reading.versions, listing, self.num_changes
            facts = weights, reading.functions, reading.scales, repr(switches), self._settings, self.outputs
            if facts != self._facts:
                if weights != self._weights:
                    self._num_weights += 1
                    self._weights = weights
                self._found = self._look_closely(reading.scales, switches)
                self._facts = facts  # set last: after an interrupt all of this is done again
            return self._found

    def _look_closely(self, scales: list[object], switches: tuple[object, ...]) -> Look:
        """Say what the model is, where anything is not as at the last look.

        A hook that is taken off leaves the digest of before, and one that is put on gives another one each time, as
        does each forward that takes another's place.
        """
        listing, settings = self.listing, self._settings or []
        functions = functions_of(listing.modules)
        self.foreign_code, self.own_forward = self._layer_of_others, None
        for each in reversed([each for each in functions if not each.is_uniform]):  # the first of each kind is named
            if each.where:
                self.foreign_code = f"{full_name(each.code)} hooks or replaces the forward of a {each.where}"
            else:
                self.own_forward = full_name(each.code)
        self._runs_foreign_code = self.foreign_code is not None or any(each.where for each in functions)
        # all layers of PEFT have the same hooks
        self.adapter_names, why = passed_by_peft((self.model, *self._adapters[:1]))
        self._why_unfit = self._why_unfit_now(why)
        forwards = [each for each in functions if not each.hook]
        if forwards != self._forwards:
            self._num_forwards += 1
            self._forwards = forwards
        hooks = [(each.module, each.hook) for each in functions if each.hook]
        of_weights = root_hash(str(self._num_weights).encode())[:OF_WEIGHTS]
        of_all = root_hash(of_weights, repr((hooks, self._num_forwards, scales, switches, settings)).encode())
        return Look(of_weights + of_all[OF_WEIGHTS:], of_weights, listing, scales, settings, switches)

    def _why_unfit_now(self, why_by_peft: str | None) -> str | None:
        attention, unwatched = self.attention, self.listing.unwatched
        if not self._is_causal:
            return "keys and values depend on what follows them (config.is_causal is False)"
        if is_foreign(attention) and attention != self._attention_tried:
            return (
                f"the attention {attention!r} was chosen after the cache was built, so nobody has tried it; "
                "build another cache"
            )
        if self.outputs:
            return f"the config asks for {self.outputs[0]}"
        if self.foreign_code is not None and not self.trusts_hooks:
            return f"{self.foreign_code} (trust_hooks=True says that it treats each token alike, whatever its call)"
        if unwatched is not None:
            return f"the weight {unwatched} is kept where changes of it cannot be seen, such as on a disk"
        return why_by_peft

    def _identity_of(self, look: Look) -> ModelIdentity:
        """Return what a model is, or raise NotPortableError: it has a hook or a closure, or changes meanwhile."""
        with self._naming:
            found = self._known.get(look.digest)
            if found is None:
                code = code_of(look.listing)
                if self._weights_read[0] != look.of_weights:
                    self._weights_read = look.of_weights, digest_of_weights(look.listing)
                found = identity_of(look, code, self._weights_read[1])
                if self._look().digest != look.digest:
                    raise NotPortableError("the model has changed while its weights were read")
                self._known[look.digest] = found
            return found

    def _read_config(self) -> None:
        """Read the model's config, that of its text, and the configs and mappings within them."""
        config = self.model.config
        of_text = config.get_text_config(decoder=True)
        configs = [config] if of_text is config else [config, of_text]
        within = [("", each) for each in configs]
        for prefix, each in within:  # and those that join meanwhile
            for name, value in dict(each.__dict__).items():
                if isinstance(value, PreTrainedConfig) and not any(value is known for _, known in within):
                    within.append((f"{prefix}{name}.", value))
        held = [each.__dict__ for _, each in within]
        read: list[Any] = [*map(_copied, held)]
        settings = [*chain.from_iterable(map(_settings, read, [prefix for prefix, _ in within]))]
        self._is_causal = getattr(of_text, "is_causal", None) is not False
        self.attention = attention_of(self.model)
        self.outputs = sorted({name for each in configs for name in OUTPUT_FLAGS if getattr(each, name, None)})
        if settings != self._settings:
            self.windows = windows_of(cache_layers(self.model))
            self._settings = settings
        self._config, self._configs, self._configs_read = config, held, read

    def _follow(self) -> None:
        """Follow the model: it may have other modules and weights than before."""
        listing = Listing(self.model)
        modules = listing.modules
        self.rope = RopeRegime(modules)
        if self._tried is not None:
            self.state_traits = read_state_traits(modules, self._tried)
        self._adapters = [module for module in modules if hasattr(module, "_active_adapter")]
        self._layer_of_others = foreign_layer(modules)
        self.rank_groups = rank_groups(self.model)
        self.listing = listing  # set last: after an interrupt all of this is done again


def _copied(value: Any) -> Any:
    """Return a value that stays as it is now: lists and mappings may change."""
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in dict(value).items()}
    return [*map(_copied, value)] if isinstance(value, list) else value


def _settings(read: dict[Any, Any], prefix: str) -> Settings:
    """Return the numbers, flags, words and lists of a config or mapping that forwards may read."""
    settings: Settings = []
    for name, value in read.items():
        if str(name).startswith(_NO_CONDITION):
            continue
        if isinstance(value, dict):
            settings += _settings(value, f"{prefix}{name}.")
        elif isinstance(value, _PLAIN):
            settings.append((f"{prefix}{name}", tuple(value) if isinstance(value, list) else value))
    return settings


def _draws_progress(thread: threading.Thread) -> bool:
    """Return whether a thread only redraws progress bars, as one that tqdm leaves behind after loading a model."""
    return isinstance(thread, getattr(sys.modules.get("tqdm"), "TMonitor", ()))


def _drops(module: nn.Module) -> bool:
    """Return whether a module drops values or adds noise in train mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return any(
        isinstance(value, int | float) and value is not True and value > 0 and any(part in name for part in _NOISE)
        for name, value in [*module.__dict__.items()]  # another thread may set one meanwhile
    )
