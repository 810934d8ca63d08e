"""Computes one digest of all that keys and values depend on besides tokens: weights, hooks, adapters, rope, autocast.

The digest is part of each row's root. When it changes, blocks that were computed before are not found, so nobody has to
reset a cache.
"""

import sys
import threading
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..blocks import OF_WEIGHTS, Roots, root_hash
from ..locks import new_lock
from ..tiers.saved_file import ModelIdentity
from .distributed import rank_groups
from .foreign_code import Numbers, foreign_layer, full_name, functions_of, passed_by_peft
from .identity import Identities, Look, Settings, adapter_state
from .layers import cache_layers, windows_of
from .rope import RopeRegime
from .support import StateTraits, attention_of, configs_within, is_foreign, read_state_traits
from .weights import Listing, watch_optimizers

_NOISE = ("drop", "jitter", "noise")  # parts of the names of rates that are attributes of modules
# Prefixes of settings that keys and values do not depend on.
_NO_CONDITION = (
    *("output_", "return_", "use_cache", "_output_", "_commit_hash", "_name_or_path", "transformers_version"),
    *("id2label", "label2id"),
)
OUTPUT_FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")
_PLAIN = (bool, int, float, str, list, tuple)


class Fingerprint:
    """`Fingerprint` looks at one model, anew for every call, in any thread. It holds the model, and never changes it.

    Attributes but for `roots` and `is_shared` are as of the last look.

    Args:
        tried: what a trial has shown of the model's states; None for a model without any.
        trusts_hooks: somebody has said that foreign code treats each token alike, whatever its call.

    Attributes:
        roots: roots of the rows that were computed under these digests, with which the hashes of blocks begin.
        is_shared: True if blocks leave this process by themselves, so that digests mean the same in other processes
            where they can. Weights are read once: what they compute after a change stays in this process.
        outputs: outputs that the config asks for in all calls.
        windows: layer index -> window, for the layers that have one by the model's config.
        rank_groups: groups of processes over which the weights are split.
        foreign_code: code in forwards that is neither the model's nor that of a library that treats all tokens alike,
            in words. It may heed columns, calls or a state of its own.
        own_forward: forward of a class that neither transformers nor such a library has written, in words. It is the
            model's, and may change the model from forward to forward.
        adapter_names: the adapter of each row, where PEFT was given `adapter_names`; else None.
    """

    def __init__(self, model: Any, tried: StateTraits | None = None, *, trusts_hooks: bool = False) -> None:
        self.model, self.trusts_hooks, self._tried = model, trusts_hooks, tried
        self.roots, self.is_shared, self.identities = Roots(), False, Identities(self._look)
        self.state_traits = tried or StateTraits()
        self.num_steps = self._num_suspicions = 0
        self._attention_tried = attention_of(model)
        self._numbers = Numbers()
        self._lock = new_lock()  # held while the model is looked at
        self._settings: Settings | None = None
        self._facts: tuple[object, ...] = ()
        self._read_config()
        self._follow(Listing(model))
        self._look()
        watch_optimizers(self)

    def digest(self) -> bytes:
        """Return a digest of all that every row of a forward depends on now.

        Cost: a pass over lists of all weights, and one wait for each accelerator; the first shared one reads weights.
        """
        look = self._look()
        return self.identities.shared_digest(look) if self.is_shared else look.digest

    def identity(self) -> ModelIdentity:
        """Return what the model is now, for other processes, or raise NotPortableError."""
        return self.identities.of(self._look())

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
        for module in self._droppers:
            if module.training:
                return "a dropout or noise is active; call model.eval()"
        for module in self._checkpointed:
            if module.training and module.gradient_checkpointing:  # the forward is refused when it has returned
                return "gradient checkpointing drops the cache; call model.eval(), or disable it"
        if getattr(self._embeddings, "training", False) and getattr(self._embeddings, "neftune_noise_alpha", None):
            return "NEFTune adds noise to embeddings; call model.eval()"
        return self._why_unfit

    def suspect(self) -> None:
        """Forget all blocks: the model has changed in a way that `digest` does not see."""
        self._num_suspicions += 1

    def _look(self) -> Look:
        """Look at the model as it is now; numbers of objects mean something in this process alone."""
        with self._lock:
            if not self.listing.is_as_found():
                self._follow(Listing(self.model, self.listing))
            if self.model.config is not self._config or self._configs != self._configs_read:
                self._read_config()
            listing = self.listing
            on = [*filter(torch.is_autocast_enabled, listing.device_types)]
            switches = [*map(adapter_state, self._adapters)], [*zip(on, map(torch.get_autocast_dtype, on), strict=True)]
            weights = listing.number, listing.values(), self.num_steps, self._num_suspicions
            facts = weights, listing.functions(), listing.scales(), repr(switches), self._settings, self.outputs
            if facts != self._facts:
                self._found = self._look_closely(weights, switches)
                self._facts = facts  # set last: after an interrupt all of this is done again
            return self._found

    def _look_closely(self, weights: tuple[object, ...], switches: tuple[object, ...]) -> Look:
        """Say what the model is, where anything is not as at the last look."""
        listing, settings = self.listing, self._settings or []
        functions = functions_of(listing.modules)
        others = [each for each in functions if each.where]
        self.foreign_code, self.own_forward = self._layer_of_others, None
        for each in reversed([each for each in functions if not each.is_uniform]):  # the first of each kind is named
            if each.where:
                self.foreign_code = f"{full_name(each.code)} hooks or replaces the forward of a {each.where}"
            else:
                self.own_forward = full_name(each.code)
        self._runs_foreign_code = bool(self.foreign_code or others)
        # all layers of PEFT have the same hooks
        self.adapter_names, why = passed_by_peft((self.model, *self._adapters[:1]))
        self._why_unfit = self._why_unfit_now(why)
        numbers = [(each.number, *self._numbers.of(each.code)) for each in functions]
        of_weights = root_hash(repr(weights).encode())[:OF_WEIGHTS]
        of_all = root_hash(of_weights, repr((numbers, listing.scales(), switches, settings)).encode())
        return Look(of_weights + of_all[OF_WEIGHTS:], of_weights, listing, settings, switches)

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

    def _read_config(self) -> None:
        """Read the model's config, that of its text, and the configs and mappings within them."""
        config = self.model.config
        of_text = config.get_text_config(decoder=True)
        configs = [config] if of_text is config else [config, of_text]
        within = configs_within(configs)
        held = [each.__dict__ for _, each in within]
        read: list[Any] = [*map(_copied, held)]
        prefixes = [prefix for prefix, _ in within]
        settings = [*chain.from_iterable(map(_settings, read, prefixes))]
        self._is_causal = getattr(of_text, "is_causal", None) is not False
        self.attention = attention_of(self.model)
        self.outputs = sorted({name for each in configs for name in OUTPUT_FLAGS if getattr(each, name, None)})
        if settings != self._settings:
            self.windows = windows_of(cache_layers(self.model))
            self._settings = settings
        self._config, self._configs, self._configs_read = config, held, read

    def _follow(self, listing: Listing) -> None:
        """Follow the model: these are its modules and weights now."""
        modules = listing.modules
        self.rope = RopeRegime(modules)
        if self._tried is not None:
            self.state_traits = read_state_traits(modules, self._tried)
        self._adapters = [module for module in modules if hasattr(module, "_active_adapter")]
        self._droppers = [module for module in modules if _drops(module)]
        self._layer_of_others = foreign_layer(modules)
        self._checkpointed: list[Any] = [module for module in modules if hasattr(module, "gradient_checkpointing")]
        self._embeddings = self.model.get_input_embeddings()
        self.rank_groups = rank_groups(self.model)
        self.listing = listing  # set last: after an interrupt all of this is done again
        self._facts = ()


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
        isinstance(value, float) and value > 0 and any(part in name for part in _NOISE)
        for name, value in [*module.__dict__.items()]  # another thread may set one meanwhile
    )
