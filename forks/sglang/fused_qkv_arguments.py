"""The fused split, norm and rope of Qwen3 is called as today's sgl-kernel-npu takes it."""

from collections.abc import Iterable

from rebase.recipe import Code, Lost, Place, Recipe, Rule, Splice, add_argument


def name_the_weights(place: Place) -> Iterable[Splice]:
    """Take the two weights out of the positional arguments and pass them by name."""
    weight, size = place.code.get_match("WEIGHT"), place.code.get_match("SIZE")
    if weight is None or size is None:
        raise Lost("the weights are not where the sizes should be")
    yield Splice(weight.range().start.index, size.range().start.index, "")
    yield from add_argument("q_weight=self.q_norm.weight")(place)
    yield from add_argument("k_weight=self.k_norm.weight")(place)


recipe = Recipe(
    subject="[NPU] Pass the fused qkv kernel its weights by name",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        In sgl-kernel-npu 2025.12.31 split_qkv_rmsnorm_rope got optional norms: the weights moved
        behind eps. Called as before, it takes a weight for a size.
    """,
    how="The two weights go by name. forward_prepare_npu runs on NPU only.",
    upstream="https://github.com/sgl-project/sglang/pull/16115",
    until="v0.5.8 is the oldest release we follow.",
    rules=(
        Rule(
            find=Code(
                "split_qkv_rmsnorm_rope($_, $_, $_, $WEIGHT, self.k_norm.weight, $SIZE, $$$)",
                inside="forward_prepare_npu",
            ),
            edit=name_the_weights,
            expect=(
                "*/qwen3.py:Qwen3Attention.forward_prepare_npu",
                "*/qwen3_moe.py:Qwen3MoeAttention.forward_prepare_npu",
            ),
            upstream=Code(
                {
                    "kind": "keyword_argument",
                    "has": {"field": "name", "pattern": "q_weight"},
                },
                inside="forward_prepare_npu",
                where="python/sglang/srt/models/",
            ),
            needed=Code("split_qkv_rmsnorm_rope($$$)", inside="forward_prepare_npu"),
        ),
    ),
)
