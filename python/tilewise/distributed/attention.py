"""Attention over a sequence that several ranks hold together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from tilewise._arguments import Alignment, Precision, Window, tf32_allowed
from tilewise._errors import DENSE_NAMES, VARLEN_NAMES, reject, translated
from tilewise._scalars import flag_of
from tilewise._seeds import draw_seed
from tilewise.distributed import checks
from tilewise.distributed.agreement import Given, agree, hear
from tilewise.distributed.blocks import Blocks
from tilewise.distributed.function import Attention, Call
from tilewise.distributed.gather import Gather
from tilewise.distributed.heads import HeadExchange, parts_of, share_heads
from tilewise.distributed.layout import Layout, documents, layout_of
from tilewise.distributed.messages import Mailbox, Mesh, boxes_of
from tilewise.distributed.pieces import Heads, Problem
from tilewise.distributed.plan import INFINITE, Band, Grid, Plan, Rows, in_order, rows_of_ranks
from tilewise.distributed.ring import Ring

Method = Literal["ring", "ulysses", "hybrid", "gather"]
METHODS = ("ring", "ulysses", "hybrid", "gather")
Function = TypeVar("Function", bound=Callable[..., Any])


def _outside_graphs(function: Function) -> Function:
    """Runs between two graphs where torch.compile traces: messages are no part of one.

    torch.compiler.disable does that, but loads the compiler at once.
    """

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*arguments, **options)
        return function(*arguments, **options)

    return cast(Function, call)


@_outside_graphs
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mesh: Mesh = None,
    method: Method = "ring",
    layout: Layout | str = "contiguous",
    key_layout: Layout | str | None = None,
    alignment: Alignment = "top_left",
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    logit_scale: Tensor | None = None,
    block_mask: Any = None,
    kernel: str = "auto",
    deterministic: bool = False,
    precision: Precision = "standard",
    return_lse: bool = False,
    validate: bool = True,
) -> Any:
    """`tilewise.attention` of a sequence that is spread over the ranks of a mesh. All of them call it.

    Args:
        query: this rank's queries, [B, Hq, Sq of this rank, D]; or a DTensor, sharded along dimension 2.
            Then key and value are DTensors, too; alibi_slopes, sinks and logit_scale may be, replicated or
            sharded by heads.
        key: this rank's keys, [B, Hkv, Sk of this rank, D]. So is value, with Dv.
        attn_mask: rows of this rank's queries (or one for all), and all keys in the order of the sequence.
        block_mask: of the whole sequence, the same on every rank; for DTensors, of this rank's entries and
            heads.
        mesh: a DeviceMesh of one dimension, or for "hybrid" of two (ring, heads); a process group; or all.
        method: how queries and keys meet. "ring": keys go round, the least memory. "gather": all keys that a
            rank sees are brought to it at once. "ulysses": each rank takes all positions of some heads.
            "hybrid": heads within the mesh's second dimension, a ring along the first.
        layout: which tokens each rank has: a Layout, or "contiguous", "zigzag" or "striped".
        key_layout: likewise of keys, where they are others than the queries' tokens.
        validate: whether ranks compare what they were given, with a small message before the others. Without
            it all must have as many tokens, and the same seed for dropout.

    The others are those of `tilewise.attention` and mean the same for the sequence as a whole: the result is
    that of one process. dropout is drawn from rank 0's generator.

    Returns:
        out of this rank's queries, or (out, lse). Gradients of query, key, value and rows of the mask are
        those of one process. Of what every rank has a copy (sinks, logit_scale, a mask row for all queries)
        each rank gets the share of its own queries or heads: sum them over the mesh, as gradients of weights.
        The gradient of a DTensor is the sum already.
    """
    of_heads = dict(alibi_slopes=alibi_slopes, sinks=sinks, logit_scale=logit_scale)
    options = dict(
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        alignment=alignment,
        window=window,
        softcap=softcap,
        kernel=kernel,
        deterministic=deterministic,
        precision=precision,
    )
    return _attend(
        *((query, key, value), attn_mask, None, enable_gqa, options, of_heads),
        *(mesh, method, (layout, key_layout), return_lse, validate, block_mask),
    )


@_outside_graphs
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = True,
    *,
    mesh: Mesh = None,
    method: Method = "ring",
    layout: Layout | str = "documents",
    key_layout: Layout | str | None = None,
    alignment: Alignment = "top_left",
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    logit_scale: Tensor | None = None,
    kernel: str = "auto",
    deterministic: bool = False,
    precision: Precision = "standard",
    return_lse: bool = False,
    validate: bool = True,
) -> Any:
    """`attention` of packed sequences: query [Sq of this rank, Hq, D], key and value likewise.

    cu_seqlens_q and cu_seqlens_k are those of the whole, the same on every rank; the latter is the former
    unless given. The layout is of the packed tokens; "documents" cuts every sequence in zigzag.

    Returns:
        out [Sq of this rank, Hq, Dv], or (out, lse) with lse [Hq, Sq of this rank].
    """
    of_heads = dict(alibi_slopes=alibi_slopes, sinks=sinks, logit_scale=logit_scale)
    options = dict(
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        alignment=alignment,
        window=window,
        softcap=softcap,
        kernel=kernel,
        deterministic=deterministic,
        precision=precision,
    )
    return _attend(
        *(
            (query, key, value),
            None,
            (cu_seqlens_q, cu_seqlens_k),
            enable_gqa,
            options,
            of_heads,
            mesh,
            method,
        ),
        *((layout, key_layout), return_lse, validate),
    )


def _attend(
    rows: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    cumulative: tuple[Any, Any] | None,
    enable_gqa: bool,
    options: dict[str, Any],
    of_heads: dict[str, Tensor | None],
    mesh: Mesh,
    method: str,
    layouts: tuple[Any, Any],
    return_lse: bool,
    validate: bool,
    block_mask: Any = None,
) -> Any:
    """Attention of both kinds: `cumulative` says where packed sequences begin."""
    query, packed = rows[0], cumulative is not None
    boxes = boxes_of(checks.mesh_of(query, mesh))
    settings: dict[str, Any] = {}
    starts: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def look() -> Given:
        nonlocal rows, starts
        _check_method(method, len(boxes))
        checks.check_block_mask_kind(block_mask)
        if cumulative is None:
            rows = checks.local_of(*rows)
        else:
            starts = checks.starts_of(*cumulative)
        settings.update(checks.settings_of(**options))
        checks.check_call(query, rows, mask, of_heads, settings, enable_gqa, starts)
        with_lse = flag_of("return_lse", return_lse)
        masks = (mask, block_mask is not None)
        return _given(rows, masks, settings, (*layouts, starts), method, of_heads, with_lse)

    everyone = agree(boxes, look, validate)
    for box in boxes:
        box.connect(rows[0].device)
    of_rows = _layouts(*layouts, everyone, starts)
    if starts is None:
        starts = ((0, of_rows[0].length), (0, of_rows[1].length))
        checks.check_mask_keys(mask, of_rows[1].length)
    blocks = None
    if block_mask is not None:
        blocks = _agreed_blocks(boxes, block_mask, rows, of_rows, validate)
    if packed:
        rows = (rows[0].transpose(0, 1)[None], rows[1].transpose(0, 1)[None], rows[2].transpose(0, 1)[None])
    call = _call(rows, boxes, method, of_rows, starts, settings, everyone[0].seed, packed, blocks)
    call.mask_of_rows, call.with_lse = _mask_of_rows(everyone), bool(return_lse)
    local = (checks.local_per_head(x, query) for x in of_heads.values())
    call.boxes = boxes
    try:
        out, lse = Attention.apply(*rows, mask, *local, call)
    except RuntimeError as error:
        raise translated(error, {}, VARLEN_NAMES if packed else DENSE_NAMES) from error
    if packed:
        out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    out, lse = checks.like_query(query, out), checks.like_query(query, lse)
    return (out, lse) if return_lse else out


def _check_method(method: str, dimensions: int) -> None:
    if method not in METHODS:
        reject("method", f"one of {', '.join(map(repr, METHODS))}", repr(method))
    wanted = 2 if method == "hybrid" else 1
    if dimensions != wanted:
        reject("mesh", f"{wanted} dimension{'s' * (wanted > 1)} for method {method!r}", dimensions)


def _agreed_blocks(
    boxes: Sequence[Mailbox],
    mask: Any,
    rows: tuple[Tensor, ...],
    layouts: tuple[Layout, Layout],
    validate: bool,
) -> Blocks:
    """A block mask that all ranks have, as what is sent depends on it."""
    found: list[Blocks] = []

    def look() -> str:
        found.append(checks.blocks_of_whole(mask, rows, layouts[0].length, layouts[1].length))
        return found[0].digest if validate else ""

    digests = hear(boxes, look, validate)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            reject("block_mask", "the same on all ranks, as on rank 0", f"another one on rank {rank}")
    return found[0]


def _mask_of_rows(everyone: Sequence[Given]) -> bool:
    """Whether the mask has a row for each query; else it has one for all. A rank may have a single query."""
    lengths, rows = [x.length_q for x in everyone], [x.mask_rows for x in everyone]
    if rows != lengths and any(n != 1 for n in rows):
        reject("attn_mask", f"one row per query, {lengths}, or one row on every rank", rows)
    return rows == lengths


def _given(
    rows: tuple[Tensor, Tensor, Tensor],
    masks: tuple[Tensor | None, bool],
    settings: dict[str, Any],
    layouts: tuple[Any, ...],
    method: str,
    of_heads: dict[str, Tensor | None],
    with_lse: bool,
) -> Given:
    """What the ranks compare."""
    along = 2 if rows[0].dim() == 4 else 0

    def text(x: Tensor) -> str:
        shape = [n for dim, n in enumerate(x.shape) if dim != along]
        return f"{x.dtype} {shape} apart from its length, on {x.device.type}"

    query, key, value = rows
    seed = None
    if settings["dropout_p"] > 0:
        words = draw_seed(query.device).tolist()
        seed = (words[0], words[1])
    mask, with_blocks = masks
    of_mask, mask_rows = None, 1
    if mask is not None:
        *leading, mask_rows, keys = [1] * (4 - mask.dim()) + list(mask.shape)
        of_mask = (leading, keys, mask.dtype, mask.requires_grad)
    shapes = {
        name: (list(x.shape), x.dtype, getattr(x, "placements", None))
        for name, x in of_heads.items()
        if x is not None
    }
    return Given(
        length_q=query.shape[along],
        length_k=key.shape[along],
        mask_rows=mask_rows,
        seed=seed,
        query=text(query),
        key=text(key),
        value=text(value),
        attn_mask=repr(of_mask),
        block_mask="a mask" if with_blocks else "None",
        layout=repr(layouts),
        method=method,
        options=repr((settings, shapes, f"return_lse={with_lse}")),
    )


def _layouts(
    layout: Layout | str,
    key_layout: Layout | str | None,
    everyone: Sequence[Given],
    starts: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> tuple[Layout, Layout]:
    """Of queries and keys, which the ranks' tensors fit."""
    lengths_q, lengths_k = (tuple(x.length_q for x in everyone), tuple(x.length_k for x in everyone))
    if key_layout is None and not (isinstance(layout, Layout) and lengths_k == layout.lengths):
        key_layout = layout

    def found(layout: Layout | str, lengths: Sequence[int], of: int) -> Layout:
        if starts is not None and layout == "documents":
            return documents(starts[of], len(lengths))
        return layout_of(layout, lengths)

    of_queries = found(layout, lengths_q, 0)
    of_keys = of_queries if key_layout is None else found(key_layout, lengths_k, 1)
    for n, (tensor, name, of, lengths) in enumerate(
        (("query", "layout", of_queries, lengths_q), ("key", "key_layout", of_keys, lengths_k))
    ):
        if len(of.ranks) != len(everyone):
            reject(name, f"a layout for the mesh's {len(everyone)} ranks", f"one for {len(of.ranks)}")
        if of.lengths != lengths:
            reject(tensor, f"lengths {list(of.lengths)} on the ranks, as in {name}", list(lengths))
        if starts is not None and starts[n][-1] != of.length:
            expected = f"a last entry of {of.length}, the tokens of all ranks"
            reject(f"cu_seqlens_{tensor[0]}", expected, starts[n][-1])
    return of_queries, of_keys


@lru_cache(maxsize=64)
def _plan(
    layouts: tuple[Layout, Layout],
    starts: tuple[tuple[int, ...], ...],
    band: Band,
    together: int,
    rank: int,
    grid: Grid | None,
) -> tuple[Plan, list[list[Rows]], list[list[Rows]], tuple[Tensor | None, ...]]:
    """Of a ring whose ranks are `together` ranks of the layouts each: its plan, rows, and their orders."""
    rows, orders = [], []
    for layout, cumulative in zip(layouts, starts, strict=True):
        of_ranks = rows_of_ranks(layout, cumulative)
        groups = [of_ranks[n : n + together] for n in range(0, len(of_ranks), together)]
        merged = [in_order(group) if together > 1 else (None, group[0]) for group in groups]
        rows.append([list(found) for _, found in merged])
        orders.append(merged[rank][0])
    return Plan.of(rank, rows[0], rows[1], band, grid), rows[0], rows[1], tuple(orders)


def _call(
    rows: tuple[Tensor, Tensor, Tensor],
    boxes: tuple[Mailbox, ...],
    method: str,
    layouts: tuple[Layout, Layout],
    starts: tuple[tuple[int, ...], ...],
    settings: dict[str, Any],
    seed: tuple[int, int] | None,
    packed: bool,
    blocks: Blocks | None = None,
) -> Call:
    """How this rank takes part."""
    query, key, _ = rows
    lengths = tuple(
        (end_q - begin_q, end_k - begin_k)
        for begin_q, end_q, begin_k, end_k in zip(
            starts[0][:-1], starts[0][1:], starts[1][:-1], starts[1][1:], strict=True
        )
    )
    left, right = settings["window_left"], 0 if settings["is_causal"] else settings["window_right"]
    band = Band(
        left=INFINITE if left is None else left,
        right=INFINITE if right is None else right,
        shifts=tuple(k - q if settings["bottom_right"] else 0 for q, k in lengths),
    )
    heads_box = boxes[-1] if method in ("ulysses", "hybrid") else None
    ring_box = Mailbox(None) if method == "ulysses" else boxes[0]
    together = 1 if heads_box is None else heads_box.size
    heads = Heads(0, query.shape[1], query.shape[1], query.shape[1] // max(1, key.shape[1]))
    shared = [heads] if heads_box is None else share_heads(heads.whole, heads.group, heads_box.size)
    own = shared[0 if heads_box is None else heads_box.rank]
    grid = None if blocks is None else blocks.grid(own.at)
    plan, queries, keys, orders = _plan(layouts, starts, band, together, ring_box.rank, grid)
    tf32 = query.is_cuda and query.dtype == torch.float32 and tf32_allowed()
    problem = Problem(own, lengths, packed, tuple(dict(settings, allow_tf32=tf32).items()), seed, blocks)
    inner: Ring | Gather
    if method in ("gather", "ulysses"):
        inner = Gather(plan, ring_box, queries[ring_box.rank], keys[ring_box.rank], band, grid)
    else:
        inner = Ring(plan, ring_box)
    of_head = query.shape[0] * (layouts[0].length // ring_box.size)  # queries
    parts = parts_of(own, of_head, query.device)
    if heads_box is None:
        return Call(problem, inner, parts)
    first = ring_box.rank * together
    exchange, key_exchange = (
        HeadExchange(heads_box, layout.lengths[first : first + together], order, query.device)
        for layout, order in zip(layouts, orders, strict=True)
    )
    return Call(problem, inner, parts, exchange, key_exchange, tuple(shared))
