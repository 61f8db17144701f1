"""An attention's mask type decides its mask."""

from rebase.recipe import Code, Recipe, Rule, insert_before

recipe = Recipe(
    subject="[NPU] Let the mask type decide the attention mask",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        Transformer Engine reads no mask where the type is no_mask, nor where sequences are packed
        and the type is causal: type and lengths say it all. MindSpeed hands any mask it is given
        to the NPU operator, so a keep mask that comes along is taken for a causal one.
    """,
    how="""
        What Transformer Engine would not read is dropped, before MindSpeed makes its compressed
        causal mask, which it does for causal attention without a mask. So packed text is causal
        whatever came with it, and a vision tower, whose type is no_mask, sees everything.
    """,
    until="MindSpeed's attention reads masks as Transformer Engine does.",
    rules=(
        Rule(
            find=Code(
                {
                    "kind": "if_statement",
                    "has": {"pattern": "get_attention_mask(self.config)", "stopBy": "end"},
                },
                inside="forward",
                where="mindspeed/te/",
            ),
            edit=insert_before("""
                if self.attn_mask_type == AttnMaskType.no_mask or (
                    self.attn_mask_type == AttnMaskType.causal and packed_seq_params is not None
                ):
                    attention_mask = None
            """),
            expect=("*:*TEDotProductAttention.forward",),
            upstream=Code("AttnMaskType.no_mask", inside="forward", where="mindspeed/te/"),
            needed=Code("self.kept_packed_seq_params", inside="forward", where="mindspeed/te/"),
        ),
    ),
)
