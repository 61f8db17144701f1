"""Fused operators, each with a reference in plain torch.

Where a function's tensors lie on an NPU it calls the operator torch_npu has for it; anywhere else
it computes the same in plain torch. Arguments that make no sense are refused everywhere; the limits
of an NPU's operator are checked where that operator is called, before it is: outside them its
result is undefined, or CANN's error names no argument. They are those documented with torch_npu
2.13.0 (`torch_npu/_op_plugin_docs.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

Layout = Literal["BNSD", "BSND", "SBND", "TND"]


class OperatorError(ValueError):
    """An operator cannot compute this, and nothing was computed; the message says what it takes."""


def _on_npu(operator: str, *tensors: Tensor) -> bool:
    """Whether the operator's tensors lie on an NPU; they must lie on one device."""
    devices = {str(tensor.device) for tensor in tensors}
    _need(operator, len(devices) == 1, f"its tensors lie on {sorted(devices)}, not on one device")
    return tensors[0].device.type == "npu"


def _refused(operator: str, reason: str) -> OperatorError:
    return OperatorError(f"{operator}: {reason}; nothing was computed")


def _need(operator: str, condition: bool, otherwise: str) -> None:
    if not condition:
        raise _refused(operator, otherwise)


def _need_types(operator: str, *tensors: Tensor) -> None:
    """What every operator here takes on an NPU: one type, and one of three."""
    import torch

    types = {tensor.dtype for tensor in tensors}
    _need(
        operator,
        len(types) == 1 and types <= {torch.float32, torch.float16, torch.bfloat16},
        f"its tensors are {sorted(map(str, types))}, but must all be float32, float16 or bfloat16",
    )


# --- rotary embedding -----------------------------------------------------------------------------


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    config: Any,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    cp_group: ProcessGroup | None = None,
) -> Tensor:
    """Megatron's function of this name (megatron-core 0.16.1, rope_utils.py), by `rotary`.

    t           queries or keys: without cu_seqlens in four dimensions, Megatron's [S, B, N, D] or
                another layout that freqs has too; with it [T, N, D], this context parallel rank's
    freqs       the phase in radians, float32; its last dimension is how many features are turned.
                With cu_seqlens [S, 1, 1, D]: for each position, or, where S is cu_seqlens[-1], for
                each token of the packed batch
    config      its rotary_interleaved (pairs are neighbours, not a half apart) and
                multi_latent_attention (neighbours are first parted into halves) count
    cu_seqlens  [0, ...]: where packed sequences end, before context parallelism parts them
    mscale      factor of the result
    cp_group    the context parallel group of packed sequences, Megatron's own if None; rank r of n
                has the parts r and 2n - 1 - r of each sequence's 2n

    Raises `OperatorError` where the phase is not float32, lengths do not fit, or `rotary` raises.
    """
    import torch

    _need(
        "apply_rotary_pos_emb",
        freqs.dtype in (torch.float32, torch.float64),
        f"the phase is {freqs.dtype}, which rounds it (bfloat16 by 1.27 rad at position 1000); "
        f"keep freqs in float32",
    )
    if cu_seqlens is None:
        return _rotate_part(t, freqs, config, mscale)
    if cp_group is None:
        from megatron.core import parallel_state

        cp_group = parallel_state.get_context_parallel_group()
    positions = _packed_positions(
        cu_seqlens.tolist(), len(t), len(freqs), cp_group.rank(), cp_group.size()
    )
    packed = freqs[positions.to(freqs.device)]
    return _rotate_part(t.unsqueeze(1), packed, config, mscale).squeeze(1)


def _rotate_part(t: Tensor, freqs: Tensor, config: Any, mscale: float) -> Tensor:
    import torch

    size = freqs.shape[-1]
    turned, rest = t[..., :size], t[..., size:]
    if config.multi_latent_attention:
        turned = torch.cat((turned[..., ::2], turned[..., 1::2]), -1)
    cos, sin = freqs.cos().to(t.dtype), freqs.sin().to(t.dtype)
    turned = rotary(turned, cos, sin, interleaved=config.rotary_interleaved)
    if mscale != 1.0:  # not on cos and sin: the operator takes numbers from -1 to 1
        turned = turned * mscale
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def _packed_positions(bounds: list[int], tokens: int, table: int, rank: int, ranks: int) -> Tensor:
    """The row of freqs, which has `table`, for each of this rank's tokens."""
    import torch

    name = "apply_rotary_pos_emb"
    whole = table == bounds[-1]
    parts = []
    for start, end in pairwise(bounds):
        first = start if whole else 0
        if ranks == 1:
            parts.append(torch.arange(first, first + end - start))
            continue
        part, remainder = divmod(end - start, 2 * ranks)
        _need(
            name,
            not remainder,
            f"a packed sequence of {end - start} tokens has no {2 * ranks} equal parts for "
            f"{ranks} context parallel ranks; pad it",
        )
        front, back = first + rank * part, first + end - start - (rank + 1) * part
        parts += [torch.arange(front, front + part), torch.arange(back, back + part)]
    positions = torch.cat(parts)
    _need(
        name,
        len(positions) == tokens,
        f"cu_seqlens {bounds} leave {len(positions)} tokens to each of {ranks} context parallel "
        f"ranks, but t has {tokens}",
    )
    _need(
        name,
        not len(positions) or int(positions.max()) < table,
        f"cu_seqlens {bounds} need more positions than the {table} of freqs",
    )
    return positions


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """cos·x + sin·rotate(x), where rotate turns each pair (a, b) of features into (-b, a).

    A pair is a feature and the one half a head further, or its neighbour if `interleaved`. The
    NPU's operator is npu_rotary_mul.

    x         [B, N, S, D], [B, S, N, D] or [S, B, N, D]
    cos, sin  of x's type and in its layout; 1 in the place of N, or of B and N, is for all of them

    Raises `OperatorError` where shapes or types do not fit; and on an NPU, where D is not less than
    896, B or N (B·N if interleaved) not less than 1000, or B·N more than 1024 and the gradient of
    cos and sin is wanted.
    """
    import torch

    name = "npu_rotary_mul"
    npu = _on_npu(name, x, cos, sin)
    shapes = f"x {list(x.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}"
    _need(
        name,
        x.dim() == cos.dim() == 4
        and cos.shape == sin.shape
        and cos.shape[-1] == x.shape[-1]
        and all(c in (1, n) for c, n in zip(cos.shape, x.shape, strict=True)),
        f"{shapes}: four dimensions, and cos and sin that broadcast to x, are needed",
    )
    _need(name, x.shape[-1] % 2 == 0, f"{shapes}: a head of {x.shape[-1]} features has no pairs")
    _need(
        name,
        x.dtype == cos.dtype == sin.dtype,
        f"x is {x.dtype}, cos {cos.dtype} and sin {sin.dtype}: compute the phase in float32, then "
        f"cast cos and sin to x's type",
    )
    if npu:
        import torch_npu

        _need_types(name, x, cos, sin)
        wants_phase = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
        _check_rotary_limits(x, cos, interleaved, wants_phase)
        mode = "interleave" if interleaved else "half"
        turned: Tensor = torch_npu.npu_rotary_mul(x, cos, sin, rotary_mode=mode)
        return turned
    if interleaved:
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    return x * cos + rotated * sin


def _check_rotary_limits(x: Tensor, cos: Tensor, interleaved: bool, wants_phase: bool) -> None:
    """Refuse what no layout of npu_rotary_mul allows; the operator tells them by cos's shape."""
    name = "npu_rotary_mul"
    _need(name, x.shape[-1] < 896, f"a head of {x.shape[-1]} features; it takes less than 896")
    against = {}
    for layout in ("BNSD", "BSND", "SBND"):
        batch, heads, positions = (x.shape[layout.index(axis)] for axis in "BNS")
        of_batch, of_heads, of_positions = (cos.shape[layout.index(axis)] for axis in "BNS")
        if of_positions != positions:
            against[layout] = "cos has no value for each position"
        elif interleaved and (of_batch, of_heads) != (1, 1):
            against[layout] = "interleaved, cos must be the same for batch and heads"
        elif of_heads != 1 and of_batch != batch:
            against[layout] = "cos is for each head, so it must be for each batch entry too"
        elif interleaved and batch * heads >= 1000:
            against[layout] = f"{batch} x {heads} heads, interleaved; it takes less than 1000"
        elif batch >= 1000 or heads >= 1000:
            against[layout] = f"batch {batch} and {heads} heads; it takes less than 1000 of each"
        elif wants_phase and batch * heads > 1024:
            against[layout] = f"{batch} x {heads} heads; for cos's gradient it takes at most 1024"
        else:
            return
    reasons = ", ".join(f"as {layout}: {reason}" for layout, reason in against.items())
    raise _refused(name, f"x {list(x.shape)} with cos {list(cos.shape)} fits no layout ({reasons})")


# --- attention ------------------------------------------------------------------------------------


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: Layout,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
    ends_q: Sequence[int] | None = None,
    ends_kv: Sequence[int] | None = None,
) -> Tensor:
    """softmax(scale · query·keyᵀ)·value for training, each query's heads sharing a key's head.

    The NPU's operator is npu_fusion_attention; elsewhere it is torch's own
    scaled_dot_product_attention.

    layout  of query, key, value and the result: "BNSD", "BSND", Megatron's "SBND", or "TND", which
            is sequences packed one after the other. Key and value may be of another length and
            have fewer heads, by a whole factor; value may have smaller ones
    causal  the last query sees every key, each one before it one key less. (torch's is_causal is
            that only where there are as many keys as queries)
    mask    bool, True where a query must not see a key: the operator's sense, not torch's.
            [Sq, Skv], [1 or B, 1, Sq, Skv] or [B, N, Sq, Skv]; with TND [longest Sq, longest Skv].
            A query that sees no key gives 0
    scale   1/√D if None; the operator's own default is 1
    ends_q, ends_kv  with TND: the row after each sequence's last, ints on the host, as in
            `cu_seqlens[1:].tolist()`; ends_kv is ends_q if None

    Raises `OperatorError` where arguments do not fit; and on an NPU, where there are more than 768
    features a head, 256 heads or 1024 packed sequences.
    """
    name = "npu_fusion_attention"
    npu = _on_npu(name, query, key, value, *([] if mask is None else [mask]))
    _need(name, not causal or mask is None, "causal says which mask; pass it or the mask")
    _check_shapes(query, key, value, layout)
    lengths = _lengths(query, key, layout, ends_q, ends_kv)
    _need(
        name,
        not causal or all(q <= k for q, k in lengths),
        f"causal attention of (queries, keys) {lengths}: more queries than keys, so some see none",
    )
    if mask is not None:
        _check_mask(mask, query, layout, lengths)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    attend = _attention_npu if npu else _attention_torch
    return attend(query, key, value, layout, causal, mask, scale, lengths)


_HEADS = {"BNSD": 1, "BSND": 2, "SBND": 2, "TND": 1}  # which dimension is N
_LENGTH = {"BNSD": 2, "BSND": 1, "SBND": 0, "TND": 0}  # and which is S or T


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, layout: str) -> None:
    name = "npu_fusion_attention"
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    _need(name, layout in _HEADS, f"layout {layout!r} is none of {', '.join(_HEADS)}")
    _need(
        name,
        query.dim() == key.dim() == value.dim() == len(layout),
        f"{shapes} are not in layout {layout}",
    )
    _need(
        name,
        key.shape[:-1] == value.shape[:-1] and query.dtype == key.dtype == value.dtype,
        f"{shapes}: key and value must agree, and all three have one type",
    )
    heads, shared = query.shape[_HEADS[layout]], key.shape[_HEADS[layout]]
    _need(
        name,
        shared > 0 and heads % shared == 0,
        f"{shapes}: {heads} heads are no multiple of the {shared} of key and value",
    )
    if layout != "TND":
        axis = layout.index("B")
        _need(name, query.shape[axis] == key.shape[axis], f"{shapes}: the batches differ")
    _need(
        name,
        0 < value.shape[-1] <= key.shape[-1] == query.shape[-1],
        f"{shapes}: heads of query and key must be equal, those of value no larger",
    )


def _lengths(
    query: Tensor,
    key: Tensor,
    layout: str,
    ends_q: Sequence[int] | None,
    ends_kv: Sequence[int] | None,
) -> list[tuple[int, int]]:
    """(queries, keys) of each sequence: one pair for all unless packed."""
    name = "npu_fusion_attention"
    if layout != "TND":
        _need(
            name,
            ends_q is None and ends_kv is None,
            f"ends_q and ends_kv are for layout TND, not {layout}",
        )
        return [(query.shape[_LENGTH[layout]], key.shape[_LENGTH[layout]])]
    if ends_q is None:
        raise _refused(name, "layout TND needs ends_q: cu_seqlens[1:].tolist()")
    queries = _lengths_between("ends_q", ends_q, len(query))
    keys = _lengths_between("ends_kv", ends_q if ends_kv is None else ends_kv, len(key))
    _need(
        name,
        len(queries) == len(keys),
        f"{len(queries)} sequences of queries and {len(keys)} of keys",
    )
    return list(zip(queries, keys, strict=True))


def _lengths_between(argument: str, ends: Sequence[int], rows: int) -> list[int]:
    name = "npu_fusion_attention"
    _need(
        name,
        isinstance(ends, list | tuple) and all(type(end) is int for end in ends),
        f"{argument} must be ints on the host: cu_seqlens[1:].tolist()",
    )
    _need(
        name,
        bool(ends) and list(ends) == sorted(ends) and ends[-1] == rows,
        f"{argument}={list(ends)} must be cumulative and end at the {rows} rows there are",
    )
    _need(
        name,
        ends[0] > 0,
        f"{argument}={list(ends)} begins with 0, but holds where sequences end, and the first "
        f"cannot be empty: cu_seqlens[1:].tolist()",
    )
    return [end - start for start, end in pairwise((0, *ends))]


def _check_mask(mask: Tensor, query: Tensor, layout: str, lengths: list[tuple[int, int]]) -> None:
    import torch

    name = "npu_fusion_attention"
    longest = [max(n) for n in zip(*lengths, strict=True)]
    allowed = [longest]
    if layout != "TND":
        batch, heads = query.shape[layout.index("B")], query.shape[_HEADS[layout]]
        allowed += [[b, n, *longest] for b, n in ((1, 1), (batch, 1), (batch, heads))]
    _need(
        name,
        mask.dtype == torch.bool and list(mask.shape) in allowed,
        f"mask {mask.dtype} {list(mask.shape)} must be bool and one of {allowed}",
    )


def _attention_npu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: str,
    causal: bool,
    mask: Tensor | None,
    scale: float,
    lengths: list[tuple[int, int]],
) -> Tensor:
    import torch_npu

    name = "npu_fusion_attention"
    heads, size = query.shape[_HEADS[layout]], query.shape[-1]
    _need_types(name, query, key, value)
    _need(name, size <= 768, f"a head of {size} features; it takes at most 768")
    _need(name, heads <= 256, f"{heads} heads; it takes at most 256")
    packed: dict[str, list[int]] = {}
    if layout == "TND":
        _need(name, len(lengths) <= 1024, f"{len(lengths)} packed sequences; it takes at most 1024")
        packed["actual_seq_qlen"] = list(accumulate(queries for queries, _ in lengths))
        packed["actual_seq_kvlen"] = list(accumulate(keys for _, keys in lengths))
    if layout == "SBND":  # the operator has it with heads and features as one
        query, key, value = (tensor.flatten(2) for tensor in (query, key, value))
    output: Tensor = torch_npu.npu_fusion_attention(
        query,
        key,
        value,
        heads,
        "SBH" if layout == "SBND" else layout,
        atten_mask=_triangle(query.device) if causal else mask,
        scale=scale,
        # 3: causal from the lower right; 1: the mask as it is. Without a mask neither counts.
        sparse_mode=3 if causal else 1,
        # 2: a query that sees no key is computed as such; without, its result is not defined.
        inner_precise=0 if mask is None else 2,
        **packed,
    )[0]
    return output.view(*output.shape[:2], heads, -1) if layout == "SBND" else output


@functools.cache
def _triangle(device: torch.device) -> Tensor:
    """The mask by which the operator knows causal attention of any length (4 MiB a device)."""
    import torch

    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


def _attention_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: str,
    causal: bool,
    mask: Tensor | None,
    scale: float,
    lengths: list[tuple[int, int]],
) -> Tensor:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def attend(qkv: Iterable[Tensor], queries: int, keys: int) -> Tensor:
        q, k, v = qkv
        kept = None if mask is None else ~mask[..., :queries, :keys]
        square = causal and queries == keys  # then torch means the same, and can fuse it
        if causal and not square:
            kept = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=kept,
            is_causal=square,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )

    if layout == "TND":
        sizes = [list(n) for n in zip(*lengths, strict=True)]
        parts = (
            torch.split(t, n) for t, n in ((query, sizes[0]), (key, sizes[1]), (value, sizes[1]))
        )
        outputs = [
            attend((t.transpose(0, 1)[None] for t in qkv), *pair)
            for *qkv, pair in zip(*parts, lengths, strict=True)
        ]
        return torch.cat([output[0].transpose(0, 1) for output in outputs])
    there = [layout.index(axis) for axis in "BNSD"]
    output = attend((t.permute(there) for t in (query, key, value)), *lengths[0])
    return output.permute(["BNSD".index(axis) for axis in layout])


# --- normalisation and activation -----------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Computes x / √(mean(x²) + eps) · weight over weight's dimensions, x's last, in float32.

    The NPU's operator is npu_rms_norm. Raises `OperatorError` where weight does not fit x in shape,
    type or device.
    """
    name = "npu_rms_norm"
    npu = _on_npu(name, x, weight)
    _need(
        name,
        0 < weight.dim() <= x.dim() and x.shape[-weight.dim() :] == weight.shape,
        f"weight {list(weight.shape)} is not the end of x {list(x.shape)}",
    )
    _need(
        name,
        x.dtype == weight.dtype,
        f"x is {x.dtype} and weight {weight.dtype}: both must be of one type",
    )
    if npu:
        import torch_npu

        _need_types(name, x)
        _need(name, x.dim() <= 8, f"x has {x.dim()} dimensions; it takes at most 8")
        normed: Tensor = torch_npu.npu_rms_norm(x, weight, epsilon=eps)[0]
        return normed
    wide = x.float()
    over = list(range(x.dim() - weight.dim(), x.dim()))
    return (wide * (wide.square().mean(over, True) + eps).rsqrt() * weight.float()).to(x.dtype)


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) · second half, along dim. The NPU's operator is npu_swiglu.

    Raises `OperatorError` where the dimension has no two halves.
    """
    from torch.nn.functional import silu

    name = "npu_swiglu"
    _need(
        name,
        -x.dim() <= dim < x.dim() and x.shape[dim] % 2 == 0,
        f"x {list(x.shape)} has no two halves along dimension {dim}",
    )
    if _on_npu(name, x):
        import torch_npu

        _need_types(name, x)
        _need(name, x.dim() <= 8, f"x has {x.dim()} dimensions; it takes at most 8")
        activated: Tensor = torch_npu.npu_swiglu(x, dim=dim)
        return activated
    first, second = x.chunk(2, dim)
    return silu(first) * second


# --- bias, dropout, residual ----------------------------------------------------------------------


def bias_dropout_add_fused_train(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float
) -> Tensor:
    """Megatron's function of this name (0.16.1), not compiled: residual + dropout(x + bias).

    CANN has no operator for the three steps, and what jit_fuser would compile them with does not
    exist on an NPU: they run one by one. The result is of x's type, whatever residual's is.
    """
    return _bias_dropout_add(x_with_bias, residual, prob, training=True)


def bias_dropout_add_fused_inference(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float
) -> Tensor:
    """Megatron's function of this name (0.16.1), not compiled: residual + x + bias; no dropout.

    As Megatron's, it computes in x's memory where no tensor requires a gradient.
    """
    return _bias_dropout_add(x_with_bias, residual, prob, training=False)


def _bias_dropout_add(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float, training: bool
) -> Tensor:
    from torch.nn.functional import dropout

    x, bias = x_with_bias
    tensors = [x, residual] if bias is None else [x, residual, bias]
    _on_npu("bias_dropout_add", *tensors)
    residual = residual.to(x.dtype)
    if not training and not any(tensor.requires_grad for tensor in tensors):
        if bias is not None:
            x.add_(bias)
        return x.add_(residual)
    if bias is not None:
        x = x + bias
    return residual + dropout(x, p=prob, training=training)
