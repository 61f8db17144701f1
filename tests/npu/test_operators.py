"""The simulator's NPU operators: against float64 in plain torch, and against the wheel's own face.

Tolerance in float32: 5e-6, for values and gradients of N(0, 1) inputs.
"""

import itertools

import pytest
import torch
import torch_npu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from slime_npu import ops, simulator
from slime_npu.simulator import operators

TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
quick = settings(max_examples=20, deadline=None)
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 9)
types = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def normal(seed, *shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def close(actual, expected, tolerance=5e-6):
    """Equal up to the tolerance in float32, and to three roundings in a shorter type."""
    if actual.dtype != torch.float32:
        tolerance = 3 * torch.finfo(actual.dtype).eps * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        actual.cpu().double(), expected.double(), atol=tolerance, rtol=tolerance
    )


def same_on_npu(operator, formula, *inputs):
    """Values and gradients of an NPU operator are those of a formula in float64."""
    npu = [x.npu().requires_grad_() for x in inputs]
    wide = [x.double().requires_grad_() for x in inputs]
    actual, expected = operator(*npu), formula(*wide)
    assert actual.dtype == inputs[0].dtype
    close(actual, expected)
    (grad,) = normal(0, expected.shape, dtype=actual.dtype)
    gradients = torch.autograd.grad(actual, npu, grad.npu())
    for have, want in zip(
        gradients, torch.autograd.grad(expected, wide, grad.double()), strict=True
    ):
        close(have, want, 2e-5)


# --- element-wise and normalisation ---------------------------------------------------------------


def rotate(x, mode):
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


@pytest.mark.reference
@pytest.mark.parametrize("mode", ["half", "interleave"])
@given(
    shape=st.tuples(sizes, sizes, sizes, sizes.map(lambda n: 2 * n)),
    spread=st.tuples(*[st.booleans()] * 3),
    seed=seeds,
    dtype=types,
)
@quick
def test_rotary_mul_and_the_gradients_of_x_cos_and_sin(mode, shape, spread, seed, dtype):
    table = [n if kept else 1 for n, kept in zip(shape, (*spread, True), strict=True)]
    x, cos, sin = normal(seed, shape, table, table, dtype=dtype)

    def formula(x, cos, sin):
        return x * cos + rotate(x, mode) * sin

    npu = [t.npu().requires_grad_() for t in (x, cos, sin)]
    wide = [t.double().requires_grad_() for t in (x, cos, sin)]
    actual, expected = torch_npu.npu_rotary_mul(*npu, mode), formula(*wide)
    close(actual, expected)
    (grad,) = normal(seed, shape, dtype=dtype)
    wanted = torch.autograd.grad(expected, wide, grad.double())
    for have, want in zip(torch.autograd.grad(actual, npu, grad.npu()), wanted, strict=True):
        close(have, want, 1e-4)  # a sum over as many as 729 heads and positions


@pytest.mark.reference
@given(
    shape=st.lists(sizes, min_size=1, max_size=4), over=st.integers(1, 2), seed=seeds, dtype=types
)
@quick
def test_rms_norm(shape, over, seed, dtype):
    over = min(over, len(shape))
    x, gamma = normal(seed, shape, shape[-over:], dtype=dtype)

    def formula(x, gamma):
        return x * (x.square().mean(list(range(-over, 0)), True) + 1e-2).rsqrt() * gamma

    same_on_npu(lambda x, gamma: torch_npu.npu_rms_norm(x, gamma, 1e-2)[0], formula, x, gamma)
    _, rstd = torch_npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-2)
    close(rstd, (x.double().square().mean(list(range(-over, 0)), True) + 1e-2).rsqrt())


@pytest.mark.reference
@given(rows=sizes, size=sizes, seed=seeds, dtype=types)
@quick
def test_add_rms_norm(rows, size, seed, dtype):
    x, residual, gamma = normal(seed, [rows, size], [rows, size], [size], dtype=dtype)
    y, _, total = torch_npu.npu_add_rms_norm(x.npu(), residual.npu(), gamma.npu(), 1e-2)
    assert total.cpu().equal(x + residual)
    wide = (x + residual).double()
    close(y, wide * (wide.square().mean(-1, True) + 1e-2).rsqrt() * gamma)


@pytest.mark.reference
@given(
    shape=st.lists(sizes, min_size=1, max_size=4), axis=st.integers(0, 3), seed=seeds, dtype=types
)
@quick
def test_swiglu(shape, axis, seed, dtype):
    dim = axis % len(shape)
    shape[dim] *= 2
    (x,) = normal(seed, shape, dtype=dtype)

    def formula(x):
        first, second = x.chunk(2, dim)
        return silu(first) * second

    same_on_npu(lambda x: torch_npu.npu_swiglu(x, dim), formula, x)


# --- attention ------------------------------------------------------------------------------------


def softmax_attention(q, k, v, kept, scale):
    """One sequence, [heads, length, size]: (output, maxima, sums); 0 where nothing is kept."""
    k, v = (t.repeat_interleave(len(q) // len(k), 0) for t in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~kept, -torch.inf)
    top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return weights @ v / total.where(total > 0, 1), top, total


def pairs(mode, queries, keys, before, after):
    """Which keys each query counts, by the documentation's pictures of sparse_mode."""
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    corner = keys - queries
    return {
        None: torch.ones(queries, keys, dtype=torch.bool),
        0: (j - i <= after) & (i - j <= before),
        1: (i * 7 + j * 3) % 5 < 3,
        2: j <= i,
        3: j - i <= corner,
        4: (j - i - corner <= after) & (i + corner - j <= before),
    }[mode]


def lay(x, layout):
    """[B, N, S, D] in the operator's layout."""
    return {
        "BNSD": lambda: x,
        "BSND": lambda: x.transpose(1, 2),
        "BSH": lambda: x.transpose(1, 2).flatten(2),
        "SBH": lambda: x.permute(2, 0, 1, 3).flatten(2),
    }[layout]().contiguous()


@st.composite
def problems(draw):
    """A call's batch, heads, heads of key, queries, keys, size of a head, and of a value's."""
    shared = draw(st.integers(1, 3))
    size = draw(st.integers(1, 16))
    return (
        draw(st.integers(1, 3)),
        shared * draw(st.integers(1, 3)),
        shared,
        draw(st.integers(1, 12)),
        draw(st.integers(1, 12)),
        size,
        draw(st.integers(1, size)),
    )


@pytest.mark.reference
@pytest.mark.parametrize("mode", [None, 0, 1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
@given(problem=problems(), band=st.tuples(*[st.integers(0, 12)] * 2), seed=seeds)
@settings(max_examples=8, deadline=None)
def test_attention_in_each_layout_and_mode(layout, mode, problem, band, seed):
    batch, heads, shared, queries, keys, size, last = problem
    inputs = normal(
        seed,
        [batch, heads, queries, size],
        [batch, shared, keys, size],
        [batch, shared, keys, last],
    )
    kept = pairs(mode, queries, keys, *band)
    mask = {None: None, 0: ~kept, 1: ~kept}.get(mode, TRIANGLE)
    npu = [lay(x, layout).npu().requires_grad_() for x in inputs]
    out, top, total, *_ = torch_npu.npu_fusion_attention(
        *npu,
        heads,
        layout,
        atten_mask=None if mask is None else mask.npu(),
        scale=0.3,
        pre_tockens=band[0],
        next_tockens=band[1],
        sparse_mode=mode or 0,
    )
    wide = [x.double().requires_grad_() for x in inputs]
    wanted, maxima, sums = zip(
        *(softmax_attention(*qkv, kept, 0.3) for qkv in zip(*wide, strict=True)), strict=True
    )
    expected = torch.stack(wanted)
    close(out, lay(expected, layout))
    close(top, torch.stack(maxima).expand(-1, -1, -1, 8))
    close(total, torch.stack(sums).expand(-1, -1, -1, 8))
    (grad,) = normal(seed + 1, expected.shape)
    have = torch.autograd.grad(out, npu, lay(grad, layout).npu())
    want = torch.autograd.grad(expected, wide, grad.double())
    for one, other in zip(have, want, strict=True):
        close(one, lay(other, layout), 2e-5)


def packed(lengths, q, k, v, mode, scale):
    """Each sequence of a packed batch by itself: output [T, N, D], and lists of maxima and sums."""
    q_sizes, k_sizes = zip(*lengths, strict=True)
    outputs, maxima, sums = [], [], []
    for qkv in zip(q.split(q_sizes), k.split(k_sizes), v.split(k_sizes), strict=True):
        one, other, last = (x.transpose(0, 1) for x in qkv)
        out, top, total = (
            one.new_zeros(*one.shape[:2], last.shape[2]),
            *one.new_zeros(2, *one.shape[:2], 1),
        )
        if len(qkv[0]) and len(qkv[1]):
            kept = pairs(mode, len(qkv[0]), len(qkv[1]), 0, 0)
            out, top, total = softmax_attention(one, other, last, kept, scale)
        outputs.append(out.transpose(0, 1))
        maxima.append(top)
        sums.append(total)
    return torch.cat(outputs), maxima, sums


@pytest.mark.reference
@pytest.mark.parametrize("mode", [None, 2, 3])
@pytest.mark.parametrize("leading", [[], [0]], ids=["", "leading-0"])
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5
    ).filter(lambda pairs: any(queries and keys for queries, keys in pairs)),
    unused=st.integers(0, 2),
    seed=seeds,
)
@quick
def test_attention_over_packed_sequences(mode, leading, lengths, unused, seed):
    heads, shared, size, last = 4, 2, 6, 5
    ends = [[*leading, *itertools.accumulate(n)] for n in zip(*lengths, strict=True)]
    ends = [e + [0] * unused for e in ends]
    inputs = normal(
        seed,
        [sum(q for q, _ in lengths), heads, size],
        *([sum(k for _, k in lengths), shared, d] for d in (size, last)),
    )
    npu = [x.npu().requires_grad_() for x in inputs]
    results = {
        stats: torch_npu.npu_fusion_attention(
            *npu,
            heads,
            "TND",
            atten_mask=None if mode is None else TRIANGLE.npu(),
            scale=0.3,
            actual_seq_qlen=ends[0],
            actual_seq_kvlen=ends[1],
            sparse_mode=mode or 0,
            softmax_layout=stats,
        )
        for stats in ("", "TND")
    }
    wide = [x.double().requires_grad_() for x in inputs]
    expected, maxima, sums = packed(lengths, *wide, mode, 0.3)
    (grad,) = normal(seed + 1, expected.shape)
    want = torch.autograd.grad(expected, wide, grad.double())
    for stats, (out, top, total, *_) in results.items():
        close(out, expected)
        for have, parts in ((top, maxima), (total, sums)):
            assert have.shape == (len(inputs[0]), heads, 8)
            together = (
                torch.cat([part.transpose(0, 1) for part in parts])
                if stats
                else torch.cat([part.flatten() for part in parts]).view(-1, heads, 1)
            )
            close(have, together.expand(-1, -1, 8))
        for one, other in zip(torch.autograd.grad(out, npu, grad.npu()), want, strict=True):
            close(one, other, 2e-5)


@pytest.mark.reference
def test_rows_of_no_sequence_give_zero():
    q, k, v = (x.npu().requires_grad_() for x in normal(1, *[[6, 2, 4]] * 3))
    out = torch_npu.npu_fusion_attention(
        q, k, v, 2, "TND", actual_seq_qlen=[2, 4], actual_seq_kvlen=[2, 4]
    )[0]
    out.sum().backward()
    assert not out[4:].any() and out[:4].all()
    assert not any(x.grad[4:].any() for x in (q, k, v))


@pytest.mark.reference
def test_maxima_and_sums_join_the_parts_of_a_ring():
    """Two devices with half of the keys each: outputs join by their sums, and the gradients of each
    half, from the joined maxima, sums and output, are those of the whole."""
    q, k, v, grad = (x.npu() for x in normal(3, *[[1, 2, 5, 4]] * 4))
    call = {"head_num": 2, "input_layout": "BNSD"}
    whole, *_ = torch_npu.npu_fusion_attention(q, k, v, **call)
    halves = [(k[:, :, :2], v[:, :, :2]), (k[:, :, 2:], v[:, :, 2:])]
    parts = [torch_npu.npu_fusion_attention(q, *half, **call)[:3] for half in halves]
    top = torch.maximum(parts[0][1], parts[1][1])
    shares = [total * (own - top).exp() for _, own, total in parts]
    total = shares[0] + shares[1]
    joined = sum(
        out * (share / total)[..., :1] for (out, _, _), share in zip(parts, shares, strict=True)
    )
    close(joined, whole.cpu())
    dq, dk, dv = torch.autograd.grad(
        torch_npu.npu_fusion_attention(*(xs := [x.requires_grad_() for x in (q, k, v)]), **call)[0],
        xs,
        grad,
    )
    partial = [
        torch_npu.npu_fusion_attention_grad(
            q, *half, grad, **call, softmax_max=top, softmax_sum=total, attention_in=joined
        )
        for half in halves
    ]
    close(partial[0][0] + partial[1][0], dq.cpu())
    close(torch.cat([p[1] for p in partial], 2), dk.cpu())
    close(torch.cat([p[2] for p in partial], 2), dv.cpu())


@pytest.mark.reference
def test_long_sequences_are_computed_in_runs(monkeypatch):
    inputs = [x.npu().requires_grad_() for x in normal(5, *[[2, 3, 37, 8]] * 3)]

    def run():
        out = torch_npu.npu_fusion_attention(
            *inputs, 3, "BNSD", atten_mask=TRIANGLE.npu(), sparse_mode=3
        )[0]
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    whole = run()
    monkeypatch.setattr(operators, "_ELEMENTS", 3 * 37 * 5)
    for one, other in zip(run(), whole, strict=True):
        close(one, other.cpu())


@pytest.mark.reference
def test_memory_of_the_scores_is_not_the_devices():
    q, k, v = (x.npu() for x in normal(7, *[[1, 2, 1024, 4]] * 3))
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    torch_npu.npu_fusion_attention(q, k, v, 2, "BNSD")
    used = torch.npu.max_memory_allocated() - before
    assert 0 < used < 1024 * 1024  # the scores alone are 8 MiB


@pytest.mark.reference
@given(problem=problems(), seed=seeds, dtype=types)
@quick
def test_second_version_is_the_first(problem, seed, dtype):
    batch, heads, shared, queries, _, size, _ = problem
    inputs = normal(
        seed,
        [batch, heads, queries, size],
        *[[batch, shared, queries, size]] * 2,
        dtype=dtype,
    )
    npu = [x.npu().requires_grad_() for x in inputs]
    call = {"atten_mask": TRIANGLE.npu(), "scale": 0.5, "sparse_mode": 3}
    outputs = [
        operator(*npu, heads, "BNSD", **call)
        for operator in (torch_npu.npu_fusion_attention, torch_npu.npu_fusion_attention_v2)
    ]
    for one, other in zip(*outputs, strict=True):
        assert one == other if isinstance(one, int) else one.equal(other)
    gradients = [torch.autograd.grad(out[0].float().sum(), npu) for out in outputs]
    assert all(one.equal(other) for one, other in zip(*gradients, strict=True))


@pytest.mark.plumbing
def test_results_lie_on_the_device_of_the_arguments():
    x = torch.ones(1, 2, 4, 4, device="npu:1")
    results = [
        *torch_npu.npu_rms_norm(x, x[0, 0, 0]),
        *torch_npu.npu_fusion_attention(x, x, x, 2, "BNSD")[:4],
        *torch_npu.npu_fusion_attention_grad(
            *[x] * 4,
            2,
            "BNSD",
            softmax_max=(s := x.repeat(1, 1, 1, 2)),
            softmax_sum=s,
            attention_in=x,
        ),
        torch_npu.npu_swiglu(x),
        torch_npu.npu_rotary_mul(x, x, x),
    ]
    assert {str(result.device) for result in results} == {"npu:1"}


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.plumbing
@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("keep_prob=0.9", {"keep_prob": 0.9}),
        ("pse=", {"pse": torch.zeros(1, 2, 4, 4)}),
        ("prefix=", {"prefix": [1]}),
        ("sink=", {"sink": torch.zeros(2)}),
        ("dropout_mask=", {"dropout_mask": torch.ones(8, dtype=torch.uint8)}),
        ("sparse_mode=5", {"sparse_mode": 5, "atten_mask": torch.zeros(4, 4, dtype=torch.bool)}),
    ],
)
def test_what_is_not_simulated_fails_by_name(named, change):
    q, k, v = (x.npu() for x in normal(0, *[[1, 2, 4, 4]] * 3))
    change = {n: x.npu() if isinstance(x, torch.Tensor) else x for n, x in change.items()}
    with pytest.raises(NotImplementedError, match=f"npu_fusion_attention: .*{named}|{named}"):
        torch_npu.npu_fusion_attention(q, k, v, 2, "BNSD", **change)


@pytest.mark.plumbing
@pytest.mark.parametrize(
    ("says", "change"),
    [
        (
            "compressed",
            {"sparse_mode": 2, "atten_mask": torch.ones(4, 4, dtype=torch.bool).triu(1)},
        ),
        ("compressed", {"sparse_mode": 3, "atten_mask": ~TRIANGLE}),
        ("none of", {"sparse_mode": 1, "atten_mask": torch.zeros(3, 4, dtype=torch.bool)}),
        (
            "query 0 with key 1",
            {"next_tockens": 0, "atten_mask": torch.zeros(4, 4, dtype=torch.bool)},
        ),
        ("do not hold 3 heads", {"head_num": 3}),
        ("none of", {"input_layout": "NBSD"}),
        ("dimensions", {"input_layout": "TND"}),
    ],
)
def test_what_an_npu_leaves_undefined_is_refused(says, change):
    q, k, v = (x.npu() for x in normal(0, *[[1, 2, 4, 4]] * 3))
    change = {n: x.npu() if isinstance(x, torch.Tensor) else x for n, x in change.items()}
    call = {"head_num": 2, "input_layout": "BNSD"} | change
    with pytest.raises(ValueError, match=f"npu_fusion_attention: .*{says}"):
        torch_npu.npu_fusion_attention(q, k, v, **call)


@pytest.mark.plumbing
@pytest.mark.parametrize(
    ("says", "ends"),
    [
        ("actual_seq_qlen", (None, None)),
        ("cumulative", ([3, 2], [2, 4])),
        ("cumulative", ([2, 5], [2, 4])),
        ("sequences", ([4], [2, 4])),
    ],
)
def test_packed_lengths_that_do_not_fit_are_refused(says, ends):
    q, k, v = (x.npu() for x in normal(0, *[[4, 2, 4]] * 3))
    with pytest.raises(ValueError, match=f"npu_fusion_attention: .*{says}"):
        torch_npu.npu_fusion_attention(
            q, k, v, 2, "TND", actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1]
        )


@pytest.mark.plumbing
def test_a_refused_call_is_not_counted(npu_calls):
    x = torch.ones(1, 1, 1, 3).npu()
    with pytest.raises(ValueError, match="npu_rotary_mul: the head size 3 must be even"):
        torch_npu.npu_rotary_mul(x, x, x)
    with pytest.raises(
        NotImplementedError, match="npu_rotary_mul: rotate=a tensor is not simulated"
    ):
        torch_npu.npu_rotary_mul(*[torch.ones(1, 1, 1, 2).npu()] * 3, rotate=torch.eye(2).npu())
    assert not npu_calls


# --- the wheel's schemas and Meta kernels ---------------------------------------------------------


class Calls(TorchDispatchMode):
    """The NPU operators called while it is active, below autograd: what reaches the kernels."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "npu":
            self.seen.append((func, args, kwargs or {}, result))
        return result


def on_meta(value):
    def meta(t):
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")

    return tree_map_only(torch.Tensor, meta, value)


def check_call(func, args, kwargs, result):
    """The arguments are the schema's, and the Meta kernel says of the result what it is."""
    arguments = func._schema.arguments
    names = [argument.name for argument in arguments]
    assert len(args) <= sum(not argument.kwarg_only for argument in arguments)
    assert set(kwargs) <= set(names[len(args) :])
    said = func(*on_meta(args), **on_meta(kwargs))
    if isinstance(result, torch.Tensor):
        said, result = (said,), (result,)
    assert len(said) == len(result)
    for index, (one, other) in enumerate(zip(said, result, strict=True)):
        if (func._schema.name, index) == ("npu::npu_fusion_attention_grad", 3):
            assert one is None  # the schema has a Tensor there; the Meta kernel of 2.13.0 does not
        elif isinstance(other, torch.Tensor):
            assert (one.shape, one.dtype) == (other.shape, other.dtype), f"result {index}"
        else:
            assert type(one) is type(other) is int


def attention_calls():
    mask = torch.zeros(5, 5, dtype=torch.bool)
    for dtype in (torch.float32, torch.bfloat16):
        for layout, shape in {
            "BNSD": [2, 4, 5, 8],
            "BSND": [2, 5, 4, 8],
            "SBND": [5, 2, 4, 8],
            "TND": [5, 4, 8],
        }.items():
            few = [2 if n == 4 else n for n in shape]
            few = [2, 2, 5, 8] if layout == "BNSD" else few
            ends = {"ends_q": [2, 5]} if layout == "TND" else {}
            for how in ({"causal": True}, {"mask": mask}, {}):
                if layout == "TND" and "mask" in how:
                    how = {"mask": mask[:3, :3]}
                yield ops.attention, dtype, (shape, few, few), dict(layout=layout, **how, **ends)


CALLS = [
    *attention_calls(),
    *(
        (function, dtype, shapes, options)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for function, shapes, options in (
            (ops.rotary, [(2, 3, 5, 8), (1, 1, 5, 8), (1, 1, 5, 8)], {}),
            (ops.rotary, [(5, 2, 3, 8), (5, 1, 1, 8), (5, 1, 1, 8)], {"interleaved": True}),
            (ops.rms_norm, [(3, 4, 6), (6,)], {}),
            (ops.rms_norm, [(3, 4, 6), (4, 6)], {"eps": 1e-3}),
            (ops.swiglu, [(3, 4, 6)], {}),
            (ops.swiglu, [(3, 4, 6)], {"dim": 1}),
        )
    ),
]


@pytest.mark.schema
@pytest.mark.parametrize(("function", "dtype", "shapes", "options"), CALLS)
def test_calls_fit_the_wheels_schema_and_meta_kernel(function, dtype, shapes, options):
    inputs = [x.npu().requires_grad_() for x in normal(0, *shapes, dtype=dtype)]
    options = tree_map_only(torch.Tensor, lambda t: t.npu(), options)
    with Calls() as calls:
        function(*inputs, **options).float().sum().backward()
    forward, backward = [func._schema.name for func, *_ in calls.seen]
    assert backward in (f"{forward}_backward", f"{forward}_grad")
    for call in calls.seen:
        check_call(*call)


@pytest.mark.schema
def test_operators_without_a_gradient_fit_too():
    with Calls() as calls:
        torch_npu.npu_add_rms_norm(*(x.npu() for x in normal(0, [3, 6], [3, 6], [6])))
        torch_npu.npu_fusion_attention_v2(
            *(x.npu() for x in normal(0, *[[1, 2, 5, 8]] * 3)), 2, "BNSD"
        )
    assert len(calls.seen) == 2
    for call in calls.seen:
        check_call(*call)


@pytest.mark.schema
def test_what_the_meta_kernels_of_the_second_version_get_wrong():
    """So that a wheel that mends them is noticed: shapes against its documentation, and a crash."""
    q, k, v = (x.npu().requires_grad_() for x in normal(0, *[[5, 2, 8]] * 3))
    with Calls() as calls:
        out = torch_npu.npu_fusion_attention_v2(
            q, k, v, 2, "TND", actual_seq_qlen=[5], actual_seq_kvlen=[5]
        )[0]
        out.sum().backward()
    (forward, args, kwargs, result), (backward, *grad_args, _) = calls.seen
    assert result[1].shape == (5, 2, 8)
    assert forward(*on_meta(args), **on_meta(kwargs))[1].shape == (5, 2, 8, 8)
    with pytest.raises(TypeError, match="empty_like"):
        backward(*on_meta(grad_args[0]), **on_meta(grad_args[1]))


@pytest.mark.schema
@pytest.mark.parametrize(("mask", "precise"), [(None, 0), (torch.eye(5).bool(), 2)])
def test_only_a_given_mask_asks_for_queries_without_keys_to_be_computed(mask, precise):
    """inner_precise=2 does, and costs time; no number here depends on it."""
    inputs = [x.npu() for x in normal(0, *[[1, 2, 5, 8]] * 3)]
    with Calls() as calls:
        ops.attention(*inputs, layout="BNSD", mask=None if mask is None else mask.npu())
    ((func, args, kwargs, _),) = calls.seen
    names = [argument.name for argument in func._schema.arguments]
    assert (dict(zip(names, args, strict=False)) | kwargs).get("inner_precise", 0) == precise


@pytest.mark.schema
def test_torch_npus_own_autograd_calls_the_backward_operators(npu_calls):
    x, gamma = (t.npu().requires_grad_() for t in normal(0, [3, 4], [4]))
    y = torch_npu.npu_rms_norm(x, gamma)[0]
    assert "NpuRmsNorm" in type(y.grad_fn).__name__
    y.sum().backward()
    assert npu_calls == {"npu_rms_norm": 1, "npu_rms_norm_backward": 1}


@pytest.mark.schema
def test_each_registered_kernel_has_an_operator_in_the_wheel():
    names = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    assert {f"npu::{name}" for name in operators._KERNELS} <= set(names)
    assert simulator.loaded()
