"""Random programs with images: prompts of text and pictures, on a store that is used and full, beside `DynamicCache`.

Their kinds are "images:" and a type of the image zoo. A prompt is a list of parts: texts, and seeds of pictures.
"""

import contextlib
import random
import tempfile
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor

from hf_paged_cache import CacheArgumentError, OutOfBlocksError, PagedPrefixCache, PrefixStore, UnsupportedModelError

from ..conformance.image_zoo import prompt, tiny, tokens
from ..conformance.zoo_settings import VOCABULARY
from ..reference import assert_same, is_tie, run
from .cases import Case
from .playing import Failure, Played
from .tools import TakeFault

PREFIX = "images:"
_PLACEHOLDERS = [*range(VOCABULARY, VOCABULARY + 16)]
TYPES = ("llava", "qwen2_vl", "gemma3", "idefics3", "qwen3_vl", "llava_next")
Row = list[list[int] | int]
_WAYS: tuple[dict[str, Any], ...] = (
    *[{}] * 4,
    {"num_beams": 2},
    {"num_return_sequences": 2, "do_sample": True},
    {"prompt_lookup_num_tokens": 2},
    {"output_hidden_states": True},
)
_ACTIONS = (*["generate"] * 8, *["prefill", "pin", "unpin", "look", "score", "fault", "turn", "turn", "forget"])


class ImageProgram:
    """One program: a store with a few caches, and conversations that go on from each other."""

    def __init__(self, name: str, seed: int, folder: str) -> None:
        self.chance = chance = random.Random(f"{name} {seed}")
        self.model, self.layout = tiny(name)
        size = chance.choice((7, 8, 16, 16))
        most = 6 * (self.layout.num_tokens + 40) // size
        options: dict[str, Any] = {"disk_folder": folder} if chance.random() < 0.3 else {}
        self.store = PrefixStore(self.model, block_size=size, num_blocks=chance.choice((most, 4 * most)), **options)
        self.caches = [
            PagedPrefixCache(
                self.store, on_full="bypass", cache_salt=salt, attention=chance.choice(("paged", "gather"))
            )
            for salt in (None, None, "tenant")
        ]
        self.conversations: list[Row] = [[]]
        self.played = Played(Case(PREFIX + name, seed, "sdpa", "", ()))
        self.did: list[str] = []

    def play(self, num_actions: int = 10) -> Played:
        """Raises whatever an action raises that nothing announces; AssertionError where a result is another one."""
        for number in range(num_actions):
            held, name = self.chance.choice(self.caches), self.chance.choice(_ACTIONS)
            try:
                getattr(self, f"_{name}")(held, number)
                self.store.check()
            except Exception as error:  # noqa: BLE001 (any is what we look for)
                message = f"{type(error).__name__}: {error}; before: {'; '.join(self.did)}"
                self.played.failure = Failure(self.played.case, name, type(error).__name__, message)
                return self.played
        for held in self.caches:
            held.reset()
            held.unpin()
        stats = self.store.stats()
        self.played.reused = stats.reused_tokens
        if stats.num_blocks_in_use:
            self.played.failure = Failure(self.played.case, "end", "leak", f"{stats.num_blocks_in_use} blocks in use")
        return self.played

    def _generate(self, held: PagedPrefixCache, number: int) -> None:
        rows = [self._grown() for _ in range(self.chance.choice((1, 1, 1, 2, 3)))]
        given, how = prompt(self.layout, *rows), self.chance.choice(_WAYS)
        if len(rows) > 1 and "prompt_lookup_num_tokens" in how:
            how = {}
        self.did.append(f"generate {rows} {how}")
        try:
            reference = run(self.model, seed=number, **given, **how)
        except ValueError:  # a draft that was looked up in the prompt may have an image's placeholders
            return
        if self.chance.random() < 0.2:
            with held:
                output = run(self.model, seed=number, **given, **how)
        else:
            output = run(self.model, held, seed=number, **given, **how)
        self._same(reference, output, number, {**given, **how})
        if self.chance.random() < 0.5:
            held.reset()

    def _turn(self, held: PagedPrefixCache, number: int) -> None:
        """The images are passed once; then more tokens, under a mask of all columns."""
        row = self._grown()
        given, length = prompt(self.layout, row), self.chance.randint(1, 9)
        self.did.append(f"turn {row} {length}")
        outputs: list[Any] = []
        for cache in (DynamicCache(config=self.model.config), held):
            first = run(self.model, cache, **given, seed=number, suppress_tokens=_PLACEHOLDERS).sequences
            new = torch.cat([first[:, -1:], torch.tensor([tokens(number, length)])], dim=1)
            mask = torch.ones((1, first.shape[1] + length), dtype=torch.int64)
            outputs.append(run(self.model, cache, input_ids=new, attention_mask=mask))
        assert_same(*outputs)
        self.played.counts["turn"] += 1

    def _prefill(self, held: PagedPrefixCache, number: int) -> None:
        with contextlib.suppress(OutOfBlocksError, UnsupportedModelError):
            held.prefill(self._asked("prefill"))

    def _pin(self, held: PagedPrefixCache, number: int) -> None:
        with contextlib.suppress(OutOfBlocksError, CacheArgumentError):
            held.pin(self._asked("pin"))

    def _unpin(self, held: PagedPrefixCache, number: int) -> None:
        held.unpin(self._asked("unpin"))

    def _look(self, held: PagedPrefixCache, number: int) -> None:
        given = self._asked("look")
        assert held.explain(given).num_known == held.lookup(given).num_tokens

    def _score(self, held: PagedPrefixCache, number: int) -> None:
        given = self._asked("score")
        continuations = [tokens(self.chance.randint(1, 3), self.chance.randint(1, 5)) for _ in range(2)]
        wanted = [self._forced(given, continuation) for continuation in continuations]
        with contextlib.suppress(OutOfBlocksError):
            for score, expected in zip(held.score(given, continuations), wanted, strict=True):
                assert max(abs(a - b) for a, b in zip(score.log_probs, expected, strict=True)) < 1e-3
            self.played.counts["score"] += 1

    def _fault(self, held: PagedPrefixCache, number: int) -> None:
        """A processor raises, and the same prompt is right afterwards."""
        given = self._asked("fault")
        with contextlib.suppress(KeyboardInterrupt):
            processor = TakeFault(self.chance.randint(0, 2), KeyboardInterrupt)
            run(self.model, held, **given, logits_processor=[processor], max_new_tokens=4)
        self._same(run(self.model, **given), run(self.model, held, **given), 0, given)

    def _forget(self, held: PagedPrefixCache, number: int) -> None:
        self.did.append("forget")
        held.reset()
        held.reset_prefix_cache()

    def _same(self, reference: Any, output: Any, seed: int, given: dict[str, Any]) -> None:
        try:
            assert_same(reference, output)
        except AssertionError:
            if not is_tie(self.model, reference, seed, given):
                raise
        self.played.counts["generate"] += 1

    def _forced(self, given: dict[str, torch.Tensor], continuation: list[int]) -> list[float]:
        output = run(self.model, **given, max_new_tokens=len(continuation), logits_processor=[_Force(continuation)])
        return [float(step[0].log_softmax(-1)[id_]) for step, id_ in zip(output.logits, continuation, strict=True)]

    def _asked(self, what: str) -> dict[str, torch.Tensor]:
        row = self._grown()
        self.did.append(f"{what} {row}")
        return prompt(self.layout, row)

    def _grown(self) -> Row:
        """A conversation that goes on from one that was had, or from its middle."""
        chance = self.chance
        before = chance.choice(self.conversations)
        row: Row = []
        for part in [*before[: chance.randint(0, len(before))], *self._parts()]:
            if not isinstance(part, int):
                row.append(part)
            elif sum(isinstance(each, int) for each in row) < 3:  # some models take images side by side for one
                row += [part, tokens(9, 2)]
        row.append(tokens(chance.randint(1, 3), chance.randint(1, 20)))
        self.conversations.append(row)
        return row

    def _parts(self) -> Row:
        chance = self.chance
        return [
            chance.randint(1, 3)
            if chance.random() < 0.5
            else tokens(chance.randint(1, 3), chance.choice((1, 5, 11, 16)))
            for _ in range(chance.randint(0, 3))
        ]


class _Force(LogitsProcessor):
    """Only these tokens are generated."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = iter(ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -1e9)
        forced[:, next(self.ids)] = 0
        return forced


def play_images(kind: str, seed: int) -> Played:
    """Play the program of a kind and a seed."""
    with tempfile.TemporaryDirectory() as folder:
        return ImageProgram(kind.removeprefix(PREFIX), seed, folder).play()
