"""Deepstack features leave a recomputed vision layer with their gradients."""

from rebase.recipe import Code, Recipe, Rule, add_import, insert_after

recipe = Recipe(
    subject="[NPU] Return deepstack features from recomputation one by one",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        The vision tower of v0.4.0 and later recomputes with the language model's settings and
        returns its deepstack features in a list. Recomputation connects tensors to the graph, not
        what a list holds, so under full recompute the deepstack mergers learn nothing and the
        layers below miss what should come through them. Nothing fails.
    """,
    how="""
        slime_npu wraps the function that checkpoints: the list's tensors go through one by one, and
        come out in a list again. The fault is upstream's on any device; the mend is for NPU only,
        so that without one this branch runs what upstream wrote.
    """,
    until="Upstream's checkpointed vision layer returns no list.",
    rules=(
        Rule(
            find=Code(
                {
                    "kind": "function_definition",
                    "has": {"field": "name", "regex": "^checkpoint_handler$"},
                },
                inside="Qwen3VLVisionTransformerBlock._checkpointed_forward",
            ),
            edit=(
                insert_after("""

                    if is_npu():
                        from slime_npu.bridge import flat_outputs

                        checkpoint_handler = flat_outputs(checkpoint_handler)
                """),
                add_import(
                    "from slime_npu.device import is_npu",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=("*:Qwen3VLVisionTransformerBlock._checkpointed_forward.checkpoint_handler",),
            needed=Code(
                "return hidden_states, deepstack_feature_lists, context",
                inside="Qwen3VLVisionTransformerBlock._checkpointed_forward",
            ),
        ),
    ),
)
