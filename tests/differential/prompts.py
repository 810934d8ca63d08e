"""Prompts that share beginnings with earlier ones, and batches of them with padding of all sorts."""

import random

from tests.differential.cases import Rows
from tests.differential.kinds import END, PAD, VOCABULARY

LONGEST = 72


class Prompts:
    """Remembers what was asked and answered; new prompts begin like it, mostly."""

    block_size: int

    def __init__(self, rng: random.Random, longer: int = 0) -> None:
        self.rng = rng
        self.longer = longer  # tokens by which prompts are longer than else
        self.longest = LONGEST  # of a prompt that is not longer than else
        self.known: Rows = []

    def remember(self, rows: Rows) -> None:
        kept = [[token for token in row if token != PAD] for row in rows]
        self.known += [row for row in kept if row]
        del self.known[:-12]

    def fresh(self, length: int) -> list[int]:
        low = 1 if self.rng.random() < 0.1 else END + 1
        return [self.rng.randrange(low, VOCABULARY) for _ in range(length)]

    def one(self) -> list[int]:
        rng = self.rng
        if not self.known or rng.random() < 0.15:
            lengths = [1, 2, 3, 5, 8, 12, 13, 16, 17, 20, 24, 31, 32, 33, 40, rng.randint(1, 48)]
            row = self.fresh(self.longer + rng.choice(lengths))
        else:
            row = list(rng.choice(self.known))
            how = rng.choice(["same", "cut", "cut_at_block", "extended", "changed", "turn", "cut_extended"])
            if how in ("cut", "cut_extended"):
                row = row[: rng.randint(1, len(row))]
            elif how == "cut_at_block":
                blocks = max(1, rng.randint(0, len(row) // self.block_size))
                row = row[: max(1, blocks * self.block_size + rng.choice([-1, 0, 0, 1]))]
            elif how == "changed":
                row[rng.randrange(len(row))] = rng.randrange(END + 1, VOCABULARY)
            if how in ("extended", "cut_extended", "turn"):
                row += self.fresh(rng.randint(1, 6 if how == "turn" else 10))
        longest = self.longest + self.longer
        if len(row) > longest:
            row = row[: rng.randint(longest // 2, longest)]
        self.known.append(row)
        return row

    def batch(self, num_rows: int) -> Rows:
        rows = [self.one()]
        while len(rows) < num_rows:
            other = self.rng.choice(rows)
            how = self.rng.random()
            if how < 0.15:
                rows.append(list(other))
            elif how < 0.5:
                rows.append(other[: self.rng.randint(1, len(other))] + self.fresh(self.rng.randint(1, 8)))
            else:
                rows.append(self.one())
        return rows

    def padded(self, rows: Rows) -> tuple[Rows, Rows, str]:
        """Token ids, mask, and how it was padded; on the left, as `generate` wants it."""
        rng = self.rng
        how = rng.choice(["left", "left", "left", "every", "one", "multiple", "none", "none"])
        if how == "none":
            width = min(len(row) for row in rows)
            rows = [row[-width:] if rng.random() < 0.2 else row[:width] for row in rows]
        width = max(len(row) for row in rows)
        if how == "every":
            width += rng.choice([1, 2, 3, 7, self.block_size, rng.randint(1, 20)])
        elif how == "multiple":
            multiple = rng.choice([4, 8, 16])
            width = -(-width // multiple) * multiple
        elif how == "one":
            longest = max(rows, key=len)
            shortest = rng.randrange(len(rows))
            rows = [row if i == shortest else longest[: len(longest) - len(row)] + row for i, row in enumerate(rows)]
            rows[shortest] = rows[shortest][: rng.randint(1, len(rows[shortest]))]
        ids = [[PAD] * (width - len(row)) + row for row in rows]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        return ids, mask, how
