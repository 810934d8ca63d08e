"""The tiny models to play with: the conformance zoo's, of every type that the library takes."""

import functools

from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache, UnsupportedModelError
from tests.conformance import zoo, zoo_settings

VOCABULARY = zoo_settings.VOCABULARY
PAD, END = 0, 2
# All of them; "kind@variant" is the model type `kind` with other options.
KINDS = sorted({*zoo.model_types(), *zoo.VARIANTS} - {*zoo_settings.CANNOT_BUILD})


def build(kind: str, seed: int = 0, attention: str = "eager") -> PreTrainedModel:
    """A model of `kind` whose weights follow from `seed`."""
    model = zoo.build(kind, seed)
    zoo.draw_biases(model, seed)
    model.set_attn_implementation(attention)
    model.generation_config.eos_token_id = END
    model.config.use_cache = model.generation_config.use_cache = True  # which MPT's own says no to
    return model


@functools.cache
def attentions_of(kind: str) -> tuple[str, ...]:
    """The attention implementations of `kind` that can be played.

    Raises:
        UnsupportedModelError: there is none, and why.
    """
    found, why = [], ""
    for attention in ("eager", "sdpa"):
        try:
            PagedPrefixCache(build(kind, attention=attention)).detach()
            found.append(attention)
        except (UnsupportedModelError, ValueError) as error:
            why = why or str(error)
    if not found:
        raise UnsupportedModelError(why)
    return tuple(found)
