"""Qwen3's output head splits over the attention group where the server says so."""

from rebase.recipe import Code, Recipe, Rule, add_argument, add_import


def group(model: str) -> Rule:
    """The head that the constructor of `model` makes."""
    return Rule(
        find=Code("ParallelLMHead($$$)", inside=f"{model}.__init__"),
        edit=(
            add_argument(
                "use_attn_tp_group=is_npu() and get_global_server_args().enable_dp_lm_head"
            ),
            add_import("from sglang.srt.server_args import get_global_server_args"),
            add_import("from sglang.srt.utils import is_npu"),
        ),
        expect=(f"*:{model}.__init__",),
        upstream=Code(
            {"kind": "keyword_argument", "has": {"field": "name", "pattern": "use_attn_tp_group"}},
            inside=f"{model}.__init__",
        ),
        needed=Code("ParallelLMHead($$$)", inside=f"{model}.__init__"),
    )


recipe = Recipe(
    subject="[NPU] Give Qwen3's output head the attention group",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        With --enable-dp-lm-head the logits are gathered over the attention group, but Qwen3's head
        is split over all ranks.
    """,
    how="""
        The argument that Llama's head has. Without an NPU it is False, which is its default.
    """,
    upstream="https://github.com/sgl-project/sglang/pull/16115 (Qwen3ForCausalLM)",
    until="v0.5.9 is the oldest release we follow.",
    rules=(group("Qwen3ForCausalLM"), group("Qwen3VLForConditionalGeneration")),
)
