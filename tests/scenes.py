"""Scenes: a few calls of one user, played with the cache that transformers makes and with ours.

Each call that reuses must fail once zeros are in place of what it reuses: else the comparison would see nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hf_paged_cache import PagedPrefixCache, PrefixStore

from .reference import assert_same, is_same, run, zero_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel


def play(scene: Callable[[Player], None], model: PreTrainedModel, *, zeroes: bool = True) -> None:
    """Play a scene, and again for each of its hits with zeros in place of what it reuses; in the end on a pool of one
    block.

    Args:
        zeroes: False: without those with zeros, where another play of the scene has them.
    """
    references: list[Any] = []
    whole = Player(model, references)
    scene(whole)
    for number in range(whole.num_hits if zeroes else 0):
        with pytest.raises(_BlindEnoughError):
            scene(Player(model, references, zeroed_hit=number))
    scene(TightPlayer(model, references))


class _BlindEnoughError(Exception):
    """The call that was to be seen failing has failed."""


class Player:
    """Plays the calls of a scene with both caches; the references are computed once for all plays.

    Args:
        zeroed_hit: number of the hit before which all blocks are zeroed; its check must fail, and the play ends there.
    """

    def __init__(self, model: PreTrainedModel, references: list[Any], zeroed_hit: int | None = None) -> None:
        self.model = model
        self.references = references
        self.zeroed_hit = zeroed_hit
        self.num_hits = 0
        self.reuses = True
        self._num_calls = 0
        self.build()

    def build(self, **sizes: int) -> None:
        """Another store, and a cache on it."""
        self.store = PrefixStore(self.model, **sizes)
        self.other_cache()

    def other_cache(self) -> None:
        self.cache = PagedPrefixCache(self.store)

    @property
    def takes_positions(self) -> bool:
        return self.store.argument_reader.takes_positions

    def call(
        self,
        *,
        reused: int | None = None,
        at_least: int | None = None,
        whole_prompt: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> Any:
        """One call that may, by the numbers given, reuse tokens.

        Args:
            reused, at_least: tokens of prompts that were not computed for their row: there before, or another row's.
            whole_prompt: what the reference gets, where ours is given only new tokens.
        """
        if self._num_calls == len(self.references):
            self.references.append(self.refer({**arguments, **(whole_prompt or {})}))
        reference = self.references[self._num_calls]
        self._num_calls += 1
        output = run(self.model, self.cache, **arguments)
        self.cache.check()
        if self.zeroed_hit is not None and self.num_hits > self.zeroed_hit:
            assert not is_same(reference, output), "the check does not see that what was reused is zeros"
            raise _BlindEnoughError
        assert_same(reference, output)
        counts = self.cache.last_call
        if reused is not None:
            assert counts.reused_tokens + counts.shared_tokens == reused, counts
        if at_least is not None:
            assert counts.reused_tokens + counts.shared_tokens >= at_least, counts
        return output

    def refer(self, arguments: dict[str, Any]) -> Any:
        """What the cache that transformers makes gives."""
        return run(self.model, **arguments)

    def whole(self, **arguments: Any) -> Any:
        """A call that computes all of a known prompt."""
        return self.call(**arguments)

    def hit(self, **arguments: Any) -> Any:
        """A call that reuses: it must fail with zeroed blocks."""
        self.num_hits += 1
        if self.zeroed_hit == self.num_hits - 1:
            zero_blocks(self.store)
        return self.call(**arguments)


class TightPlayer(Player):
    """Plays the calls of a scene on a pool of one block: hardly anything is kept, and what is reused of the call before
    is right.
    """

    def __init__(self, model: PreTrainedModel, references: list[Any]) -> None:
        super().__init__(model, references)
        self.reuses = False

    def build(self, **sizes: int) -> None:
        super().build(**{**sizes, "num_blocks": 2})

    def call(self, *, reused: int | None = None, at_least: int | None = None, **arguments: Any) -> Any:
        return super().call(**arguments)
