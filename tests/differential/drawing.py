"""Draws cases and actions; an action depends on what the reference has answered so far, never on ours."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache

from tests.differential.cases import FRESH, Action, Case, Rows
from tests.differential.kinds import attentions_of
from tests.differential.playing import Player
from tests.differential.prompts import Prompts

# Kernels of these solve for 64 tokens at once, and a prompt continues from multiples of that alone.
IN_CHUNKS = re.compile("qwen3_next|qwen3_5|qwen4_exp|olmo_hybrid|kimi_linear")
FLAGS = ("output_attentions", "output_hidden_states", "output_logits", "output_scores")
ASKED = "return_dict_in_generate=True, output_logits=True"
NAMES = ["generate"] * 11 + ["forward"] * 3 + ["going_on"] * 4 + ["rows"] * 2 + ["crop"] * 2 + ["reset"] * 2
NAMES += ["forget", "forget_all", "prefill", "prefill", "pin", "unpin", "score", "score", "copied", "saved", "weight"]
NAMES += ["attention", "fault", "fault", "beside", "beside", "between", "turn", "turn", "turn", "gradients", "look"]
NAMES += ["verify", "collected"]
# Shares up to which a call of `generate` is made in a way: its name, and what it says of the cache.
WAYS = (
    (0.76, "generate", "past_key_values=c{0}, "),
    (0.84, "with", ""),
    (0.92, "elsewhere", "past_key_values=PagedPrefixCache(c{0}.store), "),
    (1.0, "elsewhere", "past_key_values=c{0}.sibling(), "),
)


class Draw(Prompts):
    """A case of a kind and a seed, and its actions, given what the rows of each cache are while it is played.

    Raises:
        UnsupportedModelError: the library holds no such kind.
    """

    names, num_actions = NAMES, (3, 12)
    player: "Player"

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(random.Random(f"{kind} {seed}"), longer=60 if IN_CHUNKS.match(kind) else 0)
        self.case = self._case(kind)
        self.block_size = self.case.block_size
        if "dynamic_rope" in kind:  # longer prompts are computed with the frequencies that the call before left
            self.longest = 23

    def _case(self, kind: str) -> Case:
        rng = self.rng
        self.attentions = attentions_of(kind)
        block_size = rng.choice([1, 2, 3, 4, 4, 5, 7, 8, 16, 16])
        num_blocks = None
        if rng.random() < 0.45:
            num_blocks = max(3, rng.choice([24, 48, 80, 160]) // block_size + 1)
        elif rng.random() < 0.2:
            num_blocks = 4000 // block_size
        options = f"block_size={block_size}"
        if num_blocks is not None:
            options += f", num_blocks={num_blocks}"
        elif rng.random() < 0.3:
            options += f", max_bytes={rng.choice([300_000, 1_000_000, 5_000_000])}"
        if rng.random() < 0.25:
            options += ", disk_folder=folder + '/tier'"
        salts = rng.random() < 0.2
        caches = []
        for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
            rng.random()  # this one and the next are of options that are gone: cases of known seeds stay what they were
            caches.append(f"cache_salt={rng.choice(['one', 'two'])!r}" if salts and rng.random() < 0.7 else "")
            rng.random()
        self.number = rng.randrange(1000)  # what the weights follow from
        model = f"model = build({kind!r}, seed={self.number}, attention={rng.choice(self.attentions)!r})"
        small = "\nsmall = make_small()" if rng.random() < 0.6 else ""
        return Case(kind, model + small, options, tuple(caches), num_blocks=num_blocks, block_size=block_size)

    def actions(self, player: "Player") -> Iterator[Action]:
        """One after the other: each is played before the next is asked for."""
        self.player, self.slots = player, player.slots
        layers = DynamicCache(config=player.model.config).layers
        self.has_states = any(hasattr(layer, "conv_states") for layer in layers)  # beside attention
        self.has_windows = any(getattr(layer, "is_sliding", False) for layer in layers)
        for _ in range(self.rng.randint(*self.num_actions)):
            yield self.action()
            answer = player.names.get("reference", [])
            if not isinstance(answer, list):
                tokens = answer if isinstance(answer, torch.Tensor) else answer.get("sequences")
                if tokens is not None:
                    self.remember(tokens.tolist())

    def action(self) -> Action:
        slot = self.rng.randrange(len(self.slots))
        return getattr(self, f"_{self.rng.choice(self.names)}")(slot)

    # What all actions are made of

    def _alike(self, name: str, slot: int, lines: str, *, begins: bool = False, **more: Any) -> Action:
        """The same lines on both sides, of a CACHE and for a RESULT; on caches without rows where it `begins`."""
        ours = lines.replace("CACHE", f"c{slot}").replace("RESULT", "ours")
        reference = lines.replace("CACHE", f"r{slot}").replace("RESULT", "reference")
        if begins:
            ours, reference = f"c{slot}.reset()\n{ours}", f"r{slot} = {FRESH}\n{reference}"
        return Action(name, slot, ours, reference, **more)

    def _need(self, num_rows: int, width: int) -> int:
        return num_rows * (width // self.block_size + 2)

    def _drawn(self, *nums_rows: int) -> tuple[Rows, Rows, str]:
        return self.padded(self.batch(self.rng.choice(nums_rows)))

    # Calls

    def _generate(self, slot: int) -> Action:
        rng = self.rng
        options, rows_each, lookup = self._way()
        ids, mask, how = self.padded(self.batch(1 if lookup else rng.choice([1, 1, 2, 2, 3, 4])))
        new = rng.choice([1, 1, 2, 3, 4, 5, 7, 9, 12]) if rng.random() < 0.96 else rng.choice([20, 40, 80])
        options = [f"max_new_tokens={new}", *options, *self._limits(), *self._flags()]
        if rng.random() < 0.1 and not lookup:
            options.append(f"prefill_chunk_size={rng.choice([1, 2, 4, 5, 8, 16])}")
        masked = how != "none" or rng.random() < 0.8
        both = _lines(ids=ids, mask=mask if masked else None)
        seed = f"torch.manual_seed({rng.randrange(1000)})\n" if "do_sample=True" in options else ""
        call = f"model.generate(ids, {'attention_mask=mask, ' if masked else ''}CACHE{', '.join(options)})"
        if rng.random() < 0.02:  # with `use_cache=False` a call runs without the cache that it is given
            call = call.replace("CACHE", "CACHEuse_cache=False, ")
            ours = call.replace("CACHE", f"past_key_values=c{slot}, ")
            ours = f"torch.manual_seed(1)\nours = {ours}\nc{slot}.reset()"
            reference = f"r{slot} = {FRESH}\ntorch.manual_seed(1)\nreference = {call.replace('CACHE', '')}"
            return Action("without", slot, ours, reference, both, mask=mask)
        share = rng.random()
        name, cache = next((name, cache) for most, name, cache in WAYS if share < most)
        before = f"{seed}with c{slot}:\n    " if name == "with" else seed
        theirs = "apart" if name == "elsewhere" else f"r{slot}"
        ours = f"{before}ours = {call.replace('CACHE', cache.format(slot))}"
        reference = f"{theirs} = {FRESH}\n{seed}reference = {call.replace('CACHE', f'past_key_values={theirs}, ')}"
        need = self._need(len(ids) * rows_each, len(ids[0]) + new + (12 if lookup else 0))
        return Action(name, slot, ours, reference, both, mask=mask, need=need, rows_each=rows_each)

    def _way(self) -> tuple[list[str], int, bool]:
        """Options, rows for each prompt, and whether drafts are looked up."""
        rng = self.rng
        way = rng.choice(["greedy"] * 7 + ["sample"] * 3 + ["samples"] * 2 + ["beams"] * 3 + ["beam_sample", "lookup"])
        num = rng.randint(2, 4)
        options = [f"do_sample={way in ('sample', 'samples', 'beam_sample')}"]
        if way == "sample":
            options.append(rng.choice(["top_k=20", "top_p=0.8", "temperature=0.7", "top_k=0", "min_p=0.02"]))
        elif way == "samples":
            options.append(f"num_return_sequences={num}")
        elif "beam" in way:
            options.append(f"num_beams={num}")
        elif way == "lookup":
            options.append(f"prompt_lookup_num_tokens={rng.randint(1, 6)}")
        if way == "beams":
            options += [f"num_return_sequences={rng.randint(1, num)}"] if rng.random() < 0.5 else []
            options += rng.choice([[], [], ["early_stopping=True"], ["length_penalty=0.5"], ["length_penalty=-1.0"]])
        return options, num if way == "samples" or "beam" in way else 1, way == "lookup"

    def _limits(self) -> list[str]:
        if self.rng.random() < 0.75:
            return []
        n = self.rng.choice([3, 5, 7])
        ends = sorted(self.rng.sample(range(3, 128), 20))
        limits = [
            f"logits_processor=[forbid({n})]",
            f"stopping_criteria=[stop_at({n})]",
            f"stop_strings={[chr(33 + end) for end in ends]}, tokenizer=tokenizer()",
            f"eos_token_id={ends}",
            *("repetition_penalty=1.3", "no_repeat_ngram_size=2", "min_new_tokens=3"),
            *("bad_words_ids=[[7], [9, 11]]", "renormalize_logits=True"),
        ]
        return [self.rng.choice(limits)]

    def _flags(self) -> list[str]:
        if self.rng.random() < 0.35:
            return []
        flags = [f"{flag}=True" for flag in FLAGS if self.rng.random() < (0.6 if "logits" in flag else 0.2)]
        return ["return_dict_in_generate=True", *flags]

    def _fault(self, slot: int) -> Action:
        """A generate that a processor or a layer ends, or an interrupt between any two lines of ours."""
        ids, mask, _ = self._drawn(1, 2, 3)
        new, beams = self.rng.choice([3, 6]), ", num_beams=2" if self.rng.random() < 0.3 else ""
        given = f"ids, attention_mask=mask, past_key_values=CACHE, max_new_tokens={new}, do_sample=False{beams}"
        where = self.rng.choice(["step", "step", "layer", "layer", "line"])
        if where == "line":
            line = f"interrupted(lambda: model.generate({given}), {int(2 ** self.rng.uniform(3, 12))})"
        else:
            line = f"fails(model, {self.rng.randint(0, 3 if where == 'step' else 15)}, {where!r}, {given})"
        theirs = line if where == "step" else f"model.generate({given})"
        reference = f"{theirs.replace('CACHE', FRESH)}\nr{slot} = {FRESH}"
        need = self._need(2 * len(ids), len(ids[0]) + new)
        ours = line.replace("CACHE", f"c{slot}")
        return Action("fault", slot, ours, reference, _lines(ids=ids, mask=mask), need=need)

    def _beside(self, slot: int) -> Action:
        """In the midst of a call of one cache, one of another."""
        others = [number for number in range(len(self.slots)) if number != slot]
        if not others:
            return self._generate(slot)
        rng, other = self.rng, self.rng.choice(others)
        (ids, mask, _), (ids_2, mask_2, _) = self._drawn(1, 1, 2, 3), self._drawn(1, 1, 2, 3)
        way, rows_each, lookup = self._way()
        if lookup or "do_sample=True" in way:
            way, rows_each = ["do_sample=False"], 1
        new, at = rng.randint(2, 9), rng.randint(0, 3)
        more = f"max_new_tokens={rng.randint(1, 5)}, logits_processor=[], do_sample=False, {ASKED}"
        inner = f"model.generate(ids_2, attention_mask=mask_2, past_key_values=TWO, {more})"
        more = f"max_new_tokens={new}, logits_processor=[during], {', '.join(way)}, {ASKED}"
        line = f"during = During({at}, lambda: {inner})\n"
        line += f"outer = model.generate(ids, attention_mask=mask, past_key_values=ONE, {more})\n"
        line += "RESULT = [{**outer, 'size': 0}, during.inner]"
        ours = line.replace("ONE", f"c{slot}").replace("TWO", f"c{other}").replace("RESULT", "ours")
        reference = line.replace("ONE", FRESH).replace("TWO", FRESH).replace("RESULT", "reference")
        reference += "".join(f"\nr{each} = {FRESH}" for each in (slot, other))
        need = self._need(len(ids) * rows_each, len(ids[0]) + new)
        both = _lines(ids=ids, mask=mask, ids_2=ids_2, mask_2=mask_2)
        return Action("beside", slot, ours, reference, both, other=other, need=need)

    def _turn(self, slot: int) -> Action:
        """New tokens alone, with a mask that covers all: the rows resume."""
        held = self.slots[slot].mask
        # frequencies that grow with the length depend on the call before: the reference gives no result twice
        if held is None or "dynamic_rope" in self.case.kind:
            return self._generate(slot)
        length = self.rng.randint(2, 7)
        ids = [self.fresh(length) for _ in held]
        # The last generated token is in no cache yet; these tokens follow what the cache holds.
        mask = [row + [1] * length for row in held]
        new = self.rng.randint(1, 5)
        line = f"RESULT = model.generate(ids, attention_mask=mask, past_key_values=CACHE, max_new_tokens={new}, "
        line += f"do_sample=False, {ASKED})"
        more = {"mask": [row[-length:] for row in mask], "held": held, "both": _lines(ids=ids, mask=mask)}
        return self._alike("turn", slot, line, need=self._need(len(held), len(mask[0]) + new), **more)

    def _forward(self, slot: int) -> Action:
        ids, mask, _ = self._drawn(1, 1, 2, 3)
        return self._forwards("forward", slot, ids, mask)

    def _going_on(self, slot: int) -> Action:
        held = self.slots[slot].mask
        if held is None:
            return self._forward(slot)
        length = self.rng.choice([1, 1, 2, 3, 5, 9, 17])
        action = self._forwards(
            "going_on", slot, [self.fresh(length) for _ in held], [[1] * length for _ in held], held
        )
        # with attentions some models see padding, which is not kept for rows that began without them
        if "output_attentions=True" in action.ours and any(0 in row for row in held):
            return replace(action, refusals=(*action.refusals, "CacheArgumentError"))
        return action

    def _forwards(self, name: str, slot: int, ids: Rows, mask: Rows, held: Rows | None = None) -> Action:
        """Plain forwards: whole, in pieces or token by token; after what is held, or from the start."""
        rng, length = self.rng, len(ids[0])
        columns = [before + now for before, now in zip(held or [[]] * len(mask), mask, strict=True)]
        padded = any(0 in row for row in columns)
        options, tensors = [], {"ids": ids}
        if padded or rng.random() < 0.6:
            options.append("mask=mask")
            tensors["mask"] = columns
        if rng.random() < (0.7 if padded else 0.5):
            options.append("positions=positions")
            counted = [[max(0, sum(row[: i + 1]) - 1) for i in range(len(row))] for row in columns]
            tensors["positions"] = [row[-length:] for row in counted]
        sizes = self._sizes(length)
        if rng.random() < 0.25:
            options.append(f"logits_to_keep={rng.choice([1, 1, 2])}")
        die = f", die={rng.randint(0, 1)}" if rng.random() < 0.15 else ""
        options += [f"{flag}=True" for flag in FLAGS[:2] if rng.random() < 0.12]
        refusals = ["CacheArgumentError"] if self.has_states and _comes_alone(sizes, columns) else []
        # what transformers' own layers with a window see is lost with a forward that dies
        refusals += ["ForwardMismatchError"] if die and (self.has_states or self.has_windows) else []
        line = f"RESULT = pieces({', '.join(['model', 'CACHE', 'ids', str(sizes), *options])})"
        more = {"mask": mask, "held": held, "refusals": tuple(refusals), "need": self._need(len(ids), len(columns[0]))}
        action = self._alike(name, slot, line, begins=held is None, both=_lines(**tensors), **more)
        return replace(action, ours=f"{action.ours[:-1]}{die})")

    def _sizes(self, length: int) -> list[int]:
        how = self.rng.choice(["whole", "whole", "tokens", "two", "pieces", "then_tokens"])
        if how == "whole" or length == 1:
            return [length]
        if how == "tokens":
            return [1] * length if length <= 16 else [length - 4, 1, 1, 1, 1]
        cut = self.rng.randint(1, length - 1)
        if how == "two":
            return [cut, length - cut]
        if how == "then_tokens":
            cut = max(cut, length - 6)
            return [cut] + [1] * (length - cut)
        size = self.rng.randint(2, 9)
        return [min(size, length - at) for at in range(0, length, size)]

    def _gradients(self, slot: int) -> Action:
        ids, mask, _ = self._drawn(1, 2)
        line = "RESULT = with_gradients(model, ids, CACHE, attention_mask=mask)"
        more = {"mask": mask, "need": self._need(len(ids), len(ids[0])), "both": _lines(ids=ids, mask=mask)}
        return self._alike("gradients", slot, line, begins=True, **more)

    # Rows

    def _rows(self, slot: int) -> Action:
        held = self.slots[slot].mask
        if held is None:
            return self._forward(slot)
        how, each = self.rng.choice(["repeat", "select", "reorder"]), range(len(held))
        how = "reorder" if self.has_states else how  # transformers leaves states behind where rows are repeated
        if how == "repeat" and len(held) <= 3:
            call, order = "batch_repeat_interleave(2)", [i for i in each for _ in range(2)]
        else:
            order = [
                self.rng.randrange(len(held)) for _ in (each if how == "reorder" else range(self.rng.randint(1, 3)))
            ]
            call = f"{'reorder_cache' if how == 'reorder' else 'batch_select_indices'}(tensor({order}))"
        mask = [held[i] for i in order]
        return self._alike(
            "rows", slot, f"CACHE.{call}", mask=mask, held=held, need=self._need(len(mask), len(mask[0]))
        )

    def _crop(self, slot: int) -> Action:
        held = self.slots[slot].mask
        if held is None or len(held[0]) < 2:
            return self._forward(slot)
        away = min(self.rng.choice([1, 1, 2, 3, 5, 8, 16, self.rng.randint(1, 40)]), len(held[0]) - 1)
        left = [row[:-away] for row in held]
        if not all(any(row) for row in left):
            return self._forward(slot)
        # after assisted decoding transformers still has the states before the last tokens; rows of ours have not
        refusals = ("CacheArgumentError",) if self.has_states else ()
        return self._alike("crop", slot, f"CACHE.crop(-{away})", mask=left, held=held, refusals=refusals)

    def _copied(self, slot: int) -> Action:
        if len(self.slots) > 4 or self.slots[slot].mask is None:
            return self._generate(slot)
        new = len(self.slots)
        lines = [f"{side}{new} = copy.deepcopy({side}{slot})" for side in "cr"]
        return Action("copied", slot, *lines, held=self.slots[slot].mask)

    # The store

    def _reset(self, slot: int) -> Action:
        return Action("reset", slot, f"c{slot}.reset()", f"r{slot} = {FRESH}")

    def _between(self, slot: int) -> Action:
        """What a user does between calls, interrupted."""
        deed = self.rng.choice(["reset()", "crop(-2)", f"pin({self._known()})", "unpin()", "reset_prefix_cache()"])
        line = f"interrupted(lambda: c{slot}.{deed}, {int(2 ** self.rng.uniform(2, 9))})\nc{slot}.reset()"
        same = f"r{slot}.{deed}\n" if deed.startswith("crop") else ""  # where transformers refuses it, it is left out
        refusals = ("CacheBusyError", "CacheArgumentError")
        return Action("between", slot, line, f"{same}r{slot} = {FRESH}", refusals=refusals)

    def _forget(self, slot: int) -> Action:
        return Action("forget", slot, f"c{slot}.reset_prefix_cache()", refusals=("CacheBusyError",))

    def _forget_all(self, slot: int) -> Action:
        return Action("forget_all", slot, f"c{slot}.store.reset_prefix_cache()", refusals=("CacheBusyError",))

    def _prefill(self, slot: int) -> Action:
        rows = [self.one() for _ in range(self.rng.choice([1, 1, 1, 2, 3]))]
        chunk = f", chunk_size={self.rng.choice([1, 3, 8, 16])}" if self.rng.random() < 0.4 else ""
        line = f"c{slot}.prefill({rows[0] if len(rows) == 1 else rows}{chunk})"
        need = sum(self._need(1, len(row)) for row in rows)
        return Action("prefill", slot, line, need=need, refusals=self._busy())

    def _pin(self, slot: int) -> Action:
        line = f"c{slot}.pin({self._known()})"
        if self.rng.random() < 0.5 and not self._busy():
            line = f"pin_and_fill(model, c{slot}, {self._known()}, {[self.fresh(30) for _ in range(3)]})"
        return Action("pin", slot, line, refusals=(*self._busy(), "CacheArgumentError"))

    def _busy(self, error: str = "CacheBusyError") -> tuple[str, ...]:
        return (error,) if "rope" in self.case.kind else ()

    def _unpin(self, slot: int) -> Action:
        return Action("unpin", slot, f"c{slot}.unpin({self._known() if self.rng.random() < 0.4 else ''})")

    def _look(self, slot: int) -> Action:
        row = self._known()
        line = f"c{slot}.lookup({row}), str(c{slot}.explain({row})), str(c{slot}.stats())"
        return Action("look", slot, line, refusals=self._busy())

    def _verify(self, slot: int) -> Action:
        line = f"found = c{slot}.verify()\nassert not found.differing, found"
        return Action("verify", slot, line, refusals=self._busy("UnsupportedModelError"))

    def _known(self) -> list[int]:
        if not self.known or self.rng.random() < 0.2:
            return self.one()
        return list(self.rng.choice(self.known))

    def _score(self, slot: int) -> Action:
        context, rng = self._known()[:48], self.rng
        continuations: Rows = []
        for _ in range(rng.randint(1, 4)):
            if continuations and rng.random() < 0.4:
                other = rng.choice(continuations)
                continuations.append(other[: rng.randint(1, len(other))] + self.fresh(rng.randint(0, 3)))
            else:
                continuations.append(self.fresh(rng.randint(1, 9)))
        size = f", batch_size={rng.randint(1, 3)}" if rng.random() < 0.3 else ""
        ours = f"ours = [score.log_probs for score in c{slot}.score({context}, {continuations}{size})]"
        reference = f"whole = [text(model, {context} + ids) for ids in {continuations}]\n"
        reference += f"reference = plain_scores(model, whole, {continuations})"
        need = self._need(len(continuations) + 1, len(context) + max(map(len, continuations)))
        return Action("score", slot, ours, reference, need=need)

    def _saved(self, slot: int) -> Action:
        if len(self.slots) > 4:
            return self._generate(slot)
        lines = f"c{slot}.store.save(folder)\nother = PrefixStore(model, {self.case.store})\n"
        lines += f"other.load(folder)\nc{len(self.slots)} = PagedPrefixCache(other)"
        return Action("saved", slot, lines, f"r{len(self.slots)} = {FRESH}")

    def _collected(self, slot: int) -> Action:
        return Action(
            "collected", slot, f"c{slot} = PagedPrefixCache(c{slot}.store)\ngc.collect()", f"r{slot} = {FRESH}"
        )

    # The model

    def _weight(self, slot: int) -> Action:
        change = self.rng.choice(["mul_(1.25)", "add_(0.02)", "mul_(1.0)", "copy_(torch.zeros_like(weight))"])
        name = self.rng.choice([name for name, value in self.player.model.named_parameters() if value.dim() > 1])
        line = f"weight.{change}" if self.rng.random() >= 0.3 else "weight.data = weight.data * 0.95"
        both = f"with torch.no_grad():\n    weight = model.get_parameter({name!r})\n    {line}"
        return Action("weight", slot, "", both=both)

    def _attention(self, slot: int) -> Action:
        if len(self.attentions) < 2:
            return self._weight(slot)
        return Action("attention", 0, "", both=f"model.set_attn_implementation({self.rng.choice(self.attentions)!r})")


def _comes_alone(sizes: list[int], columns: Rows) -> bool:
    """Whether a column of a row's padding is a forward of its own, after padding that came before."""
    stops = [len(columns[0]) - sum(sizes[i:]) for i in range(len(sizes))]
    alone = [stop for stop, size in zip(stops, sizes, strict=True) if size == 1 and stop]
    return any(not row[stop] for stop in alone for row in columns)


def _lines(**tensors: Rows | None) -> str:
    return "\n".join(f"{name} = tensor({rows})" for name, rows in tensors.items() if rows is not None)
