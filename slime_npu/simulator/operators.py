"""Reference kernels for the NPU operators this stack calls, in plain torch.

They take the place of CANN's kernels and of nothing else: torch_npu's schemas, its Meta kernels and
its C++ autograd formulas stay in force, so what reaches a kernel here has passed them, and the
backward operators are called by torch_npu itself. Each kernel computes in float32 and rounds once,
at its result; an NPU's own rounding is not simulated.

What an operator can do and a kernel here cannot (dropout, position biases, prefixes, sinks) is
refused by its name. So is what the operator's documentation leaves undefined, where the shapes and
masks show it. The limits and shapes are those of the docstrings in torch_npu/_op_plugin_docs.py
(2.13.0).
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from slime_npu.simulator import count
from slime_npu.simulator.aten import alias, lift

COMPRESSED = 2048  # side of the triangle that stands for any causal or band mask
LANES = 8  # softmax_max and softmax_sum repeat each number over one 32-byte block
_ELEMENTS = 1 << 24  # attention scores held at a time: 64 MiB

_library: torch.library.Library | None = None


def register() -> None:
    """Register the kernels under PrivateUse1; torch_npu must be imported. Once is enough."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("npu", "IMPL", "PrivateUse1")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, function in _KERNELS.items():
            packet = getattr(torch.ops.npu, name, None)  # older wheels lack some
            if packet is not None:
                _library.impl(name, _kernel(name, packet.default._schema, function))


def _kernel(name: str, schema: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as the kernel of the operator `name`, called as the wheel's schema says.

    The function's positional parameters are the operator's first, its others are matched by name,
    and `**masking` takes those in `_MASKING`. An argument it does not have must be left at the
    schema's default. Results it does not give (seeds, gradients of what is refused) are 0 or empty.
    """
    parameters = inspect.signature(function).parameters.values()
    leading = sum(p.kind is p.POSITIONAL_ONLY for p in parameters)
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        keywords |= _MASKING
    names = [argument.name.replace("tocken", "token") for argument in schema.arguments]
    defaults = {
        n: a.default_value
        for n, a in zip(names, schema.arguments, strict=True)
        if a.has_default_value()
    }
    taken = keywords.union(names[:leading], _WITHOUT_EFFECT)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = {n.replace("tocken", "token"): value for n, value in kwargs.items()}
        given = dict(zip(names, args, strict=False)) | given
        for n in given.keys() - taken:
            if given[n] is not None and given[n] != defaults[n]:
                shown = "a tensor" if isinstance(given[n], Tensor) else repr(given[n])
                raise NotImplementedError(
                    f"{name}: {n}={shown} is not simulated, and nothing was computed; leave it at "
                    f"{defaults[n]!r}, or run this on an NPU"
                )
        given = defaults | given
        device = args[0].device
        try:
            host = {n: _on_host(n, value, device) for n, value in given.items()}
            result = function(
                *(host[n] for n in names[:leading]),
                **{n: host[n] for n in keywords if n in host},
            )
        except _Refused as error:
            raise ValueError(f"{name}: {error}; nothing was computed") from None
        count(name)
        if isinstance(result, Tensor):
            return lift(result, device)
        rest = schema.returns[len(result) :]
        return (
            *(lift(tensor, device) for tensor in result),
            *(0 if r.type.kind() == "IntType" else torch.empty(0, device=device) for r in rest),
        )

    return kernel


def _on_host(name: str, value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    _need(value.device == device, f"{name} is on {value.device}, the first argument on {device}")
    return alias(value)


# What says which queries see which keys; older wheels have no softmax_layout.
_MASKING = {
    "atten_mask",
    "sparse_mode",
    "pre_tokens",
    "next_tokens",
    "actual_seq_qlen",
    "actual_seq_kvlen",
    "softmax_layout",
}
# What steers an NPU's speed, or the dropout that is refused anyway, and changes no number here.
_WITHOUT_EFFECT = {
    "inner_precise",
    "softmax_in",
    "gen_mask_parallel",
    "sync",
    "seed",
    "offset",
    "numels",
}


class _Refused(Exception):
    """What the operator's documentation does not allow; the operator's name is added above."""


def _need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise _Refused(otherwise)


# --- rotary embedding -----------------------------------------------------------------------------


def _rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, /, *, rotary_mode: str) -> Tensor:
    """cos·x + sin·rotate(x), where rotate turns each pair (a, b) of features into (-b, a)."""
    _check_rotary(x, cos, sin, rotary_mode)
    wide = x.float()
    return (cos.float() * wide + sin.float() * _rotate(wide, rotary_mode)).to(x.dtype)


def _rotary_mul_backward(
    grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor, /, *, rotary_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, cos and sin, all in x's type; rotate is its own inverse up to its sign."""
    _check_rotary(x, cos, sin, rotary_mode)
    dy, wide = grad.float(), x.float()
    dx = cos.float() * dy - _rotate(sin.float() * dy, rotary_mode)
    dcos = (dy * wide).sum_to_size(cos.shape)
    dsin = (dy * _rotate(wide, rotary_mode)).sum_to_size(sin.shape)
    return dx.to(x.dtype), dcos.to(x.dtype), dsin.to(x.dtype)


def _rotate(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _check_rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> None:
    _need(mode in ("half", "interleave"), f"rotary_mode={mode!r} is neither half nor interleave")
    _need(
        x.dim() == cos.dim() == sin.dim() == 4 and cos.shape == sin.shape,
        f"input {list(x.shape)}, r1 {list(cos.shape)} and r2 {list(sin.shape)} must have four "
        f"dimensions, r1 and r2 the same",
    )
    _need(
        cos.shape[-1] == x.shape[-1]
        and all(c in (1, n) for c, n in zip(cos.shape, x.shape, strict=True)),
        f"r1 {list(cos.shape)} does not broadcast to input {list(x.shape)}",
    )
    _need(
        x.shape[-1] % 2 == 0 and x.shape[-1] < 896,
        f"the head size {x.shape[-1]} must be even and less than 896",
    )


# --- normalisation and activation -----------------------------------------------------------------


def _rms_norm(x: Tensor, gamma: Tensor, /, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """Gives x / rms(x) · gamma over gamma's dimensions, and 1 / rms in float32, dimensions kept."""
    over = _normalised(x, gamma)
    wide = x.float()
    rstd = (wide.square().mean(over, keepdim=True) + epsilon).rsqrt()
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


def _rms_norm_backward(
    grad: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor, /
) -> tuple[Tensor, Tensor]:
    """Gradients of x in its type and of gamma in float32, from the forward's 1 / rms."""
    over = _normalised(x, gamma)
    dy, unit = grad.float(), x.float() * rstd
    inner = dy * gamma.float()
    dx = rstd * (inner - unit * (inner * unit).mean(over, keepdim=True))
    return dx.to(x.dtype), (dy * unit).sum_to_size(gamma.shape)


def _add_rms_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, /, *, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`_rms_norm` of x + residual, and that sum."""
    _need(
        x.shape == residual.shape and x.dtype == residual.dtype,
        f"x1 {x.dtype} {list(x.shape)} and x2 {residual.dtype} {list(residual.shape)} differ",
    )
    total = x + residual
    normed, rstd = _rms_norm(total, gamma, epsilon=epsilon)
    return normed, rstd, total


def _normalised(x: Tensor, gamma: Tensor) -> list[int]:
    _need(
        0 < gamma.dim() <= x.dim() and x.shape[-gamma.dim() :] == gamma.shape,
        f"gamma {list(gamma.shape)} does not fit input {list(x.shape)}",
    )
    return list(range(x.dim() - gamma.dim(), x.dim()))


def _swiglu(x: Tensor, /, *, dim: int) -> Tensor:
    """silu(first half) · second half, along dim."""
    first, second = _halves(x, dim)
    return (silu(first) * second).to(x.dtype)


def _swiglu_backward(grad: Tensor, x: Tensor, /, *, dim: int) -> Tensor:
    first, second = _halves(x, dim)
    dy, gate = grad.float(), first.sigmoid()
    dfirst = dy * second * gate * (1 + first * (1 - gate))
    return torch.cat((dfirst, dy * first * gate), dim).to(x.dtype)


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    _need(x.shape[dim] % 2 == 0, f"dimension {dim} of input {list(x.shape)} has no two halves")
    first, second = x.float().chunk(2, dim)
    return first, second


# --- attention ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attention:
    """Which queries of a call attend to which keys.

    ends_q, ends_kv  the cumulative lengths of layout TND, () for the others
    before, after    pre_tokens and next_tokens
    stats            softmax_layout: how TND's softmax_max and softmax_sum lie
    """

    layout: str
    heads: int
    kv_heads: int
    mask: Tensor | None
    mode: int
    before: int
    after: int
    ends_q: tuple[int, ...]
    ends_kv: tuple[int, ...]
    stats: str

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_num: int,
        input_layout: str,
        atten_mask: Tensor | None,
        pre_tokens: int,
        next_tokens: int,
        actual_seq_qlen: list[int] | None,
        actual_seq_kvlen: list[int] | None,
        sparse_mode: int,
        softmax_layout: str = "",
    ) -> _Attention:
        """The call, with all that the documentation asks of it checked."""
        shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
        layout = input_layout.upper()
        _need(layout in _DIMENSIONS, f"input_layout={input_layout!r} is none of {[*_DIMENSIONS]}")
        _need(
            query.dim() == key.dim() == value.dim() == _DIMENSIONS[layout],
            f"{shapes} must have {_DIMENSIONS[layout]} dimensions in layout {layout}",
        )
        _need(query.dtype == key.dtype == value.dtype, "query, key and value must have one type")
        _need(softmax_layout in ("", "TND"), f"softmax_layout={softmax_layout!r} is not known")
        _need(
            not softmax_layout or layout == "TND", "softmax_layout='TND' is for input_layout='TND'"
        )
        if layout in ("BSH", "SBH"):
            _need(
                head_num > 0 and query.shape[2] % head_num == 0,
                f"{shapes} do not hold {head_num} heads",
            )
            size = query.shape[2] // head_num
            _need(
                size > 0 and key.shape[2] % size == 0, f"{shapes}: no heads of size {size} in key"
            )
            kv_heads = key.shape[2] // size
            _need(value.shape[2] % kv_heads == 0, f"{shapes} do not hold {kv_heads} heads of value")
            sizes = size, size, value.shape[2] // kv_heads
        else:
            axis = 2 if layout == "BSND" else 1
            kv_heads = key.shape[axis]
            _need(
                query.shape[axis] == head_num and value.shape[axis] == kv_heads,
                f"{shapes} do not hold {head_num} heads in layout {layout}",
            )
            sizes = query.shape[-1], key.shape[-1], value.shape[-1]
        _need(
            0 < sizes[2] <= sizes[1] == sizes[0] <= 768,
            f"head sizes {sizes} of query, key and value: the first two must be equal and at most "
            f"768, the third no larger",
        )
        _need(
            kv_heads > 0 and head_num % kv_heads == 0 and head_num <= 256,
            f"{head_num} query heads for {kv_heads} key heads: a multiple, at most 256, is needed",
        )
        ends_q, ends_kv = (
            _ends(layout, query, actual_seq_qlen),
            _ends(layout, key, actual_seq_kvlen),
        )
        call = cls(
            layout=layout,
            heads=head_num,
            kv_heads=kv_heads,
            mask=None if atten_mask is None else atten_mask.bool(),
            mode=sparse_mode,
            before=pre_tokens,
            after=next_tokens,
            ends_q=ends_q,
            ends_kv=ends_kv,
            stats=softmax_layout,
        )
        batch = len(call.queries(query)), len(call.keys(key)), len(call.keys(value))
        _need(batch[0] == batch[1] == batch[2], f"{batch} sequences in query, key and value")
        lengths = [
            (q.shape[1], k.shape[1])
            for q, k in zip(call.queries(query), call.keys(key), strict=True)
        ]
        _need(
            [k for _, k in lengths] == [v.shape[1] for v in call.keys(value)],
            f"{shapes}: key and value differ in length",
        )
        call._check_mask(lengths)
        return call

    def _check_mask(self, lengths: list[tuple[int, int]]) -> None:
        if self.mask is None:  # whatever sparse_mode says, every query sees every key
            return
        if self.mode not in (0, 1, 2, 3, 4):
            raise NotImplementedError(
                f"sparse_mode={self.mode} is not simulated (0 to 4 are), and nothing was computed"
            )
        shape = list(self.mask.shape)
        if self.mode >= 2:
            _need(
                shape[-2:] == [COMPRESSED] * 2
                and self.mask.numel() == COMPRESSED**2
                and self.mask.view(COMPRESSED, COMPRESSED).equal(_triangle()),
                f"sparse_mode={self.mode} takes the compressed atten_mask, {COMPRESSED}x"
                f"{COMPRESSED} and True above the diagonal, not {shape}",
            )
        elif self.layout == "TND":
            longest = [max(n, default=0) for n in zip(*lengths, strict=True)]
            _need(
                len(shape) == 2 and shape[0] >= longest[0] and shape[1] >= longest[1],
                f"atten_mask {shape}: layout TND takes one mask of the longest lengths, {longest}",
            )
        else:
            sq, skv = lengths[0]
            batch, heads = len(lengths), self.heads
            allowed = [
                [sq, skv],
                *([b, n, sq, skv] for b, n in ((1, 1), (batch, 1), (batch, heads))),
            ]
            _need(shape in allowed, f"atten_mask {shape} is none of {allowed}")

    def queries(self, tensor: Tensor) -> list[Tensor]:
        """A tensor that lies as the query does, as one view [heads, length, size] a sequence."""
        return self._sequences(tensor, self.heads, self.ends_q)

    def keys(self, tensor: Tensor) -> list[Tensor]:
        """`queries`, for one that lies as key and value do."""
        return self._sequences(tensor, self.kv_heads, self.ends_kv)

    def _sequences(self, tensor: Tensor, heads: int, ends: tuple[int, ...]) -> list[Tensor]:
        match self.layout:
            case "BNSD":
                return list(tensor)
            case "BSND":
                return list(tensor.transpose(1, 2))
            case "BSH":
                return list(tensor.view(*tensor.shape[:2], heads, -1).transpose(1, 2))
            case "SBH":
                return list(tensor.view(*tensor.shape[:2], heads, -1).permute(1, 2, 0, 3))
        return [tensor[a:b].transpose(0, 1) for a, b in pairwise((0, *ends))]

    def empty_stats(self, query: Tensor) -> Tensor:
        """softmax_max or softmax_sum: [B, N, S, 8], or [T, N, 8] in layout TND; zeros, float32."""
        queries = self.queries(query)
        shape = (len(queries), self.heads, *queries[0].shape[1:2], LANES)
        if self.layout == "TND":
            shape = (len(query), self.heads, LANES)
        return query.new_zeros(shape, dtype=torch.float32)

    def softmax(self, stats: Tensor) -> list[Tensor]:
        """softmax_max or softmax_sum as one view [heads, length, 8] a sequence.

        In layout TND each sequence's part lies as [heads, length, 8] by itself, unless
        softmax_layout is TND too.
        """
        if self.layout != "TND":
            return list(stats)
        if self.stats == "TND":
            return self.queries(stats)
        flat = stats.reshape(-1, LANES)
        return [
            flat[a * self.heads : b * self.heads].view(self.heads, b - a, LANES)
            for a, b in pairwise((0, *self.ends_q))
        ]

    def blocks(self, query: Tensor, key: Tensor) -> Iterator[tuple[int, slice, Tensor | None]]:
        """Each sequence in runs of queries whose scores fit in memory.

        Gives the sequence, the run, and which pairs count: [1 or heads, run, keys], None for all.
        """
        for index, (q, k) in enumerate(zip(self.queries(query), self.keys(key), strict=True)):
            length, keys = q.shape[1], k.shape[1]
            if not length or not keys:
                continue
            step = max(1, _ELEMENTS // (self.heads * keys))
            for start in range(0, length, step):
                run = slice(start, min(start + step, length))
                yield index, run, self._kept(index, run, length, keys)

    def _kept(self, index: int, run: slice, length: int, keys: int) -> Tensor | None:
        if self.mask is None:
            return None
        i = torch.arange(run.start, run.stop, device=self.mask.device).unsqueeze(1)
        offset = torch.arange(keys, device=self.mask.device) - i
        match self.mode:
            case 2:
                return (offset <= 0).unsqueeze(0)
            case 3:
                return (offset <= keys - length).unsqueeze(0)
            case 4:
                band = offset - (keys - length)
                return ((-self.before <= band) & (band <= self.after)).unsqueeze(0)
        mask = self.mask
        if mask.dim() == 4:
            mask = mask[index if mask.shape[0] > 1 else 0]
        kept = ~mask[..., run, :keys]
        if kept.dim() == 2:
            kept = kept.unsqueeze(0)
        if self.mode == 0:
            outside = (kept & ((offset > self.after) | (offset < -self.before))).nonzero()
            if outside.numel():
                _, row, column = outside[0].tolist()
                raise _Refused(
                    f"atten_mask keeps query {run.start + row} with key {column}, which "
                    f"pre_tokens={self.before} and next_tokens={self.after} leave out: the two "
                    f"must agree, or an NPU's result is undefined"
                )
        _need(
            self.layout != "TND" or bool(kept.any(-1).all()),
            f"atten_mask leaves a query of sequence {index} without a key; layout TND takes no "
            f"such mask",
        )
        return kept


_DIMENSIONS = {"BNSD": 4, "BSND": 4, "BSH": 3, "SBH": 3, "TND": 3}


def _ends(layout: str, tensor: Tensor, given: list[int] | None) -> tuple[int, ...]:
    """The cumulative lengths of layout TND; sequences at the end marked by 0 are left out."""
    if layout != "TND":
        return ()
    if given is None:
        raise _Refused("layout TND needs actual_seq_qlen and actual_seq_kvlen")
    ends = list(given)
    while len(ends) > 1 and not ends[-1] and any(ends):
        ends.pop()
    _need(bool(ends), "actual_seq_qlen and actual_seq_kvlen must not be empty")
    _need(
        ends == sorted(ends) and ends[0] >= 0 and ends[-1] <= tensor.shape[0],
        f"lengths {ends} must be cumulative, up to at most the {tensor.shape[0]} rows there are",
    )
    return tuple(ends)


@functools.cache
def _triangle() -> Tensor:
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)


def _scores(query: Tensor, key: Tensor, kept: Tensor | None) -> Tensor:
    """query·keyᵀ, float32 [heads, queries, keys], -inf where not kept; heads share a key's head."""
    scores = (_shared(query, len(key)) @ key.mT).view(*query.shape[:2], -1)
    return scores if kept is None else scores.masked_fill(~kept, float("-inf"))


def _shared(heads: Tensor, kv_heads: int) -> Tensor:
    """[heads, n, m] as [kv heads, queries that share one · n, m]."""
    return heads.reshape(kv_heads, -1, heads.shape[2])


def _fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    /,
    *,
    scale: float,
    **masking: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """softmax(scale · query·keyᵀ)·value, with the softmax's maxima and sums for the backward.

    A query without any key gives 0, with maximum -3.4e38 and sum 0; rows that belong to no
    sequence give 0.
    """
    call = _Attention.of(query, key, value, head_num, input_layout, **masking)
    shared = head_num // call.kv_heads if call.layout in ("BSH", "SBH") else 1
    output = query.new_zeros(*query.shape[:-1], value.shape[-1] * shared)
    maxima, sums = call.empty_stats(query), call.empty_stats(query)
    queries, keys, values = call.queries(query), call.keys(key), call.keys(value)
    outputs = call.queries(output)
    of_max, of_sum = call.softmax(maxima), call.softmax(sums)
    for index, run, kept in call.blocks(query, key):
        k, v = keys[index].float(), values[index].float()
        scores = _scores(queries[index][:, run].float() * scale, k, kept)
        top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        mixed = (_shared(weights, len(v)) @ v).view(*weights.shape[:2], -1)
        outputs[index][:, run] = (mixed / total.where(total > 0, 1)).to(query.dtype)
        of_max[index][:, run], of_sum[index][:, run] = top, total
    return output, maxima, sums, query.new_empty(0)


def _fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    head_num: int,
    input_layout: str,
    /,
    *,
    scale_value: float,
    softmax_max: Tensor | None,
    softmax_sum: Tensor | None,
    attention_in: Tensor | None,
    **masking: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from the forward's output, maxima and sums.

    The softmax is rebuilt from the maxima and sums, as CANN's kernel does, so those of a whole
    ring of devices give this device's part of the gradient.
    """
    call = _Attention.of(query, key, value, head_num, input_layout, **masking)
    if softmax_max is None or softmax_sum is None or attention_in is None:
        raise _Refused("softmax_max, softmax_sum and attention_in of the forward call are needed")
    wanted = call.empty_stats(query).shape
    _need(
        softmax_max.shape == softmax_sum.shape == wanted,
        f"softmax_max {list(softmax_max.shape)} and softmax_sum {list(softmax_sum.shape)} must "
        f"both be {list(wanted)}",
    )
    queries, keys, values = call.queries(query), call.keys(key), call.keys(value)
    grads, outputs = call.queries(grad), call.queries(attention_in)
    of_max, of_sum = call.softmax(softmax_max), call.softmax(softmax_sum)
    dquery, dkey, dvalue = (torch.zeros(t.shape) for t in (query, key, value))
    dqueries, dkeys, dvalues = call.queries(dquery), call.keys(dkey), call.keys(dvalue)
    for index, run, kept in call.blocks(query, key):
        q, k, v = queries[index][:, run].float(), keys[index].float(), values[index].float()
        dy, y = grads[index][:, run].float(), outputs[index][:, run].float()
        top, total = of_max[index][:, run, :1], of_sum[index][:, run, :1]
        weights = (_scores(q * scale_value, k, kept) - top).exp() / total.where(total > 0, 1)
        dweights = (_shared(dy, len(v)) @ v.mT).view(weights.shape)
        dscores = weights * (dweights - (dy * y).sum(-1, keepdim=True)) * scale_value
        dqueries[index][:, run] = (_shared(dscores, len(k)) @ k).view(q.shape)
        dkeys[index] += _shared(dscores, len(k)).mT @ _shared(q, len(k))
        dvalues[index] += _shared(weights, len(v)).mT @ _shared(dy, len(v))
    return dquery.to(query.dtype), dkey.to(query.dtype), dvalue.to(query.dtype)


_KERNELS: dict[str, Callable[..., Any]] = {
    "npu_rotary_mul": _rotary_mul,
    "npu_rotary_mul_backward": _rotary_mul_backward,
    "npu_rms_norm": _rms_norm,
    "npu_rms_norm_backward": _rms_norm_backward,
    "npu_add_rms_norm": _add_rms_norm,
    "npu_swiglu": _swiglu,
    "npu_swiglu_backward": _swiglu_backward,
    "npu_fusion_attention": _fusion_attention,
    "npu_fusion_attention_grad": _fusion_attention_grad,
    "npu_fusion_attention_v2": _fusion_attention,
    "npu_fusion_attention_grad_v2": _fusion_attention_grad,
}
