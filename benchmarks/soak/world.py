"""What all workers of an episode share: a model that changes, a store that is too small, prompts that begin alike."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import peft
import torch
from transformers import DynamicCache

from hf_paged_cache import PagedPrefixCache, PrefixStore
from tests.conformance.image_zoo import tiny
from tests.internals import num_blocks_in_use
from tests.reference import batch, run
from tests.tiny_models import build

from .faults import Alarm, Plan

if TYPE_CHECKING:
    from .report import Report
    from .worker import Worker

BLOCK_SIZE = 4
MODELS = ("llama with adapters", "llama", "gpt2", "gemma3", "bloom", "llama with adapters")
PICTURES = "llava"  # the model that is asked about images
SALTS = (None, None, "alice", "bob")
NUM_WEIGHTS = 3  # sets of weights that a model changes between


class Operation(NamedTuple):
    """Something that a worker does.

    All it chooses comes from the seed, so it can be done again, alone or among others.
    """

    worker: int
    name: str
    seed: int


class SoakError(AssertionError):
    """What must not happen has happened."""


class Gate:
    """Calls of all threads run side by side; what changes the model for everybody runs alone, and goes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._num_waiting = 0  # to be alone

    @contextmanager
    def together(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._num_inside >= 0 and not self._num_waiting)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._num_waiting += 1
            self._changed.wait_for(lambda: self._num_inside == 0)
            self._num_waiting -= 1
            self._num_inside = -1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside = 0
                self._changed.notify_all()


class World:
    """One model, its store and the workers, all built from one seed.

    Args:
        seed: of everything in here.
        report: counts what happens.
    """

    def __init__(self, seed: str, report: Report) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.report = report
        self.gate = Gate()
        self.plan = Plan()
        self.alarm = Alarm()
        self.name = rng.choice(MODELS)
        self.model = build(self.name.split()[0], seed=rng.randrange(1000))
        self.has_windows = any(DynamicCache(config=self.model.config).is_sliding)
        self.adapters: list[str | None] = [None]
        self.wrapper: Any = self.model  # PEFT's, where there are adapters
        if self.name.endswith("adapters"):
            self._add_adapters(rng.randrange(1000))
        self.assistant = build("llama", seed=1, num_hidden_layers=1)
        self.weights = [
            [
                values + 0.03 * number * values.roll(1, 0)
                for values in (held.detach() for held in self.model.parameters())
            ]
            for number in range(NUM_WEIGHTS)
        ]
        self.plan.watch(self.model)
        self.num_blocks = rng.choice([60, 120, 250])
        self.store = PrefixStore(self.model, block_size=BLOCK_SIZE, num_blocks=self.num_blocks, trust_hooks=True)
        self.pictures = PrefixStore(tiny(PICTURES)[0], block_size=2 * BLOCK_SIZE, num_blocks=60)
        self.prompts = self._tree(rng)
        self.common = [PagedPrefixCache(self.store), PagedPrefixCache(self.store)]  # of all workers
        self.workers: list[Worker] = []
        # Resets of the store, by worker; they drop the rows of all calls that are over. To append is safe in threads.
        self.resets_begun: list[int] = []
        self.resets_ended: list[int] = []
        self.done: list[Operation] = []  # by all workers, in the order in which they began

    # The model.

    def set_weights(self, number: int, how: str) -> None:
        """Write one of the sets of weights, in one of the ways in which weights are written; the caller is alone."""
        parameters = list(self.model.parameters())
        if how == "by an optimizer":  # and then more or less those values
            step = torch.optim.SGD(parameters, lr=1.0, fused=number == 0)
            for held, values in zip(parameters, self.weights[number], strict=True):
                held.grad = held.detach() - values
            step.step()
            for held in parameters:
                held.grad = None
            return
        with torch.no_grad():
            for held, values in zip(parameters, self.weights[number], strict=True):
                if how == "in place":
                    held.copy_(values)
                else:
                    held.data = values.clone()

    def set_adapter(self, name: str | None) -> None:
        """Activate an adapter, or none; the caller is alone."""
        for module in self.model.modules():
            if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
                module.enable_adapters(name is not None)
                if name is not None:
                    module.set_adapter(name)

    @staticmethod
    def reference(model: Any, **arguments: Any) -> Any:
        """What `generate` gives with transformers' own cache, which no `with cache:` of another thread can replace."""
        return run(model, past_key_values=DynamicCache(config=model.config), **arguments)

    def logits(self, rows: list[list[int]]) -> torch.Tensor:
        """Of every token, by one forward without a cache."""
        inputs = batch(*rows)
        with torch.no_grad():
            logits: torch.Tensor = self.model(**inputs, **self.positions(inputs), use_cache=False).logits
        return logits

    def positions(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`position_ids` where the model takes them."""
        if not self.store.argument_reader.takes_positions:
            return {}
        return {"position_ids": (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)}

    # Its end, and the moments between.

    def check_at_rest(self, rng: random.Random) -> None:
        """Drop all caches: every block must come back, but those pinned. The caller is alone."""
        self.common = []
        for worker in self.workers:
            worker.caches = []
        gc.collect()
        cache = PagedPrefixCache(self.store)
        cache.check()
        in_use, pinned = num_blocks_in_use(self.store), len(self.store.blocks.leases.pinned_blocks())
        if in_use != pinned:
            raise SoakError(
                f"{in_use - pinned} blocks are lost: {in_use} in use, {pinned} pinned, and no cache is left"
            )
        if rng.random() < 0.5:
            for salt in SALTS:
                PagedPrefixCache(self.store, cache_salt=salt).unpin()
            if num_blocks_in_use(self.store):
                raise SoakError(
                    f"{num_blocks_in_use(self.store)} blocks are lost: nothing is pinned, and no cache is left"
                )
        if rng.random() < 0.3:
            self.store.reset_prefix_cache()
        self.report.counts["times at rest"] += 1
        self.common = [cache, PagedPrefixCache(self.store)]

    def close(self) -> None:
        """The last look: nothing may keep the store and its pool when nobody holds them."""
        with self.gate.alone():
            self.check_at_rest(random.Random(self.seed))
        self.report.counts["evictions"] += self.store.blocks.allocator.num_evictions
        self.common, kept = [], weakref.ref(self.store.blocks)
        del self.store, self.model, self.wrapper
        gc.collect()
        if kept() is not None:
            raise SoakError("the store of an episode is over, and still in memory")

    def _add_adapters(self, seed: int) -> None:
        for number, name in enumerate(("default", "other")):
            torch.manual_seed(seed + number)
            targets = ["q_proj", "k_proj", "v_proj", "up_proj"]
            config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets, init_lora_weights=False)
            if number:
                self.wrapper.add_adapter(name, config)
            else:
                self.wrapper = peft.get_peft_model(self.model, config).eval()
            self.adapters.append(name)

    @staticmethod
    def _tree(rng: random.Random) -> list[list[int]]:
        """Prompts of which many begin alike, in whole blocks and within one."""
        prompts = [[rng.randrange(1, 128) for _ in range(rng.randint(1, 9))] for _ in range(5)]
        for prompt in prompts:
            if len(prompts) < 120 and len(prompt) < 30:
                prompts += [[*prompt, *(rng.randrange(1, 128) for _ in range(rng.randint(1, 9)))] for _ in range(3)]
        return prompts
