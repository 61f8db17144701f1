"""RotaryEmbedding asks for no fallback kernel on NPU, whatever the head size."""

from rebase.recipe import Code, Recipe, Rule, replace

recipe = Recipe(
    subject="[NPU] Need no fallback rope kernel",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        For a head size that the CUDA kernel does not know, as the vision tower's 72,
        RotaryEmbedding imports vLLM's kernel. forward_npu needs neither, and an NPU host
        need not have vLLM.
    """,
    how="The condition leaves NPU out. Without an NPU it has the value it had.",
    until="v0.5.9 is the oldest release we follow.",
    rules=(
        Rule(
            find=Code(
                "self.head_size not in [64, 128, 256, 512]",
                inside="RotaryEmbedding.__init__",
                where="python/sglang/srt/layers/",
            ),
            edit=replace("self.head_size not in [64, 128, 256, 512] and not _is_npu"),
            expect=("*:RotaryEmbedding.__init__",),
            upstream=Code(
                {"any": [{"pattern": "not (_is_npu)"}, {"pattern": "not _is_npu"}]},
                inside="RotaryEmbedding.__init__",
                where="python/sglang/srt/layers/",
            ),
            needed=Code(
                "from vllm._custom_ops import rotary_embedding",
                inside="RotaryEmbedding.__init__",
                where="python/sglang/srt/layers/",
            ),
        ),
    ),
)
