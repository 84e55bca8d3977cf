"""Attention in Triton: the device code. `launch` prepares its arguments.

All matrices are cut into tiles, and head dims into pieces, so that a tile fits into registers and shared
memory. A program owns one tile of a result. It goes over all tiles that this result depends on and writes
once, without atomic additions: results have the same bits in every run.

Names: i and j are positions of queries and keys, P the weights, dS the gradient of the scores. A tile is
[rows, columns]; rows and columns past the end are read as 0 and never written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret  # the decorators below ask for it when this is imported


class View(NamedTuple):
    """A tensor on the device: rows [B, H, S, D], a mask [B, Hq, Sq, Sk], or statistics [B, Hq, Sq]."""

    data: Any
    strides: tuple[int, ...]


class Shape(NamedTuple):
    batch: int
    heads: int  # of queries
    group: int  # heads of queries that share one head of keys
    length_q: int
    length_k: int
    offset: int  # query i stands at key i + offset
    left: int | None  # a query sees so many keys to the left of its own; None where it sees all keys
    right: int | None


class Dropout(NamedTuple):
    seed: Any  # int64 [2]
    threshold: int  # of 16 bits, from which on a weight stays
    factor: float  # of a weight that stays


class Statistics(NamedTuple):
    """Of every row, [B, Hq, Sq]: a weight is exp(score - shift) · inverse, and dS = P · (dP - delta)."""

    shift: View
    inverse: View | None  # None where it is 1: shift is LSE
    delta: View


class Score(NamedTuple):
    """What makes a score of a product; None where it is not asked for."""

    scale: float
    softcap: float | None
    slopes: View | None  # ALiBi's, [B, Hq]
    mask: View | None
    dropout: Dropout | None


# Tiles


@triton.jit
def _matrix(x, entry, head):
    """Where rows of one head begin."""
    return x.data + entry * x.strides[0] + head * x.strides[1]


@triton.jit
def _places(x, i, columns):
    return i.to(tl.int64) * x.strides[2] + columns.to(tl.int64) * x.strides[3]


@triton.jit
def _load(x, matrix, i, length, columns, DIM: tl.constexpr):
    i, columns = i[:, None], columns[None, :]
    return tl.load(matrix + _places(x, i, columns), mask=(i < length) & (columns < DIM), other=0.0)


@triton.jit
def _store(x, matrix, i, length, columns, dim, tile):
    i, columns = i[:, None], columns[None, :]
    tile = tile.to(x.data.dtype.element_ty)
    tl.store(matrix + _places(x, i, columns), tile, mask=(i < length) & (columns < dim))


@triton.jit
def _load_statistic(x, entry, head, i, length):
    places = x.data + entry * x.strides[0] + head * x.strides[1] + i.to(tl.int64) * x.strides[2]
    return tl.load(places, mask=i < length, other=0.0)


@triton.jit
def _store_statistic(x, entry, head, i, length, values):
    places = x.data + entry * x.strides[0] + head * x.strides[1] + i.to(tl.int64) * x.strides[2]
    tl.store(places, values, mask=i < length)


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr):
    if PRECISION == "widened":  # the interpreter has no products of bf16; in f32 they are the same
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _products(
    first, a, a_matrix, i, length_a, b, b_matrix, j, length_b,
    DIM: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """a · bᵀ: of each row i with each row j. `first` is the first piece of a, which stays in registers."""
    columns = tl.arange(0, PIECE)
    total = tl.zeros((i.shape[0], j.shape[0]), dtype=tl.float32)
    total = _dot(first, tl.trans(_load(b, b_matrix, j, length_b, columns, DIM)), total, PRECISION)
    for start in range(PIECE, DIM, PIECE):
        piece = _load(a, a_matrix, i, length_a, start + columns, DIM)
        other = _load(b, b_matrix, j, length_b, start + columns, DIM)
        total = _dot(piece, tl.trans(other), total, PRECISION)
    return total


# Scores


@triton.jit
def _tanh(x):
    """Exact to a few units in the last place, near 0 too, where 1 - e would cancel: there it is a quotient of
    polynomials. GPUs of all makers have exp, but not all have tanh under one name."""
    square = x * x
    above = x * (135135.0 + square * (17325.0 + square * (378.0 + square)))
    below = 135135.0 + square * (62370.0 + square * (3150.0 + square * 28.0))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 1.0, above / below, tl.where(x < 0.0, -far, far))


@triton.jit
def _scores(products, i, j, entry, head, score, shape):
    """Scores, -inf where a key is hidden; and what they were before biases.

    i and j lie along the two dimensions of the tile, in either order.
    """
    capped = products * score.scale
    if score.softcap is not None:
        capped = score.softcap * _tanh(capped / score.softcap)
    scores = capped
    distance = j - i
    if score.slopes is not None:
        slope = tl.load(score.slopes.data + entry * score.slopes.strides[0] + head * score.slopes.strides[1])
        scores -= slope * tl.abs(distance + (shape.length_q - shape.length_k)).to(tl.float32)
    seen = (i < shape.length_q) & (j < shape.length_k)
    if score.mask is not None:
        places = _matrix(score.mask, entry, head) + _places(score.mask, i, j)
        mask = tl.load(places, mask=seen, other=0)
        if mask.dtype == tl.int1:
            seen = seen & mask
        else:
            scores += mask.to(tl.float32)
    if shape.left is not None:
        seen = seen & (distance >= shape.offset - shape.left) & (distance <= shape.offset + shape.right)
    return tl.where(seen, scores, -float("inf")), capped


@triton.jit
def _kept(i, j, entry, head, dropout, shape):
    """Factor of each weight: 0 where it is dropped. Philox 4x32-10 of (seed, offset) at counter
    (j / 8, i, b·Hq + h, offset), of which half j / 4 mod 2 of word j mod 4 decides."""
    seed = tl.load(dropout.seed)
    offset = tl.load(dropout.seed + 1)
    key = seed ^ (offset & -4294967296)
    zero = i * 0 + j * 0
    plane = (entry * shape.heads + head).to(tl.uint32) + zero.to(tl.uint32)
    last = offset.to(tl.uint32) + zero.to(tl.uint32)
    word0, word1, word2, word3 = tl.philox(
        key, (zero + j // 8).to(tl.uint32), (zero + i).to(tl.uint32), plane, last
    )
    which = zero + j % 4
    word = tl.where(which < 2, tl.where(which == 0, word0, word1), tl.where(which == 2, word2, word3))
    half = tl.where((zero + j) // 4 % 2 == 0, word & 0xFFFF, word >> 16)
    stays = half >= dropout.threshold.to(tl.uint32)
    return tl.where(stays, dropout.factor, 0.0)


@triton.jit
def _keys_of(first, shape, BLOCK_Q: tl.constexpr):
    """The keys that a tile of queries may see: from, to."""
    begin, end = 0, shape.length_k
    if shape.left is not None:
        begin = tl.maximum(first + shape.offset - shape.left, 0)
        end = tl.minimum(first + BLOCK_Q + shape.offset + shape.right, shape.length_k)
    return begin, end


@triton.jit
def _queries_of(first, shape, BLOCK_K: tl.constexpr):
    """The queries that may see a tile of keys: from, to."""
    begin, end = 0, shape.length_q
    if shape.left is not None:
        begin = tl.maximum(first - shape.offset - shape.right, 0)
        end = tl.minimum(first + BLOCK_K - shape.offset + shape.left, shape.length_q)
    return begin, end


@triton.jit
def _program(tiles, pieces, shape_heads):
    """What this program owns: tile, piece, head, entry of the batch."""
    number = tl.program_id(0)
    tile = number % tiles
    number = number // tiles
    piece = number % pieces
    number = number // pieces
    return tile, piece, (number % shape_heads).to(tl.int64), (number // shape_heads).to(tl.int64)


# Forward


@triton.jit(do_not_specialize=["shape", "tiles"])
def forward(
    q, k, v, o, lse, sinks, score, shape, tiles,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PIECE: tl.constexpr, PIECE_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one piece of O's columns; the online softmax goes over all keys."""
    tile, piece, head, entry = _program(tiles, tl.cdiv(DIM_V, PIECE_V), shape.heads)
    i = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    columns_v = piece * PIECE_V + tl.arange(0, PIECE_V)
    q_matrix = _matrix(q, entry, head)
    k_matrix = _matrix(k, entry, head // shape.group)
    v_matrix = _matrix(v, entry, head // shape.group)
    first = _load(q, q_matrix, i, shape.length_q, tl.arange(0, PIECE), DIM)

    maximum = tl.full((BLOCK_Q,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    out = tl.zeros((BLOCK_Q, PIECE_V), dtype=tl.float32)
    begin, end = _keys_of(tile * BLOCK_Q, shape, BLOCK_Q)
    for start in range(begin, end, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        products = _products(
            first, q, q_matrix, i, shape.length_q, k, k_matrix, j, shape.length_k, DIM, PIECE, PRECISION
        )
        scores, _ = _scores(products, i[:, None], j[None, :], entry, head, score, shape)
        grown = tl.maximum(maximum, tl.max(scores, 1))
        shift = tl.where(grown == -float("inf"), 0.0, grown)  # rows that saw nothing yet
        weights = tl.exp(scores - shift[:, None])
        shrink = tl.exp(maximum - shift)
        total = total * shrink + tl.sum(weights, 1)
        if score.dropout is not None:
            weights *= _kept(i[:, None], j[None, :], entry, head, score.dropout, shape)
        values = _load(v, v_matrix, j, shape.length_k, columns_v, DIM_V)
        out = _dot(weights.to(values.dtype), values, out * shrink[:, None], PRECISION)
        maximum = grown

    if sinks is not None:
        sink = tl.load(sinks.data + head * sinks.strides[0])
        grown = tl.maximum(maximum, sink)
        shift = tl.where(grown == -float("inf"), 0.0, grown)
        shrink = tl.exp(maximum - shift)
        total = total * shrink + tl.exp(sink - shift)
        out *= shrink[:, None]
        maximum = grown
    empty = total == 0.0
    out /= tl.where(empty, 1.0, total)[:, None]
    _store(o, _matrix(o, entry, head), i, shape.length_q, columns_v, DIM_V, out)
    if piece == 0:
        statistic = tl.where(empty, -float("inf"), maximum + tl.log(tl.where(empty, 1.0, total)))
        _store_statistic(lse, entry, head, i, shape.length_q, statistic)


# Backward


@triton.jit(do_not_specialize=["shape", "tiles"])
def delta_of(
    o, d_o, d_lse, delta, shape, tiles,
    DIM_V: tl.constexpr, PIECE_V: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Of every row Σ dO·O - dLSE. For 16-bit rows, whose own rounding is larger than that of O and LSE."""
    tile, _whole, head, entry = _program(tiles, 1, shape.heads)
    i = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    total = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    for start in range(0, DIM_V, PIECE_V):
        columns = start + tl.arange(0, PIECE_V)
        rows = _load(o, _matrix(o, entry, head), i, shape.length_q, columns, DIM_V)
        gradients = _load(d_o, _matrix(d_o, entry, head), i, shape.length_q, columns, DIM_V)
        total += tl.sum(rows.to(tl.float32) * gradients.to(tl.float32), 1)
    if d_lse is not None:
        total -= _load_statistic(d_lse, entry, head, i, shape.length_q)
    _store_statistic(delta, entry, head, i, shape.length_q, total)


@triton.jit(do_not_specialize=["shape", "tiles"])
def statistics_again(
    q, k, v, d_o, d_lse, sinks, statistics, score, shape, tiles,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PIECE: tl.constexpr, PIECE_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Statistics of one tile of queries from the scores themselves, with delta = Σ P·dP - dLSE.

    For f32: LSE has the rounding of a large number, which would be an error of every weight; and Σ dO·O is
    not exactly the dP that it must cancel where one weight is nearly 1.
    """
    tile, _whole, head, entry = _program(tiles, 1, shape.heads)
    i = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_matrix = _matrix(q, entry, head)
    k_matrix = _matrix(k, entry, head // shape.group)
    v_matrix = _matrix(v, entry, head // shape.group)
    o_matrix = _matrix(d_o, entry, head)
    first_q = _load(q, q_matrix, i, shape.length_q, tl.arange(0, PIECE), DIM)
    first_o = _load(d_o, o_matrix, i, shape.length_q, tl.arange(0, PIECE_V), DIM_V)

    maximum = tl.full((BLOCK_Q,), -float("inf"), dtype=tl.float32)
    if sinks is not None:
        maximum = tl.zeros_like(maximum) + tl.load(sinks.data + head * sinks.strides[0])
    total = tl.where(maximum == -float("inf"), 0.0, 1.0)
    delta = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    begin, end = _keys_of(tile * BLOCK_Q, shape, BLOCK_Q)
    for start in range(begin, end, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        products = _products(
            first_q, q, q_matrix, i, shape.length_q, k, k_matrix, j, shape.length_k, DIM, PIECE, PRECISION
        )
        products_v = _products(
            first_o, d_o, o_matrix, i, shape.length_q, v, v_matrix, j, shape.length_k,
            DIM_V, PIECE_V, PRECISION,
        )  # fmt: skip
        scores, _ = _scores(products, i[:, None], j[None, :], entry, head, score, shape)
        grown = tl.maximum(maximum, tl.max(scores, 1))
        shift = tl.where(grown == -float("inf"), 0.0, grown)
        weights = tl.exp(scores - shift[:, None])
        shrink = tl.exp(maximum - shift)
        total = total * shrink + tl.sum(weights, 1)
        if score.dropout is not None:
            products_v *= _kept(i[:, None], j[None, :], entry, head, score.dropout, shape)
        delta = delta * shrink + tl.sum(weights * products_v, 1)
        maximum = grown

    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    delta *= inverse
    if d_lse is not None:
        delta -= _load_statistic(d_lse, entry, head, i, shape.length_q)
    _store_statistic(statistics.shift, entry, head, i, shape.length_q, maximum)
    _store_statistic(statistics.inverse, entry, head, i, shape.length_q, inverse)
    _store_statistic(statistics.delta, entry, head, i, shape.length_q, delta)


@triton.jit
def _weights_again(products, products_v, statistics, i, j, entry, head, score, shape):
    """P as it met V, dS, and the gradient of Q·K except for the scale.

    products are those of Q and K, products_v those of dO and V. i and j are those of `_scores`.
    """
    scores, capped = _scores(products, i, j, entry, head, score, shape)
    shift = _load_statistic(statistics.shift, entry, head, i, shape.length_q)
    delta = _load_statistic(statistics.delta, entry, head, i, shape.length_q)
    weights = tl.exp(scores - tl.where(shift == -float("inf"), 0.0, shift))  # a row may see nothing
    if statistics.inverse is not None:
        weights *= _load_statistic(statistics.inverse, entry, head, i, shape.length_q)
    dropped = weights
    if score.dropout is not None:
        kept = _kept(i, j, entry, head, score.dropout, shape)
        dropped = weights * kept
        products_v = products_v * kept
    d_scores = weights * (products_v - delta)
    d_products = d_scores
    if score.softcap is not None:
        share = capped / score.softcap
        d_products = d_scores * (1.0 - share * share)
    return dropped, d_scores, d_products


@triton.jit(do_not_specialize=["shape", "tiles"])
def backward_q(
    q, k, v, d_o, statistics, d_q, score, shape, tiles,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PIECE: tl.constexpr, PIECE_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one piece of dQ's columns, over all keys."""
    tile, piece, head, entry = _program(tiles, tl.cdiv(DIM, PIECE), shape.heads)
    i = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    columns = piece * PIECE + tl.arange(0, PIECE)
    q_matrix = _matrix(q, entry, head)
    k_matrix = _matrix(k, entry, head // shape.group)
    v_matrix = _matrix(v, entry, head // shape.group)
    o_matrix = _matrix(d_o, entry, head)
    first_q = _load(q, q_matrix, i, shape.length_q, tl.arange(0, PIECE), DIM)
    first_o = _load(d_o, o_matrix, i, shape.length_q, tl.arange(0, PIECE_V), DIM_V)

    gradient = tl.zeros((BLOCK_Q, PIECE), dtype=tl.float32)
    begin, end = _keys_of(tile * BLOCK_Q, shape, BLOCK_Q)
    for start in range(begin, end, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        products = _products(
            first_q, q, q_matrix, i, shape.length_q, k, k_matrix, j, shape.length_k, DIM, PIECE, PRECISION
        )
        products_v = _products(
            first_o, d_o, o_matrix, i, shape.length_q, v, v_matrix, j, shape.length_k,
            DIM_V, PIECE_V, PRECISION,
        )  # fmt: skip
        _, _, d_products = _weights_again(
            products, products_v, statistics, i[:, None], j[None, :], entry, head, score, shape
        )
        keys = _load(k, k_matrix, j, shape.length_k, columns, DIM)
        gradient = _dot(d_products.to(keys.dtype), keys, gradient, PRECISION)
    d_q_matrix = _matrix(d_q, entry, head)
    _store(d_q, d_q_matrix, i, shape.length_q, columns, DIM, gradient * score.scale)


@triton.jit(do_not_specialize=["shape", "tiles"])
def backward_kv(
    q, k, v, d_o, statistics, d_k, d_v, score, shape, tiles,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PIECE: tl.constexpr, PIECE_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys and one piece of the columns of dK and dV, over all queries of all heads that share
    these keys."""
    pieces = max(tl.cdiv(DIM, PIECE), tl.cdiv(DIM_V, PIECE_V))
    tile, piece, shared, entry = _program(tiles, pieces, shape.heads // shape.group)
    j = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    columns = piece * PIECE + tl.arange(0, PIECE)
    columns_v = piece * PIECE_V + tl.arange(0, PIECE_V)
    k_matrix = _matrix(k, entry, shared)
    v_matrix = _matrix(v, entry, shared)
    first_k = _load(k, k_matrix, j, shape.length_k, tl.arange(0, PIECE), DIM)
    first_v = _load(v, v_matrix, j, shape.length_k, tl.arange(0, PIECE_V), DIM_V)

    gradient_k = tl.zeros((BLOCK_K, PIECE), dtype=tl.float32)
    gradient_v = tl.zeros((BLOCK_K, PIECE_V), dtype=tl.float32)
    begin, end = _queries_of(tile * BLOCK_K, shape, BLOCK_K)
    for member in range(shape.group):
        head = shared * shape.group + member
        q_matrix = _matrix(q, entry, head)
        o_matrix = _matrix(d_o, entry, head)
        for start in range(begin, end, BLOCK_Q):
            i = start + tl.arange(0, BLOCK_Q)
            products = _products(
                first_k, k, k_matrix, j, shape.length_k, q, q_matrix, i, shape.length_q,
                DIM, PIECE, PRECISION,
            )  # fmt: skip
            products_v = _products(
                first_v, v, v_matrix, j, shape.length_k, d_o, o_matrix, i, shape.length_q,
                DIM_V, PIECE_V, PRECISION,
            )  # fmt: skip
            weights, _, d_products = _weights_again(
                products, products_v, statistics, i[None, :], j[:, None], entry, head, score, shape
            )
            queries = _load(q, q_matrix, i, shape.length_q, columns, DIM)
            d_out = _load(d_o, o_matrix, i, shape.length_q, columns_v, DIM_V)
            gradient_k = _dot(d_products.to(queries.dtype), queries, gradient_k, PRECISION)
            gradient_v = _dot(weights.to(d_out.dtype), d_out, gradient_v, PRECISION)
    if d_k is not None:
        d_k_matrix = _matrix(d_k, entry, shared)
        _store(d_k, d_k_matrix, j, shape.length_k, columns, DIM, gradient_k * score.scale)
    if d_v is not None:
        _store(d_v, _matrix(d_v, entry, shared), j, shape.length_k, columns_v, DIM_V, gradient_v)


@triton.jit(do_not_specialize=["shape", "extents"])
def backward_mask(
    q, k, v, d_o, statistics, d_mask, score, shape, extents,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PIECE: tl.constexpr, PIECE_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the mask's gradient: the sum of dS over everything that the mask broadcasts to.

    extents are the mask's own, each 1 or that of the scores.
    """
    mask_batch, mask_heads, mask_q, mask_k = extents
    tiles_k = tl.cdiv(mask_k, BLOCK_K)
    tiles_q = tl.cdiv(mask_q, BLOCK_Q)
    tile_k, tile_q, mask_head, mask_entry = _program(tiles_k, tiles_q, mask_heads)
    # Where the mask has extent 1, one tile of it stands for every tile of the scores.
    over_k = tl.where(mask_k == 1, tl.cdiv(shape.length_k, BLOCK_K), 1)
    over_q = tl.where(mask_q == 1, tl.cdiv(shape.length_q, BLOCK_Q), 1)
    over_heads = shape.heads // mask_heads
    over_batch = shape.batch // mask_batch

    total = tl.zeros((BLOCK_Q, BLOCK_K), dtype=tl.float32)
    for number in range(over_k * over_q * over_heads * over_batch):
        j = (tile_k + number % over_k) * BLOCK_K + tl.arange(0, BLOCK_K)
        rest = number // over_k
        i = (tile_q + rest % over_q) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        rest = rest // over_q
        head = mask_head + rest % over_heads
        entry = mask_entry + rest // over_heads
        q_matrix = _matrix(q, entry, head)
        o_matrix = _matrix(d_o, entry, head)
        first_q = _load(q, q_matrix, i, shape.length_q, tl.arange(0, PIECE), DIM)
        first_o = _load(d_o, o_matrix, i, shape.length_q, tl.arange(0, PIECE_V), DIM_V)
        products = _products(
            first_q, q, q_matrix, i, shape.length_q,
            k, _matrix(k, entry, head // shape.group), j, shape.length_k, DIM, PIECE, PRECISION,
        )  # fmt: skip
        products_v = _products(
            first_o, d_o, o_matrix, i, shape.length_q,
            v, _matrix(v, entry, head // shape.group), j, shape.length_k, DIM_V, PIECE_V, PRECISION,
        )  # fmt: skip
        _, d_scores, _ = _weights_again(
            products, products_v, statistics, i[:, None], j[None, :], entry, head, score, shape
        )
        total += d_scores

    if mask_q == 1:
        total = tl.zeros_like(total) + tl.sum(total, 0)[None, :]
    if mask_k == 1:
        total = tl.zeros_like(total) + tl.sum(total, 1)[:, None]
    i = tile_q * BLOCK_Q + tl.arange(0, BLOCK_Q)
    j = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    _store(d_mask, _matrix(d_mask, mask_entry, mask_head), i, mask_q, j, mask_k, total)
