"""Rotary embedding falls back to the native one where npu_mrope would refuse its arguments."""

from collections.abc import Iterable

from rebase.recipe import Code, Place, Recipe, Rule, Splice, insert_before


def fall_back(place: Place) -> Iterable[Splice]:
    """Ask before the operator is called; `offsets` goes along where the method has it."""
    method = next(node for node in place.code.ancestors() if node.kind() == "function_definition")
    name, parameters = method.field("name"), method.field("parameters")
    native = name.text().replace("npu", "native") if name else ""
    offsets = ", offsets" if parameters and "offsets" in parameters.text() else ""
    return insert_before(f"""
        if query.dtype != self.cos_sin_cache.dtype:  # npu_mrope takes one type only
            return self.{native}(positions, query, key{offsets})
    """)(place)


recipe = Recipe(
    subject="[NPU] Use the native rope where query and cache differ in type",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        npu_mrope takes a query and a cos/sin cache of one type. Since #16115 RotaryEmbedding asks
        for that itself; MRotaryEmbedding, which Qwen3-VL uses, does not, so bfloat16 queries with
        a float32 cache have nowhere to go.
    """,
    how="""
        Before each call of npu_mrope in a forward_npu (v0.5.7 has a _forward_npu too): one
        conditional that takes the class's own native path. forward_npu runs on NPU only.
    """,
    upstream="https://github.com/sgl-project/sglang/pull/16115 (RotaryEmbedding only)",
    until="Every forward_npu that calls npu_mrope asks for the types itself.",
    rules=(
        Rule(
            find=Code(
                {
                    "pattern": "torch_npu.npu_mrope($$$)",
                    "inside": {
                        "kind": "function_definition",
                        "has": {"field": "name", "regex": "^_?forward_npu$"},
                        "stopBy": "end",
                    },
                }
            ),
            edit=fall_back,
            expect=("*:RotaryEmbedding.forward_npu",),
            known=("*:MRotaryEmbedding.forward_npu", "*:MRotaryEmbedding._forward_npu"),
            upstream=Code("self.cos_sin_cache.dtype == $TYPE", inside="forward_npu"),
            needed=Code({"kind": "function_definition"}, inside="forward_npu"),
        ),
    ),
)
