"""Graph decoding uses fused inference attention, never paged attention."""

from rebase.recipe import Code, Recipe, Rule, replace

recipe = Recipe(
    subject="[NPU] Decode with fused inference attention in graphs",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        A captured decode step uses fused inference attention for batches smaller than the attention
        group and paged attention, which upstream has given up there since, for all others. The
        graph runners update one operator's lengths or the other's by the same comparison.
    """,
    how="""
        Each of these comparisons is true, so attention and runners agree on the fused operator.
        The files are for NPU only.
    """,
    upstream="https://github.com/sgl-project/sglang/pull/17394",
    until="v0.5.9 is the oldest release we follow.",
    rules=(
        Rule(
            find=Code("$COUNT < get_attention_tp_size()", where="python/sglang/srt/"),
            edit=replace("True"),
            expect=(
                "*/ascend_backend.py:AscendAttnBackend.forward_decode_graph",
                "*/npu_graph_runner.py:NPUGraphRunner._get_update_attr_name",
                "*/npu_graph_runner.py:NPUGraphRunner._get_update_attr_type",
            ),
            known=(
                "*/eagle_draft_npu_graph_runner.py:EAGLEDraftNpuGraphRunner._get_update_attr_*",
            ),
            needed=Code("torch_npu._npu_paged_attention($$$)", inside="forward_decode_graph"),
        ),
    ),
)
