"""Bridge's provider hears of the arguments that matter on NPU."""

from rebase.recipe import Code, Recipe, Rule, add_import, insert_before

recipe = Recipe(
    subject="[NPU] Give Bridge's provider what the arguments say",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        slime hands Bridge's provider its parallel sizes only. Recomputation and
        `--no-gradient-accumulation-fusion`, without which nothing runs on NPU, never arrive;
        and Bridge does not know MindSpeed's modules, the value head, or slime's `loss_mask`.
    """,
    how="One conditional before the provider is finalized: slime_npu prepares it.",
    upstream="https://github.com/THUDM/slime/pull/2251 (removes Bridge)",
    until="We follow no release with Bridge any more.",
    rules=(
        Rule(
            find=Code(
                {
                    "pattern": "$PROVIDER.finalize()",
                    "inside": {
                        "kind": "expression_statement",
                        "follows": {
                            "has": {"pattern": "$PROVIDER = $BRIDGE.to_megatron_provider($$$)"},
                            "stopBy": "end",
                        },
                    },
                },
                where="slime/backends/megatron_utils/",
            ),
            edit=(
                insert_before("""
                    if is_npu():
                        from slime_npu.bridge import prepare

                        prepare($PROVIDER, args)
                """),
                add_import(
                    "from slime_npu.megatron import is_npu",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=("slime/backends/megatron_utils/model_provider.py",),
            needed=Code(
                "from megatron.bridge import AutoBridge", where="slime/backends/megatron_utils/"
            ),
        ),
    ),
)
