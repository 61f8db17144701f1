"""RMSNorm adds what deepstack gives it on NPU too."""

from collections.abc import Iterable

from rebase.recipe import Code, Lost, Place, Recipe, Rule, Splice, insert_before

LAYERS = "python/sglang/srt/layers/"


def add_to_residual(place: Place) -> Iterable[Splice]:
    """Add the argument, which the method has by name or among its **kwargs."""
    method = next(node for node in place.code.ancestors() if node.kind() == "function_definition")
    parameters = method.field("parameters")
    taken = parameters.text() if parameters else ""
    if "post_residual_addition" in taken:
        addition = "post_residual_addition"
    elif "**kwargs" in taken:
        addition = 'kwargs.get("post_residual_addition")'
    else:
        raise Lost("forward_npu is not given post_residual_addition")
    return insert_before(f"""
        if {addition} is not None:
            residual = residual + {addition}
    """)(place)


recipe = Recipe(
    subject="[NPU] Add deepstack embeddings in RMSNorm",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        Qwen3-VL hands its deepstack embeddings to the next layer's norm as post_residual_addition.
        forward_npu takes the argument and drops it, so on NPU the model runs without them, and
        nothing fails.
    """,
    how="""
        One conditional before the operator, in the order of forward_cuda: the residual first.
        forward_npu runs on NPU only.
    """,
    upstream="https://github.com/sgl-project/sglang/pull/17286",
    until="v0.5.9 is the oldest release we follow.",
    rules=(
        Rule(
            find=Code(
                "torch_npu.npu_add_rms_norm(residual, $$$)",
                inside="RMSNorm.forward_npu",
                where=LAYERS,
            ),
            edit=add_to_residual,
            expect=("*:RMSNorm.forward_npu",),
            upstream=Code(
                "residual = residual + post_residual_addition",
                inside="RMSNorm.forward_npu",
                where=LAYERS,
            ),
            needed=Code(
                {
                    "kind": "keyword_argument",
                    "has": {"field": "name", "pattern": "post_residual_addition"},
                },
                inside="Qwen3LLMModel",
            ),
        ),
    ),
)
