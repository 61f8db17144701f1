"""Qwen3-VL's parameters have Hugging Face's names when they go to the engines."""

from rebase.recipe import Code, Recipe, Rule, add_import, insert_before

recipe = Recipe(
    subject="[NPU] Name Qwen3-VL's parameters as Hugging Face does",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        Weights sent over a group of engines are converted by slime itself, even with Bridge, and
        v0.2.2 takes Qwen3-VL for the text model Qwen3, whose names it does not have.
    """,
    how="One conditional before the model's name is looked at; slime_npu converts.",
    until="v0.2.2 is no target any more.",
    rules=(
        Rule(
            find=Code(
                {
                    "kind": "if_statement",
                    "regex": "^if .[a-z0-9]+. in model_name",
                    "inside": {"kind": "block", "inside": {"kind": "function_definition"}},
                },
                inside="_convert_to_hf_core",
                where="slime/",
            ),
            edit=(
                insert_before("""
                    if is_npu() and "qwen3vl" in model_name:
                        return qwen3_vl_to_hf(args, name, param)
                """),
                add_import(
                    "from slime_npu.megatron import is_npu, qwen3_vl_to_hf",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=("slime/backends/megatron_utils/megatron_to_hf/__init__.py",),
            upstream=Code("convert_qwen3vl_to_hf($$$)", inside="_convert_to_hf_core"),
        ),
    ),
)
