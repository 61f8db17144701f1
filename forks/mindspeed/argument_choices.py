"""An argument's choices may be a tuple."""

from rebase.recipe import Code, Recipe, Rule, replace

recipe = Recipe(
    subject="[NPU] Add to an argument's choices whatever holds them",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        MindSpeed appends to the choices of Megatron's arguments. Since Megatron makes arguments of
        its configuration's fields (ArgumentGroupFactory), as slime v0.3.0 takes it, --fp8-format's
        choices are a tuple: every run stops while the arguments are parsed.
    """,
    how="The choices are replaced by a list of them and the new one.",
    until="MindSpeed's branch dev has what core_r0.17.0 does.",
    rules=(
        Rule(
            find=Code("action.choices.append($CHOICE)", where="mindspeed/features_manager/"),
            edit=replace("action.choices = [*action.choices, $CHOICE]"),
            expect=("*:*add_parser_argument_choices_value",),
            upstream=Code(
                "action.choices = type(action.choices)($$$)", where="mindspeed/features_manager/"
            ),
        ),
    ),
)
