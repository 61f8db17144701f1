"""The critic's value head sits where a vision language model makes its output."""

from collections.abc import Iterable

from rebase.recipe import Code, Place, Recipe, Rule, Splice, add_import, insert_after


def wrap(place: Place) -> Iterable[Splice]:
    """The function's name is bound again after it, two blank lines apart."""
    code = "if is_npu():\n    get_model_provider_func = value_head(get_model_provider_func)"
    for splice in insert_after(code)(place):
        yield splice._replace(new=f"\n\n{splice.new}")


recipe = Recipe(
    subject="[NPU] Put a vision language critic's value head on its language model",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        A vision language model makes its output in `language_model.output_layer`. slime gives a
        critic's head to the outer model's `output_layer`, or with Bridge at first none at all;
        and under sequence parallelism the head's bias was long not marked, so ranks drift apart.
    """,
    how="""
        What makes the providers is wrapped once, after it: slime_npu moves the head, or makes it,
        and marks its bias. Without an NPU the name stays what upstream defined.
    """,
    until="Upstream puts the head on the language model, in every release we follow.",
    rules=(
        Rule(
            find=Code(
                {
                    "kind": "function_definition",
                    "has": {"field": "name", "regex": "^get_model_provider_func$"},
                },
                inside="get_model_provider_func",
                where="slime/",
            ),
            edit=(
                wrap,
                add_import(
                    "from slime_npu.megatron import is_npu, value_head",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=("slime/backends/megatron_utils/model_provider.py",),
        ),
    ),
)
