"""Loading the embedding leaves an output head of its own alone."""

from rebase.recipe import Code, Recipe, Rule, add_import, replace

LOAD = "Qwen3VLForConditionalGeneration.load_weights"

recipe = Recipe(
    subject="[NPU] Copy the embedding to a tied head only",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        Qwen3-VL's load_weights writes each embedding it is given to lm_head as well, tied or not.
        The 8B model's is not: after a weight update that brings the embedding last, or alone, the
        model answers with the wrong head.
    """,
    how="""
        On NPU the condition asks for tie_word_embeddings besides. The fault was upstream's on any
        device; without an NPU the condition has the value it had.
    """,
    until="v0.5.9 is the oldest release we follow.",
    rules=(
        Rule(
            find=Code('"model.embed_tokens.weight" in name', inside=LOAD),
            edit=(
                replace(
                    '"model.embed_tokens.weight" in name'
                    " and (not is_npu() or self.config.tie_word_embeddings)"
                ),
                add_import("from sglang.srt.utils import is_npu"),
            ),
            expect=(f"*:{LOAD}",),
            upstream=Code("self.config.tie_word_embeddings", inside=LOAD),
            needed=Code('params_dict["lm_head.weight"]', inside=LOAD),
        ),
    ),
)
