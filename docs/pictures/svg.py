"""What the pictures have in common: a page in the reader's scheme, light or dark, and its words."""

from collections.abc import Sequence

LIGHT = {
    "page": "#ffffff", "words": "#1f2328", "notes": "#59636e", "frame": "#8c959f", "reused": "#a6dfc6",
    "computed": "#f3cf9b", "said": "#bcd4f5", "cached": "#dfd3f3", "used": "#b9c2cc", "line": "#c3cad1",
}  # fmt: skip
DARK = {
    "page": "#161b22", "words": "#e6edf3", "notes": "#9198a1", "frame": "#6e7681", "reused": "#1f6b4c",
    "computed": "#8a5a1c", "said": "#2c5591", "cached": "#5a4687", "used": "#58616b", "line": "#444c56",
}  # fmt: skip


def svg(title: str, width: int, height: int, shapes: Sequence[str]) -> str:
    """A picture; `title` is read aloud in its place."""
    style = (
        ".title { font: 600 15px sans-serif } .note { font: 12px sans-serif } "
        ".word { font: 11px sans-serif; text-anchor: middle } "
        + _colors(LIGHT)
        + f" @media (prefers-color-scheme: dark) {{ {_colors(DARK)} }}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"  <title>{title}</title>\n"
        f'  <style>{style}</style>\n  <rect width="{width}" height="{height}" rx="8" class="page"/>\n  '
        + "\n  ".join(shapes)
        + "\n</svg>\n"
    )


def _colors(of: dict[str, str]) -> str:
    filled = " ".join(
        f".{name} {{ fill: {of[name]} }}" for name in ("page", "reused", "computed", "said", "cached", "used")
    )
    return (
        f"{filled} .title, .word {{ fill: {of['words']} }} .note {{ fill: {of['notes']} }} "
        f".frame {{ fill: none; stroke: {of['frame']} }} .free, .line {{ fill: none; stroke: {of['line']} }}"
    )


def legend(left: int, top: int, entries: Sequence[tuple[str, str]]) -> list[str]:
    """A swatch and its meaning for each (class, text), in a line."""
    shapes = []
    for name, text in entries:
        shapes.append(f'<rect x="{left}" y="{top}" width="16" height="16" rx="3" class="{name}"/>')
        shapes.append(f'<text x="{left + 24}" y="{top + 13}" class="note">{text}</text>')
        left += 44 + 6 * len(text)
    return shapes
