"""Random calls in chunks (`prefill_chunk_size`): the same bits, whatever is cached.

Their kinds are "bits:" and a kind.
"""

import re
from dataclasses import replace

from tests.differential.cases import Action, Case
from tests.differential.drawing import ASKED, Draw

PREFIX = "bits:"
# All tokens; windows; states; both; latent attention; sinks; experts.
KINDS = (
    *("llama", "gpt2", "mistral", "gemma2", "gemma3_text", "falcon_h1", "lfm2", "bamba", "qwen3_next"),
    *("deepseek_v3", "gpt_oss", "qwen3_moe"),
)
SIZES = (1, 2, 3, 4, 5, 8, 16, 20)
LONGER = 20  # tokens by which prompts are longer than of other cases: of several chunks
FEW = (4, 8, 16, 5)  # that most calls of a case have, so that they find something
# Between the calls: whatever else leaves something in the cache, evicts or loads it.
NAMES = ["in_chunks"] * 3 + ["saved"] * 2 + ["generate", "prefill", "score", "fault", "forget", "reset", "collected"]
NAMES += ["beside", "turn", "weight"]


class ChunkDraw(Draw):
    """Calls of `generate` in chunks, in a random dtype."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind.removeprefix(PREFIX), seed)
        self.longer = max(self.longer, LONGER)
        self.few = FEW[self.number % len(FEW)]
        self._asked: list[Action] = []  # calls that may be made again

    def _case(self, kind: str) -> Case:
        case = super()._case(kind)
        model = f"{case.model}\nmodel = model.to(torch.{self.rng.choice(['float32', 'bfloat16'])})"
        return replace(case, model=model, tolerance=0.0)

    def action(self) -> Action:
        slot = self.rng.randrange(len(self.slots))
        if self._asked and self.rng.random() < 0.4:
            return self.rng.choice(self._asked)
        if self.rng.random() < 0.6:
            self._asked.append(_in_chunks(self._generate(slot), self.few))
            return self._asked[-1]
        name = self.rng.choice(NAMES)
        if name == "in_chunks":  # with all sizes, also those that nobody else has
            return _in_chunks(self._generate(slot), self.rng.choice(SIZES))
        return _unread(getattr(self, f"_{name}")(slot))


def _in_chunks(action: Action, size: int) -> Action:
    """The same call with that chunk size, and all its logits; drafts are looked up in a forward of the whole prompt."""
    if action.name == "without" or "prompt_lookup" in action.ours:
        return _unread(action)

    def changed(lines: str) -> str:
        lines = re.sub(r", (prefill_chunk_size=\d+|return_dict_in_generate=True|output_\w+=True)", "", lines)
        return lines.replace("max_new_tokens=", f"prefill_chunk_size={size}, {ASKED}, max_new_tokens=")

    return replace(action, ours=changed(action.ours), reference=changed(action.reference))


def _unread(action: Action) -> Action:
    """The same, whose results are not compared: without chunks they may round otherwise."""
    return replace(action, ours=action.ours.replace("ours = ", "outer = "))
