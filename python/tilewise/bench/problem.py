"""What one row of a benchmark measures: sizes, type, pass and features, and the work that is in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

PASSES = ("forward", "backward", "both")
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
MASKS = ("additive", "padding")
PRECISIONS = ("standard", "strict")
BLOCK = 128  # side of a block of the block mask
_LOW_64 = 2**64 - 1


class BadInput(ValueError):
    """What the user gave is wrong: one line that names the option, what was expected and what came."""


@dataclass(frozen=True)
class Problem:
    """Attention of one shape. Where Sq and Sk differ, the last query stands at the last key."""

    suite: str = "shape"
    direction: str = "forward"  # a record's "pass"; "both" is a forward and its backward as one call
    dtype: str = "f32"
    b: int = 1
    hq: int = 1
    hkv: int = 1
    sq: int = 1
    sk: int = 1
    d: int = 64
    dv: int = 64
    causal: bool = False
    window: int | None = None  # keys seen to either side; causal cuts off the right one
    mask: str | None = None  # additive: [Sq, Sk] in the inputs' type; padding: boolean [B, 1, 1, Sk]
    blocks: float = 1.0  # fraction of blocks that a block mask keeps; 1 is no block mask
    dropout: float = 0.0
    deterministic: bool = False  # gradients that are the same bits each time; forward always is
    precision: str = "standard"  # of f16 and bf16

    op: ClassVar[str] = "attention"

    # Names

    @property
    def shape(self) -> str:
        """The sizes as short as they can be said.

        >>> Problem(b=2, hq=32, hkv=8, sq=1, sk=4096, d=128, dv=128).shape
        'b2 h32/8 sq1 sk4096 d128'
        """
        heads = f"h{self.hq}" if self.hq == self.hkv else f"h{self.hq}/{self.hkv}"
        length = f"s{self.sq}" if self.sq == self.sk else f"sq{self.sq} sk{self.sk}"
        parts = [f"b{self.b}"] if self.b != 1 else []
        parts += [heads, length, f"d{self.d}"]
        return " ".join(parts + ([f"dv{self.dv}"] if self.dv != self.d else []))

    @property
    def shape_option(self) -> str:
        """Sizes and features as `--shape` takes them."""
        words = [f"{name}={getattr(self, name)}" for name in ("b", "hq", "hkv", "sq", "sk", "d", "dv")]
        return " ".join([*words, self.features]) if self.features else " ".join(words)

    @property
    def features(self) -> str:
        """What is asked besides sizes and causal, in the C++ benchmark's words; empty where nothing is."""
        parts = [f"mask={self.mask}"] if self.mask else []
        parts += [f"window={self.window}"] if self.window is not None else []
        parts += [f"blocks={self.blocks:g}"] if self.blocks < 1 else []
        parts += [f"dropout={self.dropout:g}"] if self.dropout > 0 else []
        parts += ["deterministic=true"] if self.deterministic else []
        return " ".join(parts + (["precision=strict"] if self.precision == "strict" else []))

    def __str__(self) -> str:
        words = [self.shape, self.features, "causal" if self.causal else "", self.dtype, self.direction]
        return " ".join(word for word in words if word)

    def line(self) -> dict[str, Any]:
        """The part of a record's line that says what was measured."""
        return {
            "suite": self.suite,
            "op": self.op,
            "pass": self.direction,
            "dtype": self.dtype,
            **{name: getattr(self, name) for name in ("b", "hq", "hkv", "sq", "sk", "d", "dv", "causal")},
            "window": None if self.window is None else [self.window, self.window],
            "features": self.features,
        }

    # What is visible

    @property
    def alignment(self) -> str:
        return "top_left" if self.sq == self.sk else "bottom_right"

    def keys_of(self, i: int) -> tuple[int, int]:
        """First key that causal and window leave to query i, and the one after the last."""
        position = i + self.sk - self.sq
        left = self.sk + self.sq if self.window is None else self.window
        right = 0 if self.causal else left
        return max(0, position - left), min(self.sk, position + right + 1)

    def keeps_block(self, query_block: int, key_block: int) -> bool:
        """Whether the block mask keeps a block: the diagonal, and others at random but always the same.

        splitmix64 of the block's place, as the C++ benchmark draws it.
        """
        if self.blocks >= 1 or query_block == key_block:
            return True
        word = ((query_block << 32) + key_block + 0x9E3779B97F4A7C15) & _LOW_64
        word = (word * 0xBF58476D1CE4E5B9) & _LOW_64
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _LOW_64
        return ((word ^ (word >> 31)) >> 11) * 2.0**-53 < self.blocks

    @property
    def unpadded(self) -> int:
        """How many keys of each entry the padding leaves."""
        return self.sk - self.sk // 4

    @property
    def pairs(self) -> int:
        """Pairs of query and key, in all heads, that causal, window and block mask keep.

        A boolean mask takes none away: what it hides is known to nobody before it is read.
        """
        return self.b * self.hq * sum(self._pairs_of(i) for i in range(self.sq))

    def _pairs_of(self, i: int) -> int:
        first, last = self.keys_of(i)
        if self.blocks >= 1:
            return max(0, last - first)
        kept = (n for n in range(-(-self.sk // BLOCK)) if self.keeps_block(i // BLOCK, n))
        return sum(max(0, min(last, (n + 1) * BLOCK) - max(first, n * BLOCK)) for n in kept)

    # Work

    @property
    def flops(self) -> float:
        """Useful ones: a pair costs 2·(D + Dv) forward, 2.5 times that backward. Causal without more is half.

        >>> Problem(hq=2, hkv=2, sq=8, sk=8, d=4, dv=4).flops == 4 * 2 * 8 * 8 * 4
        True
        """
        plain_causal = self.causal and self.window is None and self.blocks >= 1 and self.sq == self.sk
        pairs = self.b * self.hq * self.sq * self.sk / 2 if plain_causal else self.pairs
        return 2.0 * pairs * (self.d + self.dv) * {"forward": 1, "backward": 2.5, "both": 3.5}[self.direction]

    @property
    def bytes(self) -> int:
        """What a call cannot help moving: every input read once, every result written once."""
        item = ITEM_BYTES[self.dtype]
        queries = self.b * self.hq * self.sq
        q_and_o = queries * (self.d + self.dv) * item
        k_and_v = self.b * self.hkv * self.sk * (self.d + self.dv) * item
        mask = {"additive": self.sq * self.sk * item, "padding": self.b * self.sk, None: 0}[self.mask]
        forward = q_and_o + k_and_v + 4 * queries + mask  # lse
        backward = 2 * (q_and_o + k_and_v) + 4 * queries + mask
        return {"forward": forward, "backward": backward, "both": forward + backward}[self.direction]

    @property
    def intensity(self) -> float:
        """FLOPs for each of these bytes."""
        return self.flops / self.bytes
