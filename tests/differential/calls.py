"""Draws calls of `generate` and of the model, with their padding and flags."""

import random
from dataclasses import dataclass

from tests.differential.cases import Action, Rows
from tests.differential.prompts import Prompts

FLAGS = ("output_attentions", "output_hidden_states", "output_logits", "output_scores")


@dataclass
class Calls:
    rng: random.Random
    prompts: Prompts
    block_size: int
    has_states: bool = False  # of some layers, beside attention

    def generate(self, slot: int) -> Action:
        rng = self.rng
        options, rows_each, lookup = self._way()
        num_rows = 1 if lookup else rng.choice([1, 1, 2, 2, 3, 4])
        ids, mask, how = self.prompts.padded(self.prompts.batch(num_rows))
        new = rng.choice([1, 1, 2, 3, 4, 5, 7, 9, 12]) if rng.random() < 0.96 else rng.choice([20, 40, 80])
        options = [f"max_new_tokens={new}", *options, *self._limits(), *self._flags(lookup)]
        if rng.random() < 0.1 and not lookup:
            options.append(f"prefill_chunk_size={rng.choice([1, 2, 4, 5, 8, 16])}")
        masked = how != "none" or rng.random() < 0.8
        both = _lines(ids=ids, **({"mask": mask} if masked else {}))
        arguments = "ids, attention_mask=mask" if masked else "ids"
        seed = f"torch.manual_seed({rng.randrange(1000)})\n" if "do_sample=True" in options else ""
        call = f"model.generate({arguments}, CACHE{', '.join(options)})"
        if rng.random() < 0.02:
            return self._without(slot, call, both, mask)
        way = rng.random()
        theirs = f"r{slot}" if way < 0.84 else "apart"
        fresh = f"{theirs} = DynamicCache(config=model.config)\n"
        if way < 0.76:
            ours = f"{seed}ours = {call.replace('CACHE', f'past_key_values=c{slot}, ')}"
        elif way < 0.84:
            ours = f"{seed}with c{slot}:\n    ours = {call.replace('CACHE', '')}"
        elif way < 0.92:
            here = f"past_key_values=PagedPrefixCache(c{slot}.store), "
            ours = f"{seed}ours = {call.replace('CACHE', here)}"
        else:
            ours = f"{seed}ours = {call.replace('CACHE', f'past_key_values=c{slot}.sibling(), ')}"
        reference = f"{fresh}{seed}reference = {call.replace('CACHE', f'past_key_values={theirs}, ')}"
        width = len(ids[0]) + new + (12 if lookup else 0)
        need = num_rows * rows_each * (width // self.block_size + 2)
        name = "generate" if way < 0.76 else "with" if way < 0.84 else "elsewhere"
        return Action(name, ours, reference, both, slot=slot, mask=mask, need=need, rows_each=rows_each)

    def _without(self, slot: int, call: str, both: str, mask: Rows) -> Action:
        """With `use_cache=False` a call runs without the cache that it is given."""
        call = call.replace("CACHE", "CACHEuse_cache=False, ")
        seed = "torch.manual_seed(1)\n"
        ours = f"{seed}ours = {call.replace('CACHE', f'past_key_values=c{slot}, ')}\nc{slot}.reset()"
        reference = f"r{slot} = DynamicCache(config=model.config)\n{seed}reference = {call.replace('CACHE', '')}"
        return Action("without", ours, reference, both, slot=slot, mask=mask)

    def _way(self) -> tuple[list[str], int, bool]:
        """Options, rows for each prompt, and whether drafts are looked up."""
        rng = self.rng
        way = rng.choice(["greedy"] * 7 + ["sample"] * 3 + ["samples"] * 2 + ["beams"] * 3 + ["beam_sample", "lookup"])
        num = rng.randint(2, 4)
        if way == "greedy":
            return ["do_sample=False"], 1, False
        if way == "sample":
            more = rng.choice(["top_k=20", "top_p=0.8", "temperature=0.7", "top_k=0", "min_p=0.02"])
            return ["do_sample=True", more], 1, False
        if way == "samples":
            return ["do_sample=True", f"num_return_sequences={num}"], num, False
        if way == "beams":
            more = [f"num_return_sequences={rng.randint(1, num)}"] if rng.random() < 0.5 else []
            more += rng.choice([[], [], ["early_stopping=True"], ["length_penalty=0.5"], ["length_penalty=-1.0"]])
            return ["do_sample=False", f"num_beams={num}", *more], num, False
        if way == "beam_sample":
            return ["do_sample=True", f"num_beams={num}"], num, False
        return ["do_sample=False", f"prompt_lookup_num_tokens={rng.randint(1, 6)}"], 1, True

    def _limits(self) -> list[str]:
        if self.rng.random() < 0.75:
            return []
        n = self.rng.choice([3, 5, 7])
        ends = sorted(self.rng.sample(range(3, 128), 20))
        return [
            self.rng.choice(
                [
                    f"logits_processor=[Forbid({n})]",
                    f"stopping_criteria=[StopAt({n})]",
                    f"stop_strings={[chr(33 + end) for end in ends]}, tokenizer=tokenizer()",
                    f"eos_token_id={ends}",
                    "repetition_penalty=1.3",
                    "no_repeat_ngram_size=2",
                    "min_new_tokens=3",
                    "bad_words_ids=[[7], [9, 11]]",
                    "renormalize_logits=True",
                ]
            )
        ]

    def _flags(self, lookup: bool) -> list[str]:
        rng = self.rng
        if rng.random() < 0.35:
            return []
        flags = [f"{flag}=True" for flag in FLAGS if rng.random() < (0.6 if "logits" in flag else 0.2)]
        return ["return_dict_in_generate=True", *flags]

    def fault(self, slot: int) -> Action:
        """A generate that a processor or a layer ends, or an interrupt between any two lines of ours."""
        ids, mask, _ = self.prompts.padded(self.prompts.batch(self.rng.choice([1, 2, 3])))
        new, beams = self.rng.choice([3, 6]), ", num_beams=2" if self.rng.random() < 0.3 else ""
        given = f"ids, attention_mask=mask, past_key_values=CACHE, max_new_tokens={new}, do_sample=False{beams}"
        where = self.rng.choice(["step", "step", "layer", "layer", "line"])
        if where == "line":
            line = f"interrupted(lambda: model.generate({given}), {int(2 ** self.rng.uniform(3, 12))})"
        else:
            line = f"fails(model, {self.rng.randint(0, 3 if where == 'step' else 15)}, {where!r}, {given})"
        need = len(ids) * 2 * ((len(ids[0]) + new) // self.block_size + 2)
        fresh = f"r{slot} = DynamicCache(config=model.config)"
        theirs = line if where == "step" else f"model.generate({given})"
        reference = f"{theirs.replace('CACHE', 'DynamicCache(config=model.config)')}\n{fresh}"
        both = _lines(ids=ids, mask=mask)
        return Action("fault", line.replace("CACHE", f"c{slot}"), reference, both, slot=slot, need=need)

    def beside(self, slot: int, other: int) -> Action:
        """In the midst of a call of one cache, one of another."""
        rng = self.rng
        (ids, mask, _), (ids_2, mask_2, _) = (
            self.prompts.padded(self.prompts.batch(rng.choice([1, 1, 2, 3]))) for _ in range(2)
        )
        way, rows_each, lookup = self._way()
        if lookup or "do_sample=True" in way:
            way, rows_each = ["do_sample=False"], 1
        new, at = rng.randint(2, 9), rng.randint(0, 3)
        asked = "return_dict_in_generate=True, output_logits=True"
        inner = (
            f"model.generate(ids_2, attention_mask=mask_2, past_key_values=TWO, max_new_tokens={rng.randint(1, 5)}, "
        )
        inner += f"logits_processor=[], do_sample=False, {asked})"
        outer = f"during = During({at}, lambda: {inner})\nouter = model.generate(ids, attention_mask=mask, past_key_values=ONE, "
        outer += f"max_new_tokens={new}, logits_processor=[during], {', '.join(way)}, {asked})\n"
        lines = [
            f"{outer}{name} = [{{**outer, 'size': 0}}, during.inner]".replace("ONE", one).replace("TWO", two)
            for name, one, two in (
                ("ours", f"c{slot}", f"c{other}"),
                ("reference", *["DynamicCache(config=model.config)"] * 2),
            )
        ]
        fresh = "".join(f"\nr{each} = DynamicCache(config=model.config)" for each in (slot, other))
        need = len(ids) * rows_each * ((len(ids[0]) + new) // self.block_size + 2)
        both = _lines(ids=ids, mask=mask, ids_2=ids_2, mask_2=mask_2)
        return Action("beside", lines[0], lines[1] + fresh, both, slot=slot, other=other, need=need)

    def turn(self, slot: int, held: Rows) -> Action:
        """New tokens alone, with a mask that covers all: the rows resume."""
        length = self.rng.randint(2, 7)
        ids = [self.prompts.fresh(length) for _ in held]
        # The last generated token is in no cache yet; these tokens follow what the cache holds.
        mask = [row + [1] * len(ids[0]) for row in held]
        new = self.rng.randint(1, 5)
        line = "model.generate(ids, attention_mask=mask, past_key_values=CACHE, "
        line += f"max_new_tokens={new}, do_sample=False, return_dict_in_generate=True, output_logits=True)"
        need = len(held) * ((len(mask[0]) + new) // self.block_size + 2)
        return Action(
            "turn",
            f"ours = {line.replace('CACHE', f'c{slot}')}",
            f"reference = {line.replace('CACHE', f'r{slot}')}",
            _lines(ids=ids, mask=mask),
            slot=slot,
            mask=[row[-len(ids[0]) :] for row in mask],
            need=need,
            held=held,
        )

    def forward(self, slot: int, held: Rows | None) -> Action:
        """Plain forwards: whole, in pieces or token by token; after what is held, or from the start."""
        rng = self.rng
        if held is None:
            ids, mask, _ = self.prompts.padded(self.prompts.batch(rng.choice([1, 1, 2, 3])))
            start = [[] for _ in ids]
        else:
            length = rng.choice([1, 1, 2, 3, 5, 9, 17])
            ids = [self.prompts.fresh(length) for _ in held]
            mask, start = [[1] * length for _ in held], held
        columns = [before + now for before, now in zip(start, mask, strict=True)]
        padded = any(0 in row for row in columns)
        options, tensors = [], {"ids": ids}
        if padded or rng.random() < 0.6:
            options.append("mask=mask")
            tensors["mask"] = columns
        if rng.random() < (0.7 if padded else 0.5):
            positions = [[max(0, sum(row[: i + 1]) - 1) for i in range(len(row))][-len(ids[0]) :] for row in columns]
            options.append("positions=positions")
            tensors["positions"] = positions
        sizes = self._sizes(len(ids[0]))
        if rng.random() < 0.25:
            options.append(f"logits_to_keep={rng.choice([1, 1, 2])}")
        die = f", die={rng.randint(0, 1)}" if rng.random() < 0.15 else ""
        options += [f"{flag}=True" for flag in FLAGS[:2] if rng.random() < 0.12]
        more = "".join(f", {option}" for option in options)
        fresh = f"r{slot} = DynamicCache(config=model.config)\n" if held is None else ""
        before = f"c{slot}.reset()\n" if held is None else ""
        return Action(
            "going_on" if held is not None else "forward",
            f"{before}ours = pieces(model, c{slot}, ids, {sizes}{more}{die})",
            f"{fresh}reference = pieces(model, r{slot}, ids, {sizes}{more})",
            _lines(**tensors),
            slot=slot,
            mask=mask,
            need=len(ids) * (len(columns[0]) // self.block_size + 2),
            held=held,
            refusals=(
                *(("CacheArgumentError",) if self.has_states and _comes_alone(sizes, columns) else ()),
                *(("ForwardMismatchError",) if self.has_states and die else ()),
            ),
        )

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

    def gradients(self, slot: int) -> Action:
        ids, mask, _ = self.prompts.padded(self.prompts.batch(self.rng.choice([1, 2])))
        line = "with_gradients(model, ids, CACHE, attention_mask=mask)"
        return Action(
            "gradients",
            f"c{slot}.reset()\nours = {line.replace('CACHE', f'c{slot}')}",
            f"r{slot} = DynamicCache(config=model.config)\nreference = {line.replace('CACHE', f'r{slot}')}",
            _lines(ids=ids, mask=mask),
            slot=slot,
            mask=mask,
            need=len(ids) * (len(ids[0]) // self.block_size + 2),
        )


def _comes_alone(sizes: list[int], columns: Rows) -> bool:
    """Whether a column of a row's padding is a forward of its own, after padding that came before."""
    stop = len(columns[0])
    for size in reversed(sizes):
        stop -= size
        if size == 1 and stop and any(not row[stop] for row in columns):
            return True
    return False


def _lines(**tensors: Rows) -> str:
    return "\n".join(f"{name} = tensor({rows})" for name, rows in tensors.items())
