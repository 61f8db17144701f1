"""Transformer Engine's names are bound where Transformer Engine does not import."""

from collections.abc import Iterable

from rebase.recipe import Code, Lost, Place, Recipe, Rule, Splice, add_import, insert_after

_PROVIDER = "from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider"


def bind(place: Place) -> Iterable[Splice]:
    """After the guarded imports the same ones again, for an NPU."""
    imports = []
    for node in place.code.find_all(kind="import_from_statement"):
        module = node.field("module_name")
        if module and module.text().startswith("megatron.core.extensions.transformer_engine"):
            names = ", ".join(name.text() for name in node.field_children("name"))
            imports.append(f"    from {module.text()} import {names}")
    if not imports:
        raise Lost("nothing is imported from megatron.core.extensions.transformer_engine")
    return insert_after("\n".join(("if is_npu():", *imports)))(place)


recipe = Recipe(
    subject="[NPU] Bind Transformer Engine's names without Transformer Engine",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        get_gpt_layer_with_transformer_engine_spec asks for a TESpecProvider, and for TENorm, which
        are bound only where transformer_engine imports. On NPU it does not, while MindSpeed stands
        behind what megatron.core.extensions.transformer_engine defines.
    """,
    how="""
        After each guarded import of TESpecProvider one conditional with the same imports. It is
        at module level: inside the function it would hide the name from a GPU host.
    """,
    until="Upstream binds TESpecProvider whether or not transformer_engine imports.",
    rules=(
        Rule(
            find=Code(
                {
                    "any": [{"kind": "try_statement"}, {"kind": "if_statement"}],
                    "has": {"pattern": _PROVIDER, "stopBy": "end"},
                    "inside": {"kind": "module"},
                },
                where="megatron/core/",
            ),
            edit=(
                bind,
                add_import(
                    "from slime_npu.device import is_npu",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=("megatron/core/models/gpt/gpt_layer_specs.py",),
            known=(
                "megatron/core/models/gpt/experimental_attention_variant_module_specs.py",
                "megatron/core/transformer/multi_token_prediction.py",
            ),
            upstream=Code(
                {"pattern": _PROVIDER, "inside": {"kind": "module"}},
                where="megatron/core/models/gpt/gpt_layer_specs.py",
            ),
            needed=Code(
                {"kind": "function_definition"},
                inside="get_gpt_layer_with_transformer_engine_spec",
                where="megatron/core/",
            ),
        ),
    ),
)
