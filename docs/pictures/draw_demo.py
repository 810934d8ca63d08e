"""Draws docs/pictures/demo.svg, at the top of the README, from what the demo has measured.

hf-paged-cache demo --json > demo.json; python docs/pictures/draw_demo.py demo.json
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from svg import legend, svg

PICTURE = Path(__file__).with_name("demo.svg")
LEFT, WIDTH, HEIGHT = 16, 860, 26
BARS = WIDTH - 2 * LEFT - 60  # pixels, of the slower one
CACHES = {"dynamic_cache": "DynamicCache", "paged_prefix_cache": "PagedPrefixCache"}


def draw(measured: dict[str, Any]) -> str:
    """One line for each cache, to scale: the questions one after another."""
    questions = measured["questions"]
    seconds = {cache: sum(each[cache]["total_seconds"] for each in questions) for cache in CACHES}
    scale = BARS / max(seconds.values())
    num_tokens = questions[0]["prompt_tokens"]
    shapes = [
        f'<text x="{LEFT}" y="28" class="title">{len(questions)} questions after one prompt of about '
        f"{round(num_tokens, -2):,} tokens</text>"
    ]
    top = 44
    for cache, name in CACHES.items():
        shapes.append(f'<text x="{LEFT}" y="{top + 12}" class="note">{name}</text>')
        shapes += _bars(top + 20, [each[cache] for each in questions], scale)
        end = LEFT + seconds[cache] * scale
        shapes.append(f'<text x="{end + 10:.0f}" y="{top + 38}" class="note">{seconds[cache]:.1f} s</text>')
        top += 62
    shapes += legend(LEFT, top, [("computed", "until the first token"), ("said", "the other tokens of the answer")])
    return svg("Time of the same questions with either cache", WIDTH, top + 32, shapes)


def _bars(top: int, questions: list[dict[str, float]], scale: float) -> Iterator[str]:
    left = float(LEFT)
    for each in questions:
        first, whole = each["first_token_seconds"] * scale, each["total_seconds"] * scale
        yield f'<rect x="{left:.1f}" y="{top}" width="{first:.1f}" height="{HEIGHT}" class="computed"/>'
        yield f'<rect x="{left + first:.1f}" y="{top}" width="{whole - first:.1f}" height="{HEIGHT}" class="said"/>'
        yield f'<rect x="{left:.1f}" y="{top}" width="{whole:.1f}" height="{HEIGHT}" class="frame"/>'
        left += whole


if __name__ == "__main__":
    PICTURE.write_text(draw(json.loads(Path(sys.argv[1]).read_text("utf-8"))), "utf-8")
