"""Defects of the public NPU patches, each shown to be one, and not ours.

What needs torch or Ray is in `tests/npu/test_public_defects_runs.py`.
"""

import __future__

import ast
import enum
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import releases
from conftest import Project, Repo, lines

from rebase.git import EMPTY_TREE
from rebase.objects import FILE, Entry, Objects
from rebase.outcome import Status
from rebase.queue import RecipeFile
from rebase.replay import Edit

FORKS = releases.ROOT / "forks"


def ours(tmp_path: Path, change: str, path: str, upstream: str) -> str:
    """What a change of ours makes of one file."""
    from rebase.branch import recipe_step
    from rebase.upstream import create

    create(tmp_path / "objects.git")
    objects = Objects(tmp_path / "objects.git")
    entry = Entry(FILE, objects.write("blob", upstream.encode()))
    recipe = FORKS / change
    does = recipe_step(RecipeFile(recipe.name, recipe.read_bytes(), recipe)).does
    assert not isinstance(does, Edit)
    edits, outcome = does(objects, objects.splice(EMPTY_TREE, {path.encode(): entry}))
    assert outcome.status is Status.APPLIED, outcome
    edited = edits[path.encode()]
    assert edited
    return objects.read(edited.id).decode()


# -- the patch that no longer applies at its own pin -----------------------------------------------


@pytest.fixture
def renamed_in_place(solo: Project) -> Project:
    """A queue of one patch, whose context somebody edited: a rename went over the patch as well."""
    change = solo.change("lead", "Choose the device", {"app.py": lines({12: "npu 12"})})
    path = solo.root / "forks" / "lead" / change
    text = path.read_text()
    assert " line 11\n" in text
    path.write_text(text.replace(" line 11\n", " renamed 11\n"))
    pin = solo.upstream("lead").path.parent / "at the pin"
    solo.upstream("lead").git("worktree", "add", "--quiet", str(pin), "v1.0")
    Repo(pin).git("apply", "--check", str(path), ok=(1,))  # as whoever builds an image learns
    return solo


@pytest.mark.parametrize("command", [("export",), ("sync",), ("rebase", "lead", "--onto", "v1.1")])
def test_a_patch_edited_in_place_is_refused_by_name_and_nothing_is_exported(
    renamed_in_place: Project, command: tuple[str, ...]
) -> None:
    project = renamed_in_place
    project.ok("fetch")
    done = project.forkman(*command)
    assert done.code in (1, 2)
    said = " ".join(done.said.split())
    assert "choose-the-device.patch does not apply on its own pin" in said
    assert "It was edited by hand" in said
    assert not (project.root / "exports" / "lead.patch").exists()


# -- torch.npu named where there is none -----------------------------------------------------------

TYPES = b"megatron/core/transformer/module.py"


def tensor_types(source: str, npu: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the tuples of tensor types are where `source` names them."""
    names = ("FloatTensor", "HalfTensor", "BFloat16Tensor")
    torch = types.ModuleType("torch")
    for place in ("", "cuda", "npu") if npu else ("", "cuda"):
        kinds = {name: f"{place}.{name}" for name in names}
        vars(torch).update(kinds if not place else {place: types.SimpleNamespace(**kinds)})
    device = types.ModuleType("slime_npu.device")
    device.is_npu = lambda: npu  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slime_npu", types.ModuleType("slime_npu"))
    monkeypatch.setitem(sys.modules, "slime_npu.device", device)
    body = [
        node
        for node in ast.parse(source).body
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)
        and ("_TYPES" in ast.unparse(node) or "slime_npu" in ast.unparse(node))
    ]
    found: dict[str, object] = {"torch": torch}
    exec(compile(ast.Module(body, []), "module.py", "exec"), found)
    return {name: found[name] for name in found if name.endswith("_TYPES")}


def test_a_gpu_host_has_no_torch_npu_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    public = "_HALF_TYPES = (torch.HalfTensor, torch.cuda.HalfTensor, torch.npu.HalfTensor)"
    with pytest.raises(AttributeError, match="npu"):
        tensor_types(public, False, monkeypatch)

    every = releases.of("megatron")
    for tag in every.tags:
        source = every.carried(tag).files().read(TYPES)
        assert source
        on_gpu = tensor_types(source.decode(), False, monkeypatch)
        on_npu = tensor_types(source.decode(), True, monkeypatch)
        assert len(on_gpu) == 3
        for name, kinds in on_gpu.items():
            assert isinstance(kinds, tuple) and len(kinds) == 2
            assert on_npu[name] == (*kinds, kinds[1].replace("cuda", "npu")), f"{tag}: {name}"


# -- one of MindSpeed's classes forgotten ----------------------------------------------------------

PUBLIC = {  # the names that the public patch adds
    "column": {
        "MindSpeedTELayerNormColumnParallelLinear",
        "MindSpeedTEColumnParallelGroupedLinear",
        "MindSpeedTEDotProductAttention",
    },
    "row": {"MindSpeedTERowParallelGroupedLinear"},
}


def parallelism(source: bytes) -> type:
    """A release's AutoMapping, as far as it tells a module's parallelism by its class."""
    [mapping] = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "AutoMapping"
    ]
    mapping.bases = []
    mapping.body = [
        node
        for node in mapping.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        or getattr(node, "name", "") == "_detect_parallelism_type"
    ]
    found: dict[str, Any] = {"json": json, "is_modelopt_dynamic_module": lambda module: False}
    unread = __future__.annotations.compiler_flag  # annotations stay text
    exec(compile(ast.Module([mapping], []), "param_mapping.py", "exec", unread), found)
    mapped: type = found["AutoMapping"]
    return mapped


def detected(mapping: type, name: str) -> str:
    this = mapping()
    this.megatron_param = "decoder.weight"
    module = type(name, (), {"parallel_mode": "row", "named_parameters": lambda self: ()})()
    answer: str = this._detect_parallelism_type(module)
    return answer


def test_every_module_of_mindspeeds_is_split_as_transformer_engines() -> None:
    every = releases.of("megatron-bridge")
    path = b"src/megatron/bridge/models/conversion/param_mapping.py"
    for tag in every.tags:
        carried = every.carried(tag)
        before = next(old for name, old, _ in carried.touched() if name == path.decode())
        public = parallelism(before)
        for kind, names in PUBLIC.items():
            public._MODULE_TYPE_REGISTRY[kind] |= names
        with pytest.raises(ValueError, match="MindSpeedTEColumnParallelLinear"):
            detected(public, "MindSpeedTEColumnParallelLinear")

        content = carried.files().read(path)
        assert content
        mine = parallelism(content)
        known = {name for names in mine._MODULE_TYPE_REGISTRY.values() for name in names}
        engines = {name for name in known if name.startswith("TE")} | {"TELinear"}
        assert {"TEColumnParallelLinear", "TELayerNormColumnParallelLinear"} <= engines
        for name in engines:
            assert detected(mine, f"MindSpeed{name}") == detected(mine, name), f"{tag}: {name}"


# -- a causal mask forced on everything ------------------------------------------------------------

ATTENTION = """\
class MindSpeedTEDotProductAttention(Attention):
    def forward(self, query, attention_mask, packed_seq_params=None):
        if attention_mask is None and self.attn_mask_type == AttnMaskType.causal:
            attention_mask = get_attention_mask(self.config)
        packed_seq_kwargs = {key: 1 for key in self.kept_packed_seq_params}
        return attention_mask
"""
FORCED = ATTENTION.replace("        packed", "        attention_mask = 'causal'\n        packed")


def mask(source: str, kind: str, given: str | None, packed: bool) -> str | None:
    """The mask that attention of that type computes with."""
    kinds = enum.Enum("AttnMaskType", ["causal", "padding", "no_mask"])
    names: dict[str, type] = {}
    exec(
        source,
        {"Attention": object, "AttnMaskType": kinds, "get_attention_mask": lambda _: "causal"},
        names,
    )
    this = names["MindSpeedTEDotProductAttention"]()
    vars(this).update(attn_mask_type=kinds[kind], kept_packed_seq_params=[], config=None)
    answer: str | None = this.forward(None, given, {"cu_seqlens": 1} if packed else None)
    return answer


def test_attention_without_a_mask_sees_everything(tmp_path: Path) -> None:
    path = "mindspeed/te/attention.py"
    changed = ours(tmp_path, "mindspeed/mask_by_type.py", path, ATTENTION)
    for given in (None, "keep"):
        for packed in (False, True):
            assert mask(FORCED, "no_mask", given, packed) == "causal"  # a vision tower went blind
            assert mask(changed, "no_mask", given, packed) is None
    # packed text is causal whatever comes along, and a padding mask stays what it is
    assert mask(changed, "causal", "keep", True) == "causal"
    assert mask(changed, "causal", None, False) == "causal"
    assert mask(changed, "padding", "keep", False) == "keep"
