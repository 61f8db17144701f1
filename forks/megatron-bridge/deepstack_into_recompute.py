"""Deepstack embeddings enter a recomputed language layer as a tensor, not as a list."""

from rebase.recipe import Code, Recipe, Rule, add_import, insert_before

recipe = Recipe(
    subject="[NPU] Hand deepstack embeddings to recomputation as a tensor",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        Activation recomputation saves its arguments for backward, and of a list it can neither save
        the tensors nor give them gradients: full recompute stops at the first image.
    """,
    how="""
        The embeddings, all of one shape, are stacked before the layers see them. A layer counts and
        indexes them as it did the list. The fault is upstream's on any device; the mend is for NPU
        only, so that without one this branch runs what upstream wrote.
    """,
    upstream="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/1943 (each as an argument)",
    until="v0.4.0 is the oldest release we follow.",
    rules=(
        Rule(
            find=Code(
                {
                    "kind": "if_statement",
                    "has": {
                        "field": "condition",
                        "pattern": 'self.config.recompute_method == "uniform"',
                    },
                },
                inside="Qwen3VLTransformerBlock._checkpointed_forward",
            ),
            edit=(
                insert_before("""
                    if is_npu() and deepstack_visual_embeds:
                        deepstack_visual_embeds = torch.stack(deepstack_visual_embeds)
                """),
                add_import("import torch"),
                add_import(
                    "from slime_npu.device import is_npu",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=("*:Qwen3VLTransformerBlock._checkpointed_forward",),
            upstream=Code(
                {"kind": "list_splat", "inside": {"kind": "argument_list"}},
                inside="Qwen3VLTransformerBlock._checkpointed_forward",
            ),
            needed=Code(
                {"kind": "function_definition"},
                inside="Qwen3VLTransformerBlock._checkpointed_forward",
            ),
        ),
    ),
)
