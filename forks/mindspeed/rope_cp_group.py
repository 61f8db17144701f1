"""Packed sequences' rotary embedding knows its context parallel group."""

from rebase.recipe import Code, Recipe, Rule, add_argument

_FUNCTION = "apply_rotary_pos_emb"
_FOLDER = "mindspeed/core/fusions/"

recipe = Recipe(
    subject="[NPU] Pass cp_group on to the rotary embedding of packed sequences",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        MindSpeed's apply_rotary_pos_emb takes cp_group and drops it; Megatron's function for
        packed sequences splits the frequencies by that group's rank and size.
    """,
    how="""
        One argument more for the call. MindSpeed for a Megatron whose rotary embedding knows no
        cp_group (core 0.12) has no such parameter and needs nothing.
    """,
    until="We follow no branch as old as core_r0.15.3.",
    rules=(
        Rule(
            find=Code("ru._apply_rotary_pos_emb_thd($$$)", inside=_FUNCTION, where=_FOLDER),
            edit=add_argument("cp_group=cp_group"),
            expect=(f"*:{_FUNCTION}",),
            needed=Code(
                {
                    "kind": "identifier",
                    "pattern": "cp_group",
                    "inside": {"kind": "parameters", "stopBy": "end"},
                },
                inside=_FUNCTION,
                where=_FOLDER,
            ),
        ),
    ),
)
