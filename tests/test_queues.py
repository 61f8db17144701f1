"""The NPU queues on every release of Megatron core, Megatron-Bridge and SGLang that an index has.

Needs the network, or what an earlier run kept of it: see `releases`.
"""

import ast
import json
import shutil
import sys
import types
from pathlib import Path

import pytest
import releases
from conftest import Project

from rebase import contracts
from rebase.branch import Files
from rebase.outcome import Kind, Status
from rebase.patch import diff
from rebase.recipe import Code, Recipe, Rule, insert_before

FORKS = list(releases.OLDEST)
ROPE = "python/sglang/srt/layers/rotary_embedding"
GPT = "megatron/core/models/gpt"


# -- every change, at every release ----------------------------------------------------------------


@pytest.mark.parametrize("fork", FORKS)
def test_no_change_is_in_conflict_at_any_release(fork: str) -> None:
    every = releases.of(fork)
    conflicts = {
        (tag, outcome.change): [conflict.detail for conflict in outcome.conflicts]
        for tag in every.tags
        for outcome in every.carried(tag).outcomes
        if outcome.status not in (Status.APPLIED, Status.ALREADY_UPSTREAM, Status.NOT_NEEDED)
    }
    assert conflicts == {}


@pytest.mark.parametrize("fork", FORKS)
def test_every_file_that_a_change_touches_still_parses(fork: str) -> None:
    every = releases.of(fork)
    for tag in every.tags:
        touched = list(every.carried(tag).touched())
        assert touched, f"the queue does nothing at {tag}"
        for path, _, after in touched:
            ast.parse(after, f"{tag}:{path}", feature_version=(3, 11))


@pytest.mark.parametrize(
    ("fork", "change", "since", "status"),
    [
        ("megatron-bridge", "deepstack_into_recompute.py", "0.3.0", Status.APPLIED),
        ("megatron-bridge", "deepstack_into_recompute.py", "0.4.0", Status.ALREADY_UPSTREAM),
        ("megatron-bridge", "deepstack_out_of_recompute.py", "0.3.0", Status.NOT_NEEDED),
        ("megatron-bridge", "deepstack_out_of_recompute.py", "0.4.0", Status.APPLIED),
        ("sglang", "fused_qkv_arguments.py", "0.5.7", Status.APPLIED),
        ("sglang", "fused_qkv_arguments.py", "0.5.8", Status.ALREADY_UPSTREAM),
        ("sglang", "fused_decode_attention.py", "0.5.7", Status.APPLIED),
        ("sglang", "fused_decode_attention.py", "0.5.8", Status.NOT_NEEDED),
        ("sglang", "deepstack_addition.py", "0.5.7", Status.NOT_NEEDED),
        ("sglang", "deepstack_addition.py", "0.5.8", Status.APPLIED),
        ("sglang", "deepstack_addition.py", "0.5.9", Status.ALREADY_UPSTREAM),
        ("sglang", "untied_head.py", "0.5.8.post1", Status.APPLIED),
        ("sglang", "untied_head.py", "0.5.9", Status.ALREADY_UPSTREAM),
        ("sglang", "eager_functions.py", "0.5.9", Status.ALREADY_UPSTREAM),
        ("sglang", "head_group.py", "0.5.9", Status.ALREADY_UPSTREAM),
        ("sglang", "rope_head_sizes.py", "0.5.9", Status.ALREADY_UPSTREAM),
        ("sglang", "native_rope.py", "0.5.10.post1", Status.APPLIED),
    ],
)
def test_a_change_ends_when_upstream_makes_it_and_not_before(
    fork: str, change: str, since: str, status: Status
) -> None:
    every = releases.of(fork)
    outcomes = every.carried(every.tag(since)).outcomes
    assert {each.change: each.status for each in outcomes}[change] is status


def test_the_queues_are_thin_at_every_release() -> None:
    """All five may add 250 lines and take away 60; these three have half of that."""
    added, removed = 0, 0
    for fork in FORKS:
        every = releases.of(fork)
        counted = []
        for tag in every.tags:
            carried = every.carried(tag)
            lines = diff(carried.objects, carried.before, carried.after).split(b"\n")
            signs = [line[:1] for line in lines if not line.startswith((b"+++ ", b"--- "))]
            counted.append((signs.count(b"+"), signs.count(b"-")))
        added += max(plus for plus, _ in counted)
        removed += max(minus for _, minus in counted)
    assert (added <= 125, removed <= 30) == (True, True), f"+{added} -{removed}"


# -- what became of anchors ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fork", "change", "before", "there", "after", "here"),
    [
        ("sglang", "native_rope.py", "0.5.9", [f"{ROPE}.py"], "0.5.10", [f"{ROPE}/mrope.py"]),
        ("sglang", "native_rope.py", "0.5.5", [f"{ROPE}.py"], "0.5.6", [f"{ROPE}.py"] * 2),
        ("megatron", "eager_jit.py", "0.15.3", ["megatron/core/jit.py"], "0.16.0",
         ["megatron/core/jit.py"]),
        ("megatron", "te_names.py", "0.15.3",
         [f"{GPT}/gpt_layer_specs.py", f"{GPT}/moe_module_specs.py",
          "megatron/core/transformer/multi_token_prediction.py"], "0.16.0",
         [f"{GPT}/experimental_attention_variant_module_specs.py", f"{GPT}/gpt_layer_specs.py",
          "megatron/core/transformer/multi_token_prediction.py"]),
    ],
    ids=["moved to another file", "duplicated", "reformatted", "one gone and another new"],
)  # fmt: skip
def test_an_anchor_is_found_again_wherever_a_release_has_put_it(
    fork: str, change: str, before: str, there: list[str], after: str, here: list[str]
) -> None:
    every = releases.of(fork)
    for version, expected in ((before, there), (after, here)):
        outcomes = every.carried(every.tag(version)).outcomes
        [outcome] = [each for each in outcomes if each.change == change]
        assert [place.partition(":")[0] for place in outcome.places] == expected


@pytest.mark.parametrize(
    ("fork", "find", "release", "nearest"),
    [
        (
            "sglang",
            Code("torch_npu.npu_mrope($$$)", "RotaryEmbedding.forward_npu", f"{ROPE}.py"),
            "0.5.10",
            f"{ROPE}/base.py:284 in RotaryEmbedding.forward_npu",
        ),
        (
            "sglang",
            Code("torch_npu.npu_mrope($$$)", inside="MRotaryEmbedding._forward_npu"),
            "0.5.8",
            f"{ROPE}.py:1593 in MRotaryEmbedding.forward_npu",
        ),
        (
            "sglang",
            Code("torch_npu._npu_paged_attention($$$)", inside="forward_decode_graph"),
            "0.5.8",
            "`torch_npu._npu_paged_attention(",
        ),
    ],
    ids=["moved to another file", "renamed", "removed"],
)
def test_an_anchor_that_a_release_took_out_of_reach_is_a_conflict_that_names_what_is_near(
    fork: str, find: Code, release: str, nearest: str
) -> None:
    recipe = Recipe(
        subject="Wait", by="A <a@example.com>", date="2026-08-01T00:00:00+00:00",
        why="A test.", how="One call.", until="Never.",
        rules=(Rule(find, insert_before("wait()"), expect=("*.py",)),),
    )  # fmt: skip
    every = releases.of(fork)
    tree = every.objects.tree_of(every.tags[every.tag(release)])
    result = recipe.run(Files(every.objects, tree))
    [conflict] = result.conflicts
    assert conflict.kind is Kind.ANCHOR_LOST
    assert nearest in conflict.detail.partition("Nearest: ")[2]


# -- Megatron's fuser ------------------------------------------------------------------------------

JIT = b"megatron/core/jit.py"


def fusers(jit: bytes, npu: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The names that a release's jit.py has on a host with or without an NPU."""
    modules = {
        "torch": {"compile": lambda function: "compiled", "jit": types.SimpleNamespace(script=0)},
        "megatron": {},
        "megatron.core": {},
        "megatron.core.utils": {"is_torch_min_version": lambda version: True},
        "slime_npu": {},
        "slime_npu.device": {"is_npu": lambda: npu},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    names: dict[str, object] = {}
    exec(jit, names)
    return names


def test_at_every_release_a_fused_function_is_itself_on_npu_and_compiled_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def function() -> None: ...

    every = releases.of("megatron")
    for tag in every.tags:
        jit = every.carried(tag).files().read(JIT)
        assert jit
        decorate = fusers(jit, True, monkeypatch)["jit_fuser"]
        assert callable(decorate) and decorate(function) is function, tag
        decorate = fusers(jit, False, monkeypatch)["jit_fuser"]
        assert callable(decorate) and decorate(function) == "compiled", tag


def binds(tree: ast.Module, name: str) -> list[ast.AST]:
    """What in a module binds `name`, but for its import from megatron.core.jit."""
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="megatron.core.jit", level=0, names=aliases):
                found += [node for alias in aliases if name == alias.asname != alias.name]
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                found += [node for alias in aliases if name == (alias.asname or alias.name)]
            case ast.Name(id=id, ctx=ast.Store()) | ast.arg(arg=id) if id == name:
                found.append(node)
            case ast.FunctionDef(name=defined) | ast.ClassDef(name=defined) if defined == name:
                found.append(node)
    return found


def test_at_every_release_all_modules_have_the_fuser_from_there() -> None:
    every = releases.of("megatron")
    decorated = {}
    for tag in every.tags:
        files = every.carried(tag).files()
        python = (path for path in files.paths(b"megatron/") if path.endswith(b".py"))
        decorated[tag] = 0
        for path in files.grep(b"jit_fuser", python):
            content = files.read(path)
            assert content
            decorated[tag] += content.count(b"@jit_fuser")
            if path != JIT:
                assert not binds(ast.parse(content), "jit_fuser"), f"{tag}: {path.decode()}"
    # the releases do differ in how many there are: what is new is covered without a line of ours
    assert min(decorated.values()) > 20
    assert len(set(decorated.values())) > 1


# -- contracts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fork", FORKS)
def test_what_our_code_relies_on_is_there_at_every_release_since_the_pin(fork: str) -> None:
    found = releases.of(fork)
    modules = contracts.Modules(found.objects)
    every = contracts.load(releases.ROOT / "forks" / fork)
    broken = {
        (tag, str(contract)): why
        for tag, commit in found.since_pin()
        for contract in every
        if (why := modules.tree(found.objects.tree_of(commit)).broken(contract))
    }
    assert every and not broken


@pytest.mark.parametrize(
    ("fork", "name", "parameters", "kept", "broken", "detail"),
    [
        (  # native_rope.py falls back to it, with offsets where its caller has them
            "sglang",
            "sglang.srt.layers.rotary_embedding.MRotaryEmbedding.forward_native",
            ["positions", "query", "key", "offsets"],
            "0.5.7",
            "0.5.8",
            "begins with (positions, query, key, fused_set_kv_buffer_arg)",
        ),
        (  # what reads packed sequences with images
            "megatron-bridge",
            "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils.get_rope_index",
            None,
            "0.3.1",
            "0.4.0",
            "there is no get_rope_index in"
            " src/megatron/bridge/models/qwen_vl/modelling_qwen3_vl/utils.py",
        ),
        (  # deepstack_into_recompute.py edits what overrides it in Bridge
            "megatron",
            "megatron.core.transformer.transformer_block.TransformerBlock._checkpointed_forward",
            None,
            "0.17.1",
            "0.18.0",
            "there is no _checkpointed_forward in megatron/core/transformer/transformer_block.py",
        ),
    ],
    ids=["a parameter", "a function that moved", "a method that went"],
)
def test_a_contract_that_broke_between_two_releases_is_a_finding_at_the_second(
    fork: str,
    name: str,
    parameters: list[str] | None,
    kept: str,
    broken: str,
    detail: str,
    tmp_path: Path,
) -> None:
    every = releases.of(fork)
    project = Project(tmp_path)
    shutil.copytree(releases.ROOT / "manifests", project.root / "manifests")
    shutil.copytree(releases.ROOT / "forks", project.root / "forks")
    mirrors = project.root / ".forkman" / "mirrors"
    shutil.copytree(every.mirror, mirrors / f"{fork}.archives.git")
    manifest = project.manifest_path(fork)
    if "[audit]" not in manifest.read_text():
        manifest.write_text(f'{manifest.read_text()}\n[audit]\npaths = ["examples"]\n')
    contract = f'[[contract]]\nname = "{name}"\nkind = "function"\nwhy = "a test"\n'
    if parameters:
        contract += f"parameters = {parameters}\npositional = {len(parameters)}\n"
    (project.root / "forks" / fork / "contracts.toml").write_text(contract)

    [here] = json.loads(project.forkman("audit", fork, "--at", every.tag(kept), "--json").out)
    assert (here["contracts"], here["kept"]) == ([], 1)
    [there] = json.loads(project.forkman("audit", fork, "--at", every.tag(broken), "--json").out)
    [finding] = there["contracts"]
    assert detail in finding["detail"]
    assert [by["subject"].split()[-1] for by in finding["by"]] == [broken]
