"""The fused operators: on NPUs, in plain torch, and as torch, Megatron and Hugging Face have them.

Tolerance in float32, of values and gradients of N(0, 1) inputs: 5e-6 for attention and the others,
2e-5 where a gradient sums over positions or heads.
"""

import inspect
import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.fusions.fused_bias_dropout import (
    bias_dropout_add_fused_inference,
    bias_dropout_add_fused_train,
    bias_dropout_add_unfused,
)
from megatron.core.models.common.embeddings import rope_utils
from tiny_models import import_transformers
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from slime_npu import ops, simulator

quick = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 8)
types = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def normal(seed, *shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def close(actual, expected, tolerance=5e-6, dtype=None):
    """Equal up to the tolerance, or eight roundings where it was computed in a shorter type."""
    if (dtype := dtype or actual.dtype) != torch.float32:
        tolerance = 8 * torch.finfo(dtype).eps * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        actual.cpu().double(), expected.cpu().double(), atol=tolerance, rtol=tolerance
    )


def both(function, *inputs, tolerance=2e-5):
    """A function's result and gradients on an NPU and on the CPU, which are the same; the CPU's.

    On the NPU it calls one fused operator and its backward, on the CPU none.
    """
    results = {}
    for device in ("cpu", "npu"):
        simulator.calls().clear()
        own = [x.detach().to(device).requires_grad_() for x in inputs]
        out = function(*own)
        forward = sum(simulator.calls().values())
        (grad,) = normal(7, out.shape, dtype=out.dtype)
        gradients = torch.autograd.grad(out, own, grad.to(device))
        assert out.device.type == device and out.dtype == inputs[0].dtype
        assert (forward, sum(simulator.calls().values())) == {"cpu": (0, 0), "npu": (1, 2)}[device]
        results[device] = out, gradients
    (out, gradients), (on_npu, on_npu_gradients) = results["cpu"], results["npu"]
    close(on_npu, out)
    for one, other in zip(on_npu_gradients, gradients, strict=True):
        close(one, other, tolerance, out.dtype)
    return out, gradients


def as_torch_has_it(function, formula, *inputs, tolerance=2e-5):
    """`both`, and the same values and gradients as a formula of torch's own."""
    out, gradients = both(function, *inputs, tolerance=tolerance)
    own = [x.clone().requires_grad_() for x in inputs]
    expected = formula(*own)
    (grad,) = normal(7, out.shape, dtype=out.dtype)
    close(out, expected)
    for one, other in zip(gradients, torch.autograd.grad(expected, own, grad), strict=True):
        close(one, other, tolerance)


# --- rotary embedding -----------------------------------------------------------------------------


def config(interleaved=False, latent=False):
    return SimpleNamespace(
        rotary_interleaved=interleaved,
        multi_latent_attention=latent,
        apply_rope_fusion=False,
        mrope_section=None,
    )


@dataclass(frozen=True)
class Group:
    """A rank of a context parallel group, which rotary embeddings ask for nothing else."""

    of_rank: int
    of_size: int

    def rank(self):
        return self.of_rank

    def size(self):
        return self.of_size


ALONE = Group(0, 1)


@pytest.mark.schema
@pytest.mark.parametrize(
    ("ours", "megatrons"),
    [
        (ops.apply_rotary_pos_emb, rope_utils.apply_rotary_pos_emb),
        (ops.bias_dropout_add_fused_train, bias_dropout_add_fused_train),
        (ops.bias_dropout_add_fused_inference, bias_dropout_add_fused_inference),
    ],
)
def test_signatures_are_megatrons(ours, megatrons):
    def arguments(function):
        parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert arguments(ours) == arguments(megatrons)


@pytest.mark.reference
@given(
    shape=st.tuples(sizes, sizes, sizes),
    turned=sizes.map(lambda n: 2 * n),
    rest=st.integers(0, 3),
    each=st.booleans(),
    interleaved=st.booleans(),
    latent=st.booleans(),
    mscale=st.sampled_from([1.0, 0.7, 1.3]),
    seed=seeds,
    dtype=types,
)
@quick
def test_rotary_is_megatrons(shape, turned, rest, each, interleaved, latent, mscale, seed, dtype):
    length, batch, heads = shape
    each = each and not interleaved  # a phase for each batch entry, as mrope has it
    (t,) = normal(seed, [length, batch, heads, turned + rest], dtype=dtype)
    (freqs,) = normal(seed + 1, [length, batch if each else 1, 1, turned])
    how = config(interleaved, latent)

    def ours(t, freqs):
        return ops.apply_rotary_pos_emb(t, freqs, how, mscale=mscale)

    out, gradients = both(ours, t, freqs, tolerance=1e-4)
    expected = rope_utils.apply_rotary_pos_emb(t, freqs, how, mscale=mscale, cp_group=ALONE)
    if mscale == 1:
        assert out.equal(expected)
    close(out, expected)
    own = [x.clone().requires_grad_() for x in (t, freqs)]
    theirs = rope_utils.apply_rotary_pos_emb(*own, how, mscale=mscale, cp_group=ALONE)
    (grad,) = normal(7, out.shape, dtype=dtype)
    close(gradients[0], torch.autograd.grad(theirs, own[:1], grad)[0])


@pytest.mark.reference
@given(
    parts=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any),
    ranks=st.sampled_from([1, 2, 4]),
    each=st.booleans(),
    interleaved=st.booleans(),
    seed=seeds,
)
@quick
def test_packed_rotary_is_megatrons_on_each_context_parallel_rank(
    parts, ranks, each, interleaved, seed
):
    """`each`: a phase for each token of the batch, as VLMs have it, or one for each position."""
    lengths = [2 * ranks * part for part in parts]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    rows = sum(lengths) if each else max(lengths) + 3
    (freqs,) = normal(seed, [rows, 1, 1, 6])
    for rank in range(ranks):
        group = Group(rank, ranks)
        (t,) = normal(seed + rank, [sum(lengths) // ranks, 3, 8])

        def run(function, t, freqs, group=group):
            return function(t, freqs, config(interleaved), cu_seqlens=cu_seqlens, cp_group=group)

        out, (gradient, _) = both(
            lambda t, freqs, run=run: run(ops.apply_rotary_pos_emb, t, freqs),
            t,
            freqs,
            tolerance=1e-4,
        )
        own = t.clone().requires_grad_()
        expected = run(rope_utils.apply_rotary_pos_emb, own, freqs)
        assert out.equal(expected)
        (grad,) = normal(7, out.shape)
        close(gradient, torch.autograd.grad(expected, own, grad)[0])


@pytest.mark.reference
@given(shape=st.tuples(sizes, sizes, sizes), half=sizes, seed=seeds, dtype=types)
@quick
def test_rotary_with_heads_first_is_hugging_faces(shape, half, seed, dtype):
    import_transformers()
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    batch, heads, length = shape
    q, k = normal(seed, *[[batch, heads, length, 2 * half]] * 2, dtype=dtype)
    phase = torch.randn(batch, length, half, generator=torch.Generator().manual_seed(seed))
    phase = torch.cat((phase, phase), -1)
    cos, sin = phase.cos().to(dtype), phase.sin().to(dtype)
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    for x, want in zip((q, k), expected, strict=True):
        tables = [t.unsqueeze(1) for t in (cos, sin)]
        out, _ = both(ops.rotary, x, *tables, tolerance=1e-4)
        assert out.equal(want)


@pytest.mark.reference
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
@given(shape=st.tuples(sizes, sizes, sizes), half=sizes, spread=st.integers(0, 2), seed=seeds)
@quick
def test_rotary_is_the_same_in_each_layout(order, shape, half, spread, seed):
    """BNSD as it is, BSND and SBND; cos for each position, batch entry and head as spread says."""
    x, cos, sin = normal(
        seed,
        [*shape, 2 * half],
        *[[*(n if i < spread else 1 for i, n in enumerate(shape[:2])), shape[2], 2 * half]] * 2,
    )
    out, gradients = both(
        ops.rotary, *(t.permute(order).contiguous() for t in (x, cos, sin)), tolerance=1e-4
    )
    own = [t.clone().requires_grad_() for t in (x, cos, sin)]
    expected = ops.rotary(*own)
    assert out.equal(expected.permute(order))
    (grad,) = normal(7, out.shape)
    want = torch.autograd.grad(expected.permute(order), own, grad)
    for one, other in zip(gradients, want, strict=True):
        close(one, other.permute(order), 1e-4)


@pytest.mark.reference
def test_the_phase_stays_in_float32_for_bfloat16_queries():
    freqs = (1000.0 + torch.arange(8.0)).view(8, 1, 1, 1).expand(8, 1, 1, 2)
    t = torch.ones(8, 1, 1, 2, dtype=torch.bfloat16)
    phase = freqs.double()
    expected = phase.cos() + torch.tensor([-1.0, 1.0]) * phase.sin()
    for device in ("cpu", "npu"):
        out = ops.apply_rotary_pos_emb(t.to(device), freqs.to(device), config())
        assert (out.cpu() - expected).abs().max() < 0.02
    with pytest.raises(ops.OperatorError, match=r"phase is torch.bfloat16.*keep freqs in float32"):
        ops.apply_rotary_pos_emb(t, freqs.bfloat16(), config())


@pytest.mark.plumbing
@pytest.mark.parametrize(
    ("says", "cu_seqlens", "table", "ranks"),
    [
        ("6 tokens has no 4 equal parts", [0, 8, 14], 14, 2),
        ("leave 8 tokens", [0, 8], 8, 1),
        ("more positions than the 9", [0, 10], 9, 1),
    ],
)
def test_packed_lengths_that_do_not_fit_rotary_are_refused(says, cu_seqlens, table, ranks):
    with pytest.raises(ops.OperatorError, match=says):
        ops.apply_rotary_pos_emb(
            torch.ones(10, 1, 4),
            torch.ones(table, 1, 1, 4),
            config(),
            cu_seqlens=torch.tensor(cu_seqlens),
            cp_group=Group(0, ranks),
        )


# --- attention ------------------------------------------------------------------------------------

INTO = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "SBND": (2, 0, 1, 3)}  # from BNSD


def explicit(q, k, v, kept, scale):
    """[B, N, S, D] attention in float64, written out."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~kept, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


@st.composite
def problems(draw, packed=False):
    """Shapes of query, key and value as [B, N, S, D]; no more queries than keys."""
    shared, size = draw(st.integers(1, 3)), draw(st.integers(1, 16))
    batch, heads = draw(st.integers(1, 3)), shared * draw(st.integers(1, 3))
    keys = draw(st.integers(1, 10))
    queries = draw(st.integers(1, keys))
    value = draw(st.integers(1, size))
    return [batch, heads, queries, size], [batch, shared, keys, size], [batch, shared, keys, value]


@pytest.mark.reference
@pytest.mark.parametrize("layout", INTO)
@pytest.mark.parametrize("how", ["all", "causal", "one mask", "a mask each"])
@given(problem=problems(), scale=st.sampled_from([None, 0.3]), seed=seeds, dtype=types)
@settings(max_examples=8, deadline=None)
def test_attention_is_torchs(layout, how, problem, scale, seed, dtype):
    inputs = normal(seed, *problem, dtype=dtype)
    batch, heads, queries, size = problem[0]
    keys = problem[1][2]
    kept, options = torch.ones(queries, keys, dtype=torch.bool), {}
    if how == "causal":
        kept, options = kept.tril(keys - queries), {"causal": True}
    elif how != "all":
        shape = [queries, keys] if how == "one mask" else [batch, heads, queries, keys]
        kept = normal(seed + 1, shape)[0] > -0.5
        options = {"mask": ~kept}

    def ours(q, k, v):
        own = {n: x.to(q.device) if n == "mask" else x for n, x in options.items()}
        q, k, v = (x.permute(INTO[layout]) for x in (q, k, v))
        out = ops.attention(q, k, v, layout=layout, scale=scale, **own)
        return out.permute([INTO[layout].index(i) for i in range(4)])

    def torchs(q, k, v):
        return scaled_dot_product_attention(q, k, v, attn_mask=kept, scale=scale, enable_gqa=True)

    as_torch_has_it(ours, torchs, *inputs)
    close(ours(*inputs), explicit(*inputs, kept, scale or 1 / math.sqrt(size)))


@pytest.mark.reference
@pytest.mark.parametrize("causal", [False, True])
@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=5),
    longer=st.booleans(),
    seed=seeds,
    dtype=types,
)
@quick
def test_packed_attention_is_torchs_of_each_sequence(causal, lengths, longer, seed, dtype):
    """Of as many keys as queries, or some more; but for the first, sequences may be empty."""
    lengths = [(q, q + more if longer else q) for q, more in [(3, 2), *lengths]]
    q_sizes, k_sizes = zip(*lengths, strict=True)
    inputs = normal(
        seed, [sum(q_sizes), 4, 6], [sum(k_sizes), 2, 6], [sum(k_sizes), 2, 5], dtype=dtype
    )
    ends = {"ends_q": list(itertools.accumulate(q_sizes))}
    if longer:
        ends["ends_kv"] = list(itertools.accumulate(k_sizes))

    def torchs(q, k, v):
        parts = zip(q.split(q_sizes), k.split(k_sizes), v.split(k_sizes), strict=True)
        return torch.cat(
            [
                scaled_dot_product_attention(
                    *(x.transpose(0, 1).unsqueeze(0) for x in qkv),
                    attn_mask=torch.ones(len(qkv[0]), len(qkv[1]), dtype=torch.bool).tril(
                        len(qkv[1]) - len(qkv[0]) if causal else 99
                    ),
                    enable_gqa=True,
                )[0].transpose(0, 1)
                for qkv in parts
            ]
        )

    def ours(q, k, v):
        return ops.attention(q, k, v, layout="TND", causal=causal, **ends)

    as_torch_has_it(ours, torchs, *inputs)


@pytest.mark.reference
def test_a_query_that_sees_no_key_gives_zero_and_no_gradient():
    mask = torch.tensor([[True, True], [False, True]])
    inputs = normal(3, *[[1, 1, 2, 4]] * 3)

    def ours(q, k, v):
        return ops.attention(q, k, v, layout="BNSD", mask=mask.to(q.device))

    out, (dq, _, _) = both(ours, *inputs)
    assert not out[:, :, 0].any() and not dq[:, :, 0].any()
    close(out[:, :, 1], inputs[2][:, :, 0])


@pytest.mark.reference
def test_a_packed_mask_is_cut_to_each_sequence():
    inputs = normal(3, *[[5, 2, 4]] * 3)
    mask = torch.ones(3, 3, dtype=torch.bool).triu(1)

    def ours(q, k, v):
        return ops.attention(q, k, v, layout="TND", mask=mask.to(q.device), ends_q=[2, 5])

    out, _ = both(ours, *inputs)
    close(out, ops.attention(*inputs, layout="TND", causal=True, ends_q=[2, 5]))


# --- the others -----------------------------------------------------------------------------------


@pytest.mark.reference
@given(
    shape=st.lists(sizes, min_size=1, max_size=4), over=st.integers(1, 2), seed=seeds, dtype=types
)
@quick
def test_rms_norm_is_torchs(shape, over, seed, dtype):
    over = min(over, len(shape))
    x, weight = normal(seed, shape, shape[-over:], dtype=dtype)
    as_torch_has_it(
        lambda x, weight: ops.rms_norm(x, weight, 1e-2),
        lambda x, weight: rms_norm(x, weight.shape, weight, 1e-2),
        x,
        weight,
        tolerance=1e-4,
    )


@pytest.mark.reference
@given(
    shape=st.lists(sizes, min_size=1, max_size=4), axis=st.integers(0, 3), seed=seeds, dtype=types
)
@quick
def test_swiglu_is_torchs(shape, axis, seed, dtype):
    dim = axis % len(shape)
    shape[dim] *= 2
    (x,) = normal(seed, shape, dtype=dtype)

    def torchs(x):
        first, second = x.chunk(2, dim)
        return silu(first) * second

    as_torch_has_it(lambda x: ops.swiglu(x, dim), torchs, x)


@pytest.mark.reference
@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("training", [True, False])
@given(shape=st.tuples(sizes, sizes), bias=st.booleans(), wide=st.booleans(), seed=seeds)
@quick
def test_bias_dropout_add_is_megatrons(device, training, shape, bias, wide, seed):
    """Without dropout: with it, an NPU's random numbers are not the CPU's."""
    x, b = normal(seed, shape, shape[-1:], dtype=torch.bfloat16)
    (residual,) = normal(seed + 1, shape, dtype=torch.float32 if wide else torch.bfloat16)
    b = b if bias else None
    ours = ops.bias_dropout_add_fused_train if training else ops.bias_dropout_add_fused_inference
    prob = 0.0 if training else 0.5

    def run(function, device):
        own = [t if t is None else t.detach().to(device).requires_grad_() for t in (x, b, residual)]
        out = function((own[0], own[1]), own[2], prob)
        out.float().square().sum().backward()
        return [out, *(t.grad for t in own if t is not None)]

    expected = run(bias_dropout_add_unfused(training), "cpu")
    for one, other in zip(run(ours, device), expected, strict=True):
        assert one.dtype == other.dtype
        close(one, other)


@pytest.mark.reference
@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_dropout_keeps_some_and_scales_them(device):
    x, residual = normal(1, *[[64, 64]] * 2)
    bias = torch.full([64], 9.0)
    torch.manual_seed(1)
    torch.npu.manual_seed(1)
    out = ops.bias_dropout_add_fused_train(
        (x.to(device), bias.to(device)), residual.to(device), 0.25
    )
    added = out.cpu() - residual
    kept = added.abs() > 1
    close(added[kept], ((x + bias) / 0.75)[kept], 1e-5)
    assert not added[~kept].any() and 0.7 < kept.double().mean() < 0.8


@pytest.mark.reference
@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_inference_computes_in_place_as_megatrons(device):
    x, bias, residual = (t.to(device) for t in normal(1, [4, 4], [4], [4, 4]))
    expected = x + bias + residual
    assert ops.bias_dropout_add_fused_inference((x, bias), residual, 0.1) is x
    close(x, expected)


# --- limits ---------------------------------------------------------------------------------------


def on_npu(*shapes, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype).npu() for shape in shapes]


@pytest.mark.plumbing
@pytest.mark.parametrize(
    ("says", "shape", "table", "interleaved"),
    [
        ("has no pairs", (1, 1, 2, 3), (1, 1, 2, 3), False),
        ("takes less than 896", (1, 1, 2, 896), (1, 1, 2, 896), False),
        ("broadcast", (1, 1, 2, 4), (1, 1, 3, 4), False),
        ("as BNSD: batch 1000 and 3 heads", (1000, 3, 2, 4), (1, 1, 2, 4), False),
        ("as SBND: batch 2 and 1000 heads", (3, 2, 1000, 4), (3, 1, 1, 4), False),
        ("as BNSD: 40 x 25 heads, interleaved", (40, 25, 2, 4), (1, 1, 2, 4), True),
        ("as BNSD: interleaved, cos must be the same", (2, 3, 2, 4), (2, 1, 2, 4), True),
        ("as BNSD: cos is for each head", (2, 3, 5, 4), (1, 3, 5, 4), False),
        ("cos has no value for each position", (2, 2, 2, 4), (1, 1, 1, 4), False),
    ],
)
def test_what_rotary_does_not_take_on_an_npu_is_refused(says, shape, table, interleaved):
    with pytest.raises(ops.OperatorError, match=f"npu_rotary_mul: .*{says}.*nothing was computed"):
        ops.rotary(*on_npu(shape, table, table), interleaved=interleaved)


@pytest.mark.plumbing
def test_the_gradient_of_cos_has_a_limit_of_its_own(npu_calls):
    x, cos, sin = on_npu((33, 32, 1, 2), (1, 1, 1, 2), (1, 1, 1, 2))
    ops.rotary(x.requires_grad_(), cos, sin)
    with pytest.raises(ops.OperatorError, match="33 x 32 heads; for cos's gradient it takes at"):
        ops.rotary(x, cos.requires_grad_(), sin)
    with torch.no_grad():
        ops.rotary(x, cos, sin)
    assert npu_calls == {"npu_rotary_mul": 2}


@pytest.mark.plumbing
@pytest.mark.parametrize(
    ("says", "layout", "shapes", "options"),
    [
        ("769 features", "BNSD", [(1, 1, 2, 769)] * 3, {}),
        ("257 heads", "BSND", [(1, 2, 257, 4)] * 3, {}),
        ("1025 packed", "TND", [(1025, 1, 2)] * 3, {"ends_q": list(range(1, 1026))}),
        ("more queries than keys", "BNSD", [(1, 1, 3, 4), *[(1, 1, 2, 4)] * 2], {"causal": True}),
        ("none of BNSD", "BSH", [(1, 2, 4)] * 3, {}),
        ("not in layout SBND", "SBND", [(2, 1, 4)] * 3, {}),
        ("3 heads are no multiple of the 2", "BNSD", [(1, 3, 2, 4), *[(1, 2, 2, 4)] * 2], {}),
        ("batches differ", "BNSD", [(1, 2, 2, 4), *[(2, 2, 2, 4)] * 2], {}),
        ("value no larger", "BNSD", [(1, 1, 2, 4), (1, 1, 2, 4), (1, 1, 2, 5)], {}),
        ("for layout TND", "BNSD", [(1, 1, 2, 4)] * 3, {"ends_q": [2]}),
        ("TND needs ends_q", "TND", [(2, 1, 4)] * 3, {}),
        ("begins with 0", "TND", [(4, 1, 4)] * 3, {"ends_q": [0, 2, 4]}),
        ("ints on the host", "TND", [(4, 1, 4)] * 3, {"ends_q": torch.tensor([2, 4])}),
        ("cumulative", "TND", [(4, 1, 4)] * 3, {"ends_q": [3, 2, 4]}),
        ("end at the 4 rows", "TND", [(4, 1, 4)] * 3, {"ends_q": [2, 3]}),
        (
            "2 sequences of queries and 1",
            "TND",
            [(4, 1, 4)] * 3,
            {"ends_q": [2, 4], "ends_kv": [4]},
        ),
    ],
)
def test_what_attention_does_not_take_is_refused(says, layout, shapes, options):
    with pytest.raises(ops.OperatorError, match=f"npu_fusion_attention: .*{says}"):
        ops.attention(*on_npu(*shapes), layout=layout, **options)


@pytest.mark.plumbing
@pytest.mark.parametrize(
    "mask", [torch.zeros(2, 3), torch.zeros(3, 2).bool(), torch.zeros(1, 2, 2, 3).bool()], ids=str
)
def test_masks_of_another_shape_or_type_are_refused(mask):
    q, k, v = on_npu((2, 4, 2, 4), (2, 4, 3, 4), (2, 4, 3, 4))
    with pytest.raises(ops.OperatorError, match=r"mask .* must be bool and one of \[\[2, 3\], "):
        ops.attention(q, k, v, layout="BNSD", mask=mask.npu())


@pytest.mark.plumbing
@pytest.mark.parametrize(
    ("says", "call"),
    [
        ("float64", lambda: ops.rms_norm(*on_npu((2, 4), (4,), dtype=torch.float64))),
        ("one type", lambda: ops.rms_norm(*on_npu((2, 4)), *on_npu((4,), dtype=torch.float16))),
        ("is not the end of x", lambda: ops.rms_norm(*on_npu((2, 4), (2,)))),
        ("at most 8", lambda: ops.rms_norm(*on_npu((1,) * 9, (1,)))),
        ("no two halves", lambda: ops.swiglu(*on_npu((2, 3)))),
        ("float64", lambda: ops.swiglu(*on_npu((2, 4), dtype=torch.float64))),
        ("float64", lambda: ops.rotary(*on_npu(*[(1, 1, 1, 2)] * 3, dtype=torch.float64))),
        ("on one device", lambda: ops.rms_norm(torch.zeros(2, 4), *on_npu((4,)))),
        (
            "on one device",
            lambda: ops.rotary(*on_npu((1, 1, 1, 2)), *[torch.zeros(1, 1, 1, 2)] * 2),
        ),
    ],
)
def test_types_shapes_and_devices_that_do_not_fit_are_refused(says, call):
    with pytest.raises(ops.OperatorError, match=f"npu_\\w+: .*{says}"):
        call()


@pytest.mark.reference
def test_an_npus_limits_are_not_torchs(npu_calls):
    x = torch.ones(1000, 1, 1, 896)
    assert ops.rotary(x, x[:1], x[:1]).shape == x.shape
    assert ops.attention(*[torch.ones(1, 1, 2, 769)] * 3, layout="BNSD").shape == (1, 1, 2, 769)
    assert not npu_calls
