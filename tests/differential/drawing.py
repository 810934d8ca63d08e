"""Draws cases and actions; an action depends on what the reference has answered so far, never on ours."""

import dataclasses
import random
import re
from collections.abc import Sequence

from transformers import DynamicCache, PreTrainedModel

from tests.differential.calls import Calls
from tests.differential.cases import Action, Case, Rows, Slot
from tests.differential.prompts import Prompts

# Kernels of these solve for 64 tokens at once, and a prompt continues from multiples of that alone.
IN_CHUNKS = re.compile("qwen3_next|qwen3_5|qwen4_exp|olmo_hybrid|kimi_linear")
LONGER = 60


def draw_case(kind: str, seed: int, attentions: Sequence[str]) -> tuple[Case, random.Random]:
    """The setting of a case; its actions are drawn while it is played."""
    rng = random.Random(f"{kind} {seed}")
    block_size = rng.choice([1, 2, 3, 4, 4, 5, 7, 8, 16, 16])
    num_blocks = None
    if rng.random() < 0.45:
        tokens = rng.choice([24, 48, 80, 160])
        num_blocks = max(3, tokens // block_size + 1)
    elif rng.random() < 0.2:
        num_blocks = 4000 // block_size
    options = [f"block_size={block_size}"]
    if num_blocks is not None:
        options.append(f"num_blocks={num_blocks}")
    elif rng.random() < 0.3:
        options.append(f"max_bytes={rng.choice([300_000, 1_000_000, 5_000_000])}")
    if rng.random() < 0.25:
        options.append("disk_folder=folder + '/tier'")
    caches = []
    salts = rng.random() < 0.2
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        more = []
        if rng.random() < 0.25:
            more.append("attention='gather'")
        if salts and rng.random() < 0.7:
            more.append(f"cache_salt={rng.choice(['one', 'two'])!r}")
        if rng.random() < 0.25:
            more.append("on_full='bypass'")
        caches.append(", ".join(more))
    case = Case(
        kind=kind,
        seed=rng.randrange(1000),
        attention=rng.choice(attentions),
        store=", ".join(options),
        caches=tuple(caches),
        num_blocks=num_blocks,
        block_size=block_size,
        is_small=rng.random() < 0.6,
    )
    return case, rng


class Draw:
    """The next action, given what the rows of each cache are now."""

    def __init__(
        self, case: Case, rng: random.Random, slots: list[Slot], model: PreTrainedModel, attentions: Sequence[str]
    ) -> None:
        self.rng = rng
        self.case = case
        self.weights = [name for name, value in model.named_parameters() if value.dim() > 1]
        self.attentions = attentions
        self.prompts = Prompts(rng, case.block_size, longer=LONGER if IN_CHUNKS.match(case.kind) else 0)
        self.calls = Calls(
            rng,
            self.prompts,
            case.block_size,
            has_states=any(hasattr(layer, "conv_states") for layer in DynamicCache(config=model.config).layers),
        )
        self.slots = slots

    def action(self) -> Action:
        slot = self.rng.randrange(len(self.slots))
        names = ["generate"] * 11 + ["forward"] * 3 + ["going_on"] * 4 + ["rows"] * 2 + ["crop"] * 2
        names += ["reset"] * 2 + ["forget", "forget_all", "prefill", "prefill", "pin", "unpin", "score", "score"]
        names += [
            "copied",
            "saved",
            "weight",
            "attention",
            "fault",
            "fault",
            "beside",
            "beside",
            "between",
            "turn",
            "turn",
            "turn",
            "gradients",
            "look",
            "verify",
            "collected",
        ]
        return getattr(self, f"_{self.rng.choice(names)}")(slot)

    # Calls

    def _generate(self, slot: int) -> Action:
        return self.calls.generate(slot)

    def _fault(self, slot: int) -> Action:
        return self.calls.fault(slot)

    def _beside(self, slot: int) -> Action:
        others = [number for number in range(len(self.slots)) if number != slot]
        return self.calls.beside(slot, self.rng.choice(others)) if others else self._generate(slot)

    def _between(self, slot: int) -> Action:
        """What a user does between calls, interrupted."""
        deed = self.rng.choice(["reset()", "crop(-2)", f"pin({self._known()})", "unpin()", "reset_prefix_cache()"])
        line = f"interrupted(lambda: c{slot}.{deed}, {int(2 ** self.rng.uniform(2, 9))})\nc{slot}.reset()"
        refusals = ("CacheBusyError", "CacheArgumentError")
        same = f"r{slot}.{deed}\n" if deed.startswith("crop") else ""  # where transformers refuses it, it is left out
        reference = f"{same}r{slot} = DynamicCache(config=model.config)"
        return Action("between", line, reference, slot=slot, refusals=refusals)

    def _forward(self, slot: int) -> Action:
        return self.calls.forward(slot, None)

    def _going_on(self, slot: int) -> Action:
        if self.slots[slot].mask is None:
            return self._forward(slot)
        action = self.calls.forward(slot, self.slots[slot].mask)
        # with attentions Falcon sees padding, which is not kept for rows that began without them
        if self.case.kind.startswith("falcon") and "output_attentions=True" in action.ours:
            return dataclasses.replace(action, refusals=("CacheArgumentError",))
        return action

    def _turn(self, slot: int) -> Action:
        mask = self.slots[slot].mask
        if mask is None:
            return self._generate(slot)
        return self.calls.turn(slot, mask)

    def _gradients(self, slot: int) -> Action:
        return self.calls.gradients(slot)

    # Rows

    def _rows(self, slot: int) -> Action:
        mask = self.slots[slot].mask
        if mask is None:
            return self._forward(slot)
        held = mask
        how = self.rng.choice(["repeat", "select", "reorder"])
        if how == "repeat" and len(mask) <= 3:
            lines, mask = "batch_repeat_interleave(2)", [row for row in mask for _ in range(2)]
        elif how == "reorder":
            order = [self.rng.randrange(len(mask)) for _ in mask]
            lines, mask = f"reorder_cache(tensor({order}))", [mask[i] for i in order]
        else:
            order = [self.rng.randrange(len(mask)) for _ in range(self.rng.randint(1, 3))]
            lines, mask = f"batch_select_indices(tensor({order}))", [mask[i] for i in order]
        return Action(
            "rows", f"c{slot}.{lines}", f"r{slot}.{lines}", slot=slot, mask=mask, held=held, need=self._held(mask)
        )

    def _crop(self, slot: int) -> Action:
        mask = self.slots[slot].mask
        if mask is None or len(mask[0]) < 2:
            return self._forward(slot)
        away = min(self.rng.choice([1, 1, 2, 3, 5, 8, 16, self.rng.randint(1, 40)]), len(mask[0]) - 1)
        left = [row[:-away] for row in mask]
        if not all(any(row) for row in left):
            return self._forward(slot)
        return Action("crop", f"c{slot}.crop(-{away})", f"r{slot}.crop(-{away})", slot=slot, mask=left, held=mask)

    def _copied(self, slot: int) -> Action:
        if len(self.slots) > 4 or self.slots[slot].mask is None:
            return self._generate(slot)
        new = len(self.slots)
        return Action(
            "copied",
            f"c{new} = copy.deepcopy(c{slot})",
            f"r{new} = copy.deepcopy(r{slot})",
            slot=slot,
            held=self.slots[slot].mask,
        )

    def _held(self, mask: Rows) -> int:
        return len(mask) * (len(mask[0]) // self.case.block_size + 2)

    # The store

    def _reset(self, slot: int) -> Action:
        return Action("reset", f"c{slot}.reset()", f"r{slot} = DynamicCache(config=model.config)", slot=slot)

    def _forget(self, slot: int) -> Action:
        return Action("forget", f"c{slot}.reset_prefix_cache()", slot=slot, refusals=("CacheBusyError",))

    def _forget_all(self, slot: int) -> Action:
        return Action("forget_all", f"c{slot}.store.reset_prefix_cache()", slot=slot, refusals=("CacheBusyError",))

    def _prefill(self, slot: int) -> Action:
        rows = [self.prompts.one() for _ in range(self.rng.choice([1, 1, 1, 2, 3]))]
        chunk = f", chunk_size={self.rng.choice([1, 3, 8, 16])}" if self.rng.random() < 0.4 else ""
        what = rows[0] if len(rows) == 1 else rows
        need = sum(len(row) // self.case.block_size + 2 for row in rows)
        return Action("prefill", f"c{slot}.prefill({what}{chunk})", slot=slot, need=need, refusals=self._busy())

    def _pin(self, slot: int) -> Action:
        line = f"c{slot}.pin({self._known()})"
        if self.rng.random() < 0.5 and not self._busy():
            line = f"pin_and_fill(model, c{slot}, {self._known()}, {[self.prompts.fresh(30) for _ in range(3)]})"
        return Action("pin", line, slot=slot, refusals=(*self._busy(), "CacheArgumentError"))

    def _busy(self) -> tuple[str, ...]:
        return ("CacheBusyError",) if "rope" in self.case.kind else ()

    def _unpin(self, slot: int) -> Action:
        what = self._known() if self.rng.random() < 0.4 else ""
        return Action("unpin", f"c{slot}.unpin({what})", slot=slot)

    def _look(self, slot: int) -> Action:
        row = self._known()
        line = f"c{slot}.lookup({row}), str(c{slot}.explain({row})), str(c{slot}.stats())"
        return Action("look", line, slot=slot, refusals=self._busy())

    def _verify(self, slot: int) -> Action:
        lines = [f"found = c{slot}.verify({self.rng.choice(['', 1, 3])})", "assert not found.differing, found"]
        refusals = ("UnsupportedModelError",) if "rope" in self.case.kind else ()
        return Action("verify", "\n".join(lines), slot=slot, refusals=refusals)

    def _known(self) -> list[int]:
        if not self.prompts.known or self.rng.random() < 0.2:
            return self.prompts.one()
        return list(self.rng.choice(self.prompts.known))

    def _score(self, slot: int) -> Action:
        context = self._known()[:48]
        continuations = []
        for _ in range(self.rng.randint(1, 4)):
            if continuations and self.rng.random() < 0.4:
                other = self.rng.choice(continuations)
                continuations.append(
                    other[: self.rng.randint(1, len(other))] + self.prompts.fresh(self.rng.randint(0, 3))
                )
            else:
                continuations.append(self.prompts.fresh(self.rng.randint(1, 9)))
        size = f", batch_size={self.rng.randint(1, 3)}" if self.rng.random() < 0.3 else ""
        longest = len(context) + max(map(len, continuations))
        return Action(
            "score",
            f"ours = [score.log_probs for score in c{slot}.score({context}, {continuations}{size})]",
            f"reference = plain_scores(model, {context}, {continuations})",
            slot=slot,
            need=(len(continuations) + 1) * (longest // self.case.block_size + 2),
        )

    def _saved(self, slot: int) -> Action:
        if len(self.slots) > 4:
            return self._generate(slot)
        new = len(self.slots)
        lines = [
            f"c{slot}.store.save(folder, progress=False)",
            f"other = PrefixStore(model, {self.case.store})",
            "other.load(folder, progress=False)",
            f"c{new} = PagedPrefixCache(other)",
        ]
        return Action("saved", "\n".join(lines), f"r{new} = DynamicCache(config=model.config)", slot=slot)

    def _collected(self, slot: int) -> Action:
        lines = [f"c{slot} = PagedPrefixCache(c{slot}.store)", "gc.collect()"]
        return Action("collected", "\n".join(lines), f"r{slot} = DynamicCache(config=model.config)", slot=slot)

    # The model

    def _weight(self, slot: int) -> Action:
        change = self.rng.choice(["mul_(1.25)", "add_(0.02)", "mul_(1.0)", "copy_(torch.zeros_like(weight))"])
        name = self.rng.choice(self.weights)
        lines = ["with torch.no_grad():", f"    weight = model.get_parameter({name!r})", f"    weight.{change}"]
        if self.rng.random() < 0.3:
            lines[2] = "    weight.data = weight.data * 0.95"
        return Action("weight", "", both="\n".join(lines), slot=slot)

    def _attention(self, slot: int) -> Action:
        if len(self.attentions) < 2:
            return self._weight(slot)
        return Action("attention", "", both=f"model.set_attn_implementation({self.rng.choice(self.attentions)!r})")
