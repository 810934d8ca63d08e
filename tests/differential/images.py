"""Random calls with images: prompts of text and pictures. Their kinds are "images:" and a type of the image zoo.

A prompt is a list of parts: texts, and seeds of pictures.
"""

from tests.conformance.image_zoo import tiny, tokens
from tests.conformance.zoo_settings import VOCABULARY
from tests.differential.cases import FRESH, Action, Case
from tests.differential.drawing import Draw

PREFIX = "images:"
KINDS = ("llava", "qwen2_vl", "gemma3", "idefics3", "qwen3_vl", "llava_next")
WAYS = (
    *[""] * 4,
    ", num_beams=2",
    ", num_return_sequences=2, do_sample=True",
    ", prompt_lookup_num_tokens=2",
    ", output_hidden_states=True",
)
NAMES = (*["generate"] * 8, *["prefill", "pin", "unpin", "look", "score", "fault", "turn", "turn", "forget"])
PLACEHOLDERS = f"suppress_tokens=[*range({VOCABULARY}, {VOCABULARY + 16})]"
Prompt = list[list[int] | int]


class ImageDraw(Draw):
    """Conversations that go on from each other, on a few caches of a store that is full now and then."""

    names, num_actions = NAMES, (10, 10)

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind, seed)
        self.conversations: list[Prompt] = [[]]

    def _case(self, kind: str) -> Case:
        rng, name = self.rng, kind.removeprefix(PREFIX)
        size = rng.choice((7, 8, 16, 16))
        most = 6 * (tiny(name)[1].num_tokens + 40) // size
        num_blocks = rng.choice((most, 4 * most))
        store = f"block_size={size}, num_blocks={num_blocks}"
        store += ", disk_folder=folder + '/tier'" if rng.random() < 0.3 else ""
        caches = [f"cache_salt={salt!r}" for salt in (None, None, "tenant")]
        model = f"model, layout = tiny({name!r})"
        return Case(kind, model, store, tuple(caches), num_blocks=num_blocks, block_size=size)

    def _generate(self, slot: int) -> Action:
        rng = self.rng
        rows, way = [self._grown() for _ in range(rng.choice((1, 1, 1, 2, 3)))], rng.choice(WAYS)
        if len(rows) > 1 and "lookup" in way:
            way = ""
        call = f"run(model, **given, seed={rng.randrange(1000)}, max_new_tokens=6{way}"
        ours = f"ours = {call}, past_key_values=c{slot})"
        if rng.random() < 0.2:
            ours = f"with c{slot}:\n    ours = {call})"
        ours += f"\nc{slot}.reset()" if rng.random() < 0.5 else ""
        # a draft that is looked up may have an image's placeholders, which transformers refuses
        return Action("generate", slot, ours, f"reference = {call}, past_key_values={FRESH})", _given(*rows))

    def _turn(self, slot: int) -> Action:
        """The images are passed once; then more tokens, under a mask of all columns."""
        row, new = self._grown(), tokens(self.rng.randrange(1000), self.rng.randint(1, 9))
        lines = f"first = run(model, **given, max_new_tokens=6, past_key_values=CACHE, {PLACEHOLDERS}).sequences\n"
        lines += f"ids = torch.cat([first[:, -1:], tensor([{new}])], 1)\n"
        lines += f"mask = torch.ones(1, first.shape[1] + {len(new)}, dtype=torch.int64)\n"
        lines += "RESULT = run(model, input_ids=ids, attention_mask=mask, max_new_tokens=6, past_key_values=CACHE)"
        return self._alike("turn", slot, lines, begins=True, both=_given(row))

    def _prefill(self, slot: int) -> Action:
        return self._asked("prefill", slot, f"c{slot}.prefill(given)", "OutOfBlocksError", "UnsupportedModelError")

    def _pin(self, slot: int) -> Action:
        return self._asked("pin", slot, f"c{slot}.pin(given)", "OutOfBlocksError", "CacheArgumentError")

    def _unpin(self, slot: int) -> Action:
        return self._asked("unpin", slot, f"c{slot}.unpin(given)")

    def _look(self, slot: int) -> Action:
        line = f"assert c{slot}.explain(given).num_known == c{slot}.lookup(given).num_tokens"
        return self._asked("look", slot, line)

    def _score(self, slot: int) -> Action:
        row, rng = self._grown(), self.rng
        continuations = [tokens(rng.randint(1, 3), rng.randint(1, 5)) for _ in range(2)]
        ours = f"ours = [score.log_probs for score in c{slot}.score(given, {continuations})]"
        reference = f"whole = [prompt(layout, [*{row}, ids]) for ids in {continuations}]\n"
        reference += f"reference = plain_scores(model, whole, {continuations})"
        return Action("score", slot, ours, reference, _given(row))

    def _fault(self, slot: int) -> Action:
        """A processor raises, and the same prompt is right afterwards."""
        call, same = "**given, max_new_tokens=4, do_sample=False", "run(model, **given, max_new_tokens=6"
        ours = f"fails(model, {self.rng.randint(0, 2)}, 'step', {call}, past_key_values=c{slot})\n"
        ours += f"ours = {same}, past_key_values=c{slot})"
        reference = f"reference = {same}, past_key_values={FRESH})"
        return Action("fault", slot, ours, reference, _given(self._grown()))

    def _forget(self, slot: int) -> Action:
        return Action("forget", slot, f"c{slot}.reset()\nc{slot}.reset_prefix_cache()", f"r{slot} = {FRESH}")

    def _asked(self, name: str, slot: int, line: str, *refusals: str) -> Action:
        return Action(name, slot, line, both=_given(self._grown()), refusals=refusals)

    def _grown(self) -> Prompt:
        """A conversation that goes on from one that was had, or from its middle."""
        rng = self.rng
        before = rng.choice(self.conversations)
        more = [
            rng.randint(1, 3) if rng.random() < 0.5 else tokens(rng.randint(1, 3), rng.choice((1, 5, 11, 16)))
            for _ in range(rng.randint(0, 3))
        ]
        row: Prompt = []
        for part in [*before[: rng.randint(0, len(before))], *more]:
            if not isinstance(part, int):
                row.append(part)
            elif sum(isinstance(each, int) for each in row) < 3:  # some models take images side by side for one
                row += [part, tokens(9, 2)]
        row.append(tokens(rng.randint(1, 3), rng.randint(1, 20)))
        self.conversations.append(row)
        return row


def _given(*rows: Prompt) -> str:
    return f"given = prompt(layout, {', '.join(map(str, rows))})"
