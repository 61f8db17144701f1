"""Qwen3-VL loads its Hugging Face weights where slime has no Bridge."""

from rebase.recipe import Code, Recipe, Rule, add_import, insert_after

recipe = Recipe(
    subject="[NPU] Load Qwen3-VL without Bridge",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        Since #2251 slime reads Hugging Face weights itself, by a table of model types that has
        no Qwen3-VL. The model needs no change: `--spec` takes slime_npu's provider.
    """,
    how="One conditional after the table: slime_npu adds its loaders. Upstream's own stay.",
    upstream="https://github.com/THUDM/slime/pull/2251 (removes Bridge)",
    until="Upstream's table has qwen3_vl.",
    rules=(
        Rule(
            find=Code("_LOADERS = $TABLE", where="slime/backends/megatron_utils/"),
            edit=(
                insert_after("if is_npu():\n    _LOADERS.update(loaders())"),
                add_import(
                    "from slime_npu.megatron import is_npu, loaders",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=("slime/backends/megatron_utils/hf_to_megatron/__init__.py",),
            upstream=Code(
                {
                    "kind": "pair",
                    "has": {"field": "key", "regex": "^.qwen3_vl.$"},
                    "inside": {"inside": {"pattern": "_LOADERS = $TABLE"}},
                },
                where="slime/backends/megatron_utils/",
            ),
            needed=Code(
                {"kind": "function_definition"},
                inside="load_hf_weights",
                where="slime/backends/megatron_utils/",
            ),
        ),
    ),
)
