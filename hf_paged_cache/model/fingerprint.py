"""Computes one digest of all that keys and values depend on besides tokens: weights, hooks, adapters, rope, autocast.

The digest is part of each row's root. When it changes, blocks that were computed before are not found, so nobody has to
reset a cache.
"""

import logging
import sys
import threading
from typing import Any

import torch
from torch import nn

from ..blocks import root_hash
from ..blocks.roots import Roots
from ..blocks.window import Window
from ..errors import NotPortableError
from ..locks import new_lock
from ..tiers.saved_file import ModelIdentity
from .distributed import rank_groups, world
from .foreign_code import Numbers, foreign_function, foreign_layer, functions_of, own_forward, peft_hooks
from .identity import Look, Settings, adapter_state, digest_of_weights, identify
from .layers import cache_layers, windows_of
from .rope import RopeRegime
from .support import StateTraits, attention_of, is_foreign, read_state_traits
from .weights import Listing, WeightFingerprint

logger = logging.getLogger("hf_paged_cache")

_NOISE = ("drop", "jitter", "noise")  # parts of the names of rates that are attributes of modules
# Prefixes of settings that keys and values do not depend on.
_NO_CONDITION = ("output_", "return_", "use_cache", "_output_", "_commit_hash", "_name_or_path", "transformers_version")
OUTPUT_FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")
_MOST_REMEMBERED = 256  # most digests whose meaning to other processes is remembered
_PLAIN = (bool, int, float, str, list, tuple)
_OF_WEIGHTS = 16  # first bytes of a digest, which depend on weights alone


class Fingerprint:
    """`Fingerprint` computes the digest of one model, anew for every call, in any thread.

    It holds the model, and never changes it. All attributes but `roots` are as of the last digest.

    Args:
        tried: what a trial has shown of the model's states; None for a model without any.
        trusts_hooks: somebody has said that foreign code treats each token alike, whatever its call.

    Attributes:
        roots: roots of the rows that were computed under these digests, with which the hashes of blocks begin.
        outputs: outputs that the config asks for in all calls.
        is_shared: True if blocks leave this process by themselves, so that digests mean the same in other processes
            where they can. Weights are read once: what they compute after a change stays in this process.
        rank_groups: groups of processes over which the weights are split.
        foreign_code: code in forwards that is neither the model's nor that of a library that treats all tokens alike,
            in words. It may heed columns, calls or a state of its own.
        own_forward: forward of a class that neither transformers nor such a library has written, in words. It is the
            model's, and may change the model from forward to forward.
    """

    def __init__(self, model: Any, tried: StateTraits | None = None, *, trusts_hooks: bool = False) -> None:
        self.model, self.trusts_hooks, self._tried = model, trusts_hooks, tried
        self.roots = Roots()
        self.is_shared = False
        self.state_traits = tried or StateTraits()
        self.attention = self._attention_tried = attention_of(model)
        self.foreign_code: str | None = None
        self.own_forward: str | None = None
        self._peft_hooks: list[tuple[str, dict[str, Any]]] = []
        self._num_suspicions = 0
        self._lock = new_lock()  # under it, values are fetched only of weights that have moved
        self._numbers, self._numbers_known = Numbers(), list[int]()
        self._runs_foreign_code = False  # hooks, replaced forwards, layers of others, or weights in files
        self._windows: tuple[Settings | None, dict[int, Window]] = (None, {})  # settings, and the windows they gave
        self._identifying = new_lock()
        self._identities: dict[bytes, ModelIdentity | None] = {}  # digest -> what it means elsewhere, if anything
        self._weights_read: tuple[bytes, str] | None = None  # part of the digest of weights, digest of their values
        self._told = set[str]()
        self._read_config()
        self._weights = WeightFingerprint(model)
        self._follow(self._weights.listing(), world())

    def digest(self) -> bytes:
        """Return a digest of all that every row of a forward depends on now.

        Cost: 0.4 to 1.2 ms for 290 weights on a CPU, as far as its caches have the lists of them; one wait for each
        accelerator. Where blocks are shared, the first digest reads all weights.
        """
        look = self._look()
        if not self.is_shared:
            return look.digest
        if look.digest not in self._identities:
            self._share(look)
        identity = self._identities.get(look.digest)
        return look.digest if identity is None else identity.digest

    def shared_identities(self) -> list[ModelIdentity]:
        """Return the identities that rows were computed under."""
        return [identity for identity in [*self._identities.values()] if identity is not None]

    def identity(self) -> ModelIdentity:
        """Return what the model is now, for other processes.

        Raises:
            NotPortableError: what the model is cannot be described.
        """
        return self._identify(self._look())

    def roots_of_other_weights(self, digest: bytes) -> set[bytes]:
        """Return the roots of rows that were computed under other weights; none where digests are shared."""
        weights, known = digest[:_OF_WEIGHTS], [] if self.is_shared else self.roots.all()
        return {facts.root() for facts in known if facts.digest[:_OF_WEIGHTS] != weights}

    def may_change_in_a_forward(self) -> bool:
        """Return whether the model may change in the middle of a forward.

        It may where another thread runs now, where functions that are not the model's are on its modules, or where
        weights are in files. This costs less than another `digest`. A process that writes into shared memory of this
        process is not looked for.
        """
        if self._runs_foreign_code:
            return True
        return threading.active_count() > 1 and sum(not _draws_progress(thread) for thread in threading.enumerate()) > 1

    @property
    def windows(self) -> dict[int, Window]:
        """Return layer index -> window, for the layers that have one by the model's config as of the last digest."""
        if self._windows[0] != self._settings:
            self._windows = self._settings, windows_of(cache_layers(self.model))
        return self._windows[1]

    def windows_now(self) -> dict[int, Window]:
        """Return layer index -> window, for the layers that have one by the model's config as it is now."""
        self._read_config()
        return self.windows

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
        if not self._is_causal:
            return "keys and values depend on what follows them (config.is_causal is False)"
        if is_foreign(attention := self.attention) and attention != self._attention_tried:
            return (
                f"the attention {attention!r} was chosen after the cache was built, so nobody has tried it; "
                "build another cache"
            )
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

    @property
    def adapter_names(self) -> list[str] | None:
        """Return the adapter of each row if PEFT was given `adapter_names`, as of the last `digest`; else None."""
        for _, passed in self._peft_hooks:
            if (names := passed.get("adapter_names")) is not None:
                return list(names)
        return None

    def suspect(self) -> None:
        """Forget all blocks: the model has changed in a way that `digest` does not see."""
        self._num_suspicions += 1

    def _look(self) -> Look:
        """Look at the model as it is now; numbers of objects mean something in this process alone."""
        with self._lock:
            listing, processes = self._weights.listing(), world()
            if self._listing is not listing or self._processes != processes:
                self._follow(listing, processes)
            rope, adapters = self.rope, self._adapters
            functions = functions_of(listing)
            modules, _, called = zip(*functions, strict=True)
            numbers = self._numbers.of(called)
        self.foreign_code = foreign_function(listing.modules, functions) or self._layer_of_others
        self._runs_foreign_code = bool(listing.files or self.foreign_code or functions[0][1])
        if numbers != self._numbers_known:
            self.own_forward, self._numbers_known = own_forward(functions), numbers
        self._peft_hooks = peft_hooks((self.model, *adapters[:1]))  # all layers have the same hooks
        settings = self._read_config()
        on = [*filter(torch.is_autocast_enabled, listing.device_types)]
        autocast = [*zip(on, map(torch.get_autocast_dtype, on), strict=True)]
        switches = [*map(adapter_state, adapters)], autocast
        state = repr((modules, numbers, switches, settings, self._num_suspicions)).encode()
        weights = root_hash(*listing.state(rope.static()), str(self._weights.num_steps).encode())
        digest = weights[:_OF_WEIGHTS] + root_hash(rope.scales(), state)[_OF_WEIGHTS:]
        return Look(digest, listing, functions, settings, switches)

    def _read_config(self) -> Settings:
        """Read the model's config and that of its text; return what forwards may read: numbers, flags, words, lists."""
        config = self.model.config
        of_text = config.get_text_config(decoder=True)
        configs = (config,) if of_text is config else (config, of_text)
        settings: Settings = [
            (name, tuple(value) if isinstance(value, list) else value)  # a list may change
            for each in configs
            for name, value in each.__dict__.items()
            if isinstance(value, _PLAIN) and not name.startswith(_NO_CONDITION)
        ]
        self._settings = settings
        self._is_causal = getattr(of_text, "is_causal", None) is not False
        self.attention = getattr(of_text, "_attn_implementation", None)
        self.outputs = sorted({name for each in configs for name in OUTPUT_FLAGS if getattr(each, name, None)})
        return settings

    def _follow(self, listing: Listing, processes: Any) -> None:
        """Follow the model: these are its modules now, and the processes beside this one; None: it is alone."""
        modules = listing.modules
        self.rope = RopeRegime(modules)
        if self._tried is not None:
            self.state_traits = read_state_traits(modules, self._tried)
        self._adapters = [module for module in modules if hasattr(module, "_active_adapter")]
        self._droppers = [module for module in modules if _drops(module)]
        self._layer_of_others = foreign_layer(modules)
        self._checkpointed: list[Any] = [module for module in modules if hasattr(module, "gradient_checkpointing")]
        self.rank_groups = rank_groups(self.model)
        self._listing, self._processes = listing, processes  # set last: after an interrupt all of this is done again

    def _share(self, look: Look) -> None:
        """Find what a digest means to other processes, or say once why it means nothing there."""
        try:
            if self._num_suspicions:
                raise NotPortableError("a look at a cached block has shown that weights had changed unseen")
            if self._weights_read is not None and self._weights_read[0] != look.digest[:_OF_WEIGHTS]:
                raise NotPortableError(
                    "weights have changed since they were read; build a new store to share blocks again"
                )
            self._identify(look)
        except NotPortableError as error:
            self._remember(look, None)
            if str(error) not in self._told:
                self._told.add(str(error))
                logger.warning("PagedPrefixCache: what is computed now is not shared with other processes: %s", error)

    def _identify(self, look: Look) -> ModelIdentity:
        with self._identifying:
            found = self._identities.get(look.digest)
            if found is None:
                weights = look.digest[:_OF_WEIGHTS]
                if self._weights_read is None or self._weights_read[0] != weights:
                    self._weights_read = weights, digest_of_weights(weight.tensor for weight in look.listing.weights)
                found = identify(look, self.rope, self._weights_read[1])
                if self._look().digest != look.digest:
                    raise NotPortableError("the model has changed while its weights were read")
                self._remember(look, found)
            return found

    def _remember(self, look: Look, identity: ModelIdentity | None) -> None:
        if len(self._identities) >= _MOST_REMEMBERED:
            self._identities.pop(next(iter(self._identities)), None)
        self._identities[look.digest] = identity


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
