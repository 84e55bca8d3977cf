"""Draws the masks of tilewise.masks for docs/masks.md, each by its own function.

python scripts/mask_pictures.py [folder]

A row is a query and a column a key. Dark cells are seen. Lines are the borders of blocks; blocks that are
seen in part are framed, because they alone have elements.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from tilewise import BlockMask, masks

CELL, MARGIN = 8, 2
STYLE = (
    "svg{--seen:#0b63b0;--hidden:#eef1f6;--line:#ffffff;--frame:#d55e00}"
    "@media(prefers-color-scheme:dark){svg{--seen:#5db4ff;--hidden:#2c3442;--line:#151a22;--frame:#ff8a3d}}"
)
PICTURES = {
    "documents": lambda: masks.documents([7, 12, 5], block_size=6),
    "documents-causal": lambda: masks.documents([7, 12, 5], causal=True, block_size=6),
    "prefix": lambda: masks.prefix(24, 9, block_size=6),
    "shared-prompt": lambda: masks.shared_prompt(8, [7, 5, 4], block_size=6),
    "block-causal": lambda: masks.block_causal(24, 8, block_size=6),
    "neighbourhood": lambda: masks.neighbourhood((4, 6), (3, 3), block_size=6),
}


def drawn(name: str, mask: BlockMask) -> str:
    """The picture as SVG."""
    seen = mask.to_dense()[0, 0].tolist()
    height, width = CELL * len(seen), CELL * len(seen[0])
    cells = []
    for row, line in enumerate(seen):
        column = 0
        for shown, run in groupby(line):
            count = len(list(run))
            if shown:
                cells.append(f"M{CELL * column} {CELL * row}h{CELL * count}v{CELL}h-{CELL * count}z")
            column += count
    step_q, step_k = CELL * mask.block_q, CELL * mask.block_k
    lines = [f"M0 {y}h{width}" for y in range(step_q, height, step_q)]
    lines += [f"M{x} 0v{height}" for x in range(step_k, width, step_k)]
    frames = [
        f"M{step_k * block + 1} {step_q * row + 1}h{step_k - 2}v{step_q - 2}h-{step_k - 2}z"
        for row, count in enumerate(mask.counts[0, 0].tolist())
        for block in mask.indices[0, 0, row, :count].tolist()
    ]
    box = f"{-MARGIN} {-MARGIN} {width + 2 * MARGIN} {height + 2 * MARGIN}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 2 * MARGIN}" '
        f'height="{height + 2 * MARGIN}" viewBox="{box}" role="img" aria-label="{name} mask">'
        f"<style>{STYLE}</style>"
        f'<path fill="var(--hidden)" d="M0 0h{width}v{height}h-{width}z"/>'
        f'<path fill="var(--seen)" d="{"".join(cells)}"/>'
        f'<path stroke="var(--line)" d="{"".join(lines)}"/>'
        f'<path fill="none" stroke="var(--frame)" d="{"".join(frames)}"/></svg>\n'
    )


def main(folder: Path) -> None:
    for name, make in PICTURES.items():
        (folder / f"mask-{name}.svg").write_text(drawn(name, make()))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "docs")
