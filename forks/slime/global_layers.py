"""A vision language model's layers are counted over the whole pipeline."""

from rebase.recipe import Code, Recipe, Rule, add_import, insert_before

recipe = Recipe(
    subject="[NPU] Count a vision language model's layers over the pipeline",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        Each pipeline stage counts its layers from 0, and slime adds the stage's offset to the
        names it recognises. Before #2251 it recognised `decoder.layers` only, not the layers
        of a `language_model`, so stages overwrote each other's weights in the engines.
    """,
    how="""
        Before upstream looks at a name, slime_npu adds the offset to a language model's layer,
        and to nothing of the vision tower's. Upstream's pattern then passes the name on as it
        is. No converter adds an offset of its own.
    """,
    upstream="https://github.com/THUDM/slime/pull/2251",
    until="v0.3.1 is the oldest release we follow.",
    rules=(
        Rule(
            find=Code(
                "decoder_layers_pattern = $PATTERN", inside="_named_params_and_buffers_global"
            ),
            edit=(
                insert_before("if is_npu():\n    name = global_name(name, layer_offset)"),
                add_import(
                    "from slime_npu.megatron import global_name, is_npu",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=(
                "slime/backends/megatron_utils/update_weight/common.py",
                "slime/backends/megatron_utils/update_weight/common.py",
            ),
            upstream=Code(
                {
                    "all": [
                        {"pattern": "decoder_layers_pattern = $PATTERN"},
                        {"regex": "language_model"},
                    ]
                },
                inside="_named_params_and_buffers_global",
            ),
        ),
    ),
)
