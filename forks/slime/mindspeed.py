"""MindSpeed adapts Megatron: before its first import, and once the arguments are known."""

from collections.abc import Iterable

from rebase.recipe import Code, Place, Recipe, Rule, Splice, add_import, insert_before


def adapt(place: Place) -> Iterable[Splice]:
    """Among imports a statement stands a blank line apart."""
    code = "if is_npu():\n    adapt()  # before Megatron is imported"
    for splice in insert_before(code)(place):
        yield splice._replace(new=f"{splice.new}\n")


recipe = Recipe(
    subject="[NPU] Let MindSpeed adapt Megatron",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        MindSpeed replaces parts of Megatron as it is imported, in every process and before
        Megatron's own modules bind them; with the arguments known it chooses again, which with
        context parallelism must happen before the parallel groups are made.
    """,
    how="""
        The package that every import of Megatron by slime passes, in the driver and in Ray's
        workers, asks slime_npu to adapt; `init` asks it to repatch as its first act with the
        arguments. Without an NPU neither is asked.
    """,
    until="MindSpeed needs no import before Megatron, or slime loads plugins there.",
    rules=(
        Rule(
            find=Code("import torch", where="slime/backends/megatron_utils/__init__.py"),
            edit=(
                adapt,
                add_import(
                    "from slime_npu.mindspeed import adapt, is_npu",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=("slime/backends/megatron_utils/__init__.py",),
        ),
        Rule(
            find=Code("_initialize_distributed($ARGS)", inside="init"),
            edit=(
                insert_before("if is_npu():\n    repatch($ARGS)"),
                add_import(
                    "from slime_npu.mindspeed import is_npu, repatch",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=("slime/backends/megatron_utils/initialize.py",),
        ),
    ),
)
