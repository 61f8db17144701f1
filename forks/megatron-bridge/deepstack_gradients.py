"""Deepstack embeddings get their whole gradient under tensor and sequence parallel."""

from rebase.recipe import Code, Recipe, Rule, add_import, insert_before

recipe = Recipe(
    subject="[NPU] Sum deepstack gradients over tensor parallel ranks",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        Under sequence parallel each tensor parallel rank cuts its own part out of the deepstack
        embeddings, and the cut sends back the gradient of that part only. What comes before it
        expects the whole gradient on every rank, as scatter_to_sequence_parallel_region gives it
        for the vision embeddings themselves. A vision tower that is replicated averages over the
        ranks, so its deepstack gradients come out divided by their number (half at TP 2, a quarter
        at TP 4); one that is sharded (from v0.4.0 on) updates each shard from a part of the image.
    """,
    how="""
        Before the cut the embeddings pass through slime_npu: forward the identity, backward a sum
        over the ranks that cut. The fault is upstream's on any device. The mend is for NPU only all
        the same: without one this branch runs what upstream wrote.
    """,
    until="Upstream's split_deepstack_embs, or what calls it, sums the gradient.",
    rules=(
        Rule(
            find=Code("deepstack_visual_embeds_ret = []", inside="split_deepstack_embs"),
            edit=(
                insert_before("""
                    if is_npu():
                        from slime_npu.bridge import sum_gradients

                        deepstack_visual_embeds = sum_gradients(deepstack_visual_embeds, tp_size)
                """),
                add_import(
                    "from slime_npu.device import is_npu",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=("*:split_deepstack_embs",),
            upstream=Code(
                "$_.copy_to_tensor_model_parallel_region($$$)", inside="split_deepstack_embs"
            ),
            needed=Code({"kind": "function_definition"}, inside="split_deepstack_embs"),
        ),
    ),
)
