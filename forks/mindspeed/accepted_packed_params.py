"""Attention gets the packed sequence parameters it takes, and no others."""

from rebase.recipe import Code, Recipe, Rule, add_import, insert_after

recipe = Recipe(
    subject="[NPU] Give attention only the packed sequence parameters it takes",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        MindSpeed's attention hands every field of Megatron's PackedSeqParams on as a keyword
        argument, and Megatron keeps adding fields (local_cp_size, cp_group, ...): each is a
        TypeError until the forward lists it.
    """,
    how="""
        The fields are filtered by the signature of the forward that gets them, so that nothing
        need be listed here.
    """,
    until="Every branch we follow filters them itself, as dev does since 7c90040f.",
    rules=(
        Rule(
            find=Code("packed_seq_kwargs = $FIELDS", inside="forward", where="mindspeed/te/"),
            edit=(
                insert_after("""
                    takes = inspect.signature(super().forward).parameters
                    packed_seq_kwargs = {k: v for k, v in packed_seq_kwargs.items() if k in takes}
                """),
                add_import("import inspect"),
            ),
            expect=("*:*TEDotProductAttention.forward",),
            upstream=Code(
                "inspect.signature(super().forward)", inside="forward", where="mindspeed/te/"
            ),
            needed=Code("self.kept_packed_seq_params", inside="forward", where="mindspeed/te/"),
        ),
    ),
)
