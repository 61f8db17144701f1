"""The audit: what a replay that conflicts nowhere may still hide."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Project, Repo
from hypothesis import given, settings
from hypothesis import strategies as st

from rebase import contracts, residue
from rebase.git import EMPTY_TREE
from rebase.objects import FILE, Entry, Objects
from rebase.outcome import Site

CORE = """\
import torch


class Engine:
    def start(self):
        self.stream = torch.cuda.Stream()
"""
MORE = "\n    def stop(self):\n        torch.cuda.synchronize()\n"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A fork whose upstream is a package pkg, with the releases v1.0 and, a line further, v1.1."""
    made = Project(tmp_path)
    upstream = Repo.new(tmp_path / "upstreams" / "lead")
    upstream.commit({"pkg/core.py": CORE, "tests/core.py": CORE}, "First", "v1.0")
    made.add("lead", "v1.0", '[audit]\npaths = ["pkg"]')
    made.change("lead", "Add the runtime", {"npu.py": "import slime_npu\n"})
    (made.root / "manifests" / "stack.toml").write_text(
        'leader = "lead"\n[runtime]\npython = "3.11"\n'
    )
    upstream.commit({"pkg/core.py": f'"""Docs."""\n\n{CORE}'}, "Document", "v1.1")
    return made


def release(project: Project, core: str, message: str = "Stop, too (#7)", **files: str) -> str:
    """Upstream's next release, v1.2."""
    names = {f"pkg/{name}.py": content for name, content in files.items()}
    return project.upstream("lead").commit({"pkg/core.py": core, **names}, message, "v1.2")


def accepted(project: Project) -> Path:
    return project.root / "forks" / "lead" / "accepted.toml"


def lines(project: Project, *args: str) -> list[str]:
    return [line.strip() for line in project.forkman(*args).out.splitlines()]


# -- residue: what is found ------------------------------------------------------------------------


def sites(tmp_path: Path, code: str, path: str = "pkg/a.py") -> list[tuple[str, str, str, int]]:
    repo = tmp_path / "objects"
    if not repo.exists():
        Repo.new(repo)
    objects = Objects(repo / ".git")
    blob = objects.write("blob", code.encode())
    tree = objects.splice(EMPTY_TREE, {path.encode(): Entry(FILE, blob)})
    found = residue.Scan(objects, ["pkg"]).sites(tree)
    return [(site.kind, site.code, site.scope, site.line) for site in found]


@pytest.mark.parametrize(
    ("code", "kind", "shown"),
    [
        ("torch.cuda.Stream()", "torch.cuda", "torch.cuda.Stream"),
        ("torch.cuda.current_stream().wait_stream(x)", "torch.cuda", "torch.cuda.current_stream"),
        ("with torch.cuda.stream(s): pass", "torch.cuda", "torch.cuda.stream"),
        ("gpu = torch.cuda", "torch.cuda", "torch.cuda"),
        ("torch.version.cuda", "torch.cuda", "torch.version.cuda"),
        ("import torch.cuda.amp", "torch.cuda", "torch.cuda.amp"),
        ("from torch.cuda import amp", "torch.cuda", "torch.cuda"),
        ("from torch import nn, cuda", "torch.cuda", "from torch import cuda"),
        ("x.to('cuda')", "cuda", '"cuda"'),
        ('torch.device("cuda:0")', "cuda", '"cuda:0"'),
        ('x = f"cuda:{rank}"', "cuda", '"cuda:{rank}"'),
        ("model.parts[0]\\\n  .cuda(non_blocking=True)", "cuda", ".cuda()"),
        ('init(backend="nccl")', "nccl", '"nccl"'),
        ('init("cpu:gloo,cuda:nccl")', "nccl", '"cpu:gloo,cuda:nccl"'),
        ("f.options(num_gpus=0.2)", "num_gpus", "num_gpus="),
        ('{"num_gpus": 1}', "num_gpus", '"num_gpus"'),
        ('resources["GPU"]', "num_gpus", '"GPU"'),
        ("ray.get_gpu_ids()", "num_gpus", "ray.get_gpu_ids"),
        ("@torch.compile\ndef f(): pass", "torch.compile", "torch.compile"),
        ("f = torch.compile(f)", "torch.compile", "torch.compile"),
        ("@jit_fuser\ndef f(): pass", "jit_fuser", "@jit_fuser"),
        ("@triton.jit\ndef f(): pass", "triton", "@triton.jit"),
        ("import pynvml", "pynvml", "pynvml"),
        ("pynvml.nvmlInit()", "pynvml", "pynvml.nvmlInit"),
        ('os.environ["CUDA_VISIBLE_DEVICES"]', "environment", '"CUDA_VISIBLE_DEVICES"'),
        ('os.getenv("PYTORCH_CUDA_ALLOC_CONF")', "environment", '"PYTORCH_CUDA_ALLOC_CONF"'),
        ('{"NVTE_FLASH_ATTN": "1"}', "environment", '"NVTE_FLASH_ATTN"'),
    ],
)
def test_code_that_only_cuda_has_an_answer_for_is_residue(
    tmp_path: Path, code: str, kind: str, shown: str
) -> None:
    assert [site[:2] for site in sites(tmp_path, code)] == [(kind, shown)]


@pytest.mark.parametrize(
    "code",
    [
        "# torch.cuda.Stream and 'cuda'",
        '"""torch.cuda.Stream\n\nnum_gpus=1, "nccl", @jit_fuser\n"""',
        "'cuda'",  # a statement that is a string does nothing
        'raise ValueError("cuda is not available, nor is nccl")',
        "config.cuda = config.cuda or 1",
        "nccl_options(nccl_ub=True)",
        "def f(num_gpus): return num_gpus",
        "compile(source)",
        "triton.cdiv(a, b)",
        "from torch import nn  # not cuda",
        "MY_CUDA = 1",
    ],
)
def test_comments_docstrings_messages_and_other_names_are_none(tmp_path: Path, code: str) -> None:
    assert sites(tmp_path, code) == []


def test_a_site_knows_its_definition_and_a_decorator_belongs_to_what_it_decorates(
    tmp_path: Path,
) -> None:
    code = "class A:\n    @jit_fuser\n    def f(self):\n        return torch.cuda.Event()\n"
    assert sites(tmp_path, code) == [
        ("jit_fuser", "@jit_fuser", "A.f", 2),
        ("torch.cuda", "torch.cuda.Event", "A.f", 4),
    ]


def test_only_python_below_the_named_paths_is_looked_at(tmp_path: Path) -> None:
    code = "torch.cuda.Event()\n"
    assert sites(tmp_path, code, "pkg/deep/a.py")
    for path in ("pkg.py", "pkg2/a.py", "other/pkg/a.py", "pkg/a.md"):
        assert sites(tmp_path, code, path) == []


def test_any_bytes_and_broken_code_are_read(tmp_path: Path) -> None:
    assert sites(tmp_path, "x = torch.cuda.Event()\ndef (:\n")
    assert sites(tmp_path, "\ufeffx = 'ü'; y = torch.cuda.Event()\n")


# -- residue: what is accepted ---------------------------------------------------------------------

NAMES = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
SITES = st.lists(
    st.builds(Site, path=NAMES, line=st.just(1), scope=NAMES, kind=st.just("cuda"), code=NAMES),
    min_size=1, max_size=8,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(found=SITES, reason=NAMES.filter(str.strip))
def test_what_is_accepted_as_it_is_leaves_nothing_new_and_nothing_stale(
    tmp_path_factory: pytest.TempPathFactory, found: list[Site], reason: str
) -> None:
    folder = tmp_path_factory.mktemp("queue")
    text = residue.rendered(found, reason)
    (folder / "accepted.toml").write_text(text, "utf-8")
    sifted = residue.sift(found, residue.load(folder))
    assert (sifted.new, sifted.accepted, sifted.stale) == ((), len(found), ())


def test_a_site_that_only_moved_stays_accepted(project: Project) -> None:
    project.ok("fetch")
    assert "1 site accepted" in project.ok("audit", "lead", "--accept", "as it was").out
    one = '"pkg/core.py:Engine.start" = { "torch.cuda.Stream" = 1 }\n'
    assert one in accepted(project).read_text()
    report = project.report("sync")
    assert report["landed"] and report["forks"]["lead"]["audit"]["residue"] == []
    assert report["forks"]["lead"]["audit"]["accepted"] == 1


def test_what_upstream_brought_keeps_a_sync_from_landing_until_a_person_accepts_it(
    project: Project,
) -> None:
    release(project, CORE + MORE)
    before = project.files()
    done = project.forkman("sync")
    assert done.code == 1
    assert "pkg/core.py:9  torch.cuda.synchronize in Engine.stop" in done.out
    assert "torch.cuda.Stream" not in done.out  # that one was there at the old pin
    assert "1 finding not new" in done.out
    assert "forkman audit lead --at v1.2 --accept REASON" in done.out
    assert project.files() == before
    project.ok("audit", "lead", "--at", "v1.2", "--accept", "it waits for nothing on NPU")
    assert project.ok("sync").code == 0
    assert project.pin("lead") == "v1.2"
    assert "sites of CUDA-only" not in project.ok("audit").out


def test_one_more_of_the_same_in_a_definition_is_new(project: Project) -> None:
    release(project, CORE + "        self.other = torch.cuda.Stream()\n")
    project.ok("fetch")
    project.ok("audit", "lead", "--accept", "as it was")
    [site] = project.report("sync")["forks"]["lead"]["audit"]["residue"]
    assert (site["line"], site["scope"]) == (7, "Engine.start")


def test_accepting_more_keeps_what_a_person_wrote(project: Project) -> None:
    release(project, CORE + MORE)
    project.ok("fetch")
    project.ok("audit", "lead", "--accept", "as it was")
    mine = "# mine\n" + accepted(project).read_text().replace("as it was", "it is so")
    accepted(project).write_text(mine)
    project.ok("audit", "lead", "--at", "v1.2", "--accept", "fine, too")
    assert accepted(project).read_text().startswith(mine.rstrip())
    again = accepted(project).read_bytes()
    assert "There is nothing new." in project.ok("audit", "lead", "--accept", "again").out
    assert accepted(project).read_bytes() == again


@pytest.mark.parametrize(
    ("table", "covers"),
    [
        ('where = "pkg"', True),
        ('where = "pkg/core.py"\nkind = "torch.cuda"', True),
        ('where = "pkg"\nkind = "torch.cuda"\ncode = ["nvtx", "torch.cuda.synch*"]', True),
        ('where = "pkg"\nkind = "nccl"', False),
        ('where = "pkg/co"', False),
        ('where = "pkg"\ncode = ["torch.cuda.Event"]', False),
    ],
)
def test_one_entry_may_accept_a_kind_in_a_folder(
    project: Project, table: str, covers: bool
) -> None:
    release(project, CORE + MORE)
    accepted(project).write_text(f'[[accepted]]\nreason = "no"\n{table}\n')
    assert project.forkman("sync").code == (0 if covers else 1)


def test_what_was_accepted_and_is_gone_is_counted_and_json_names_it(project: Project) -> None:
    release(project, "import torch\n")
    accepted(project).write_text(
        '[[accepted]]\nreason = "none there"\nwhere = "pkg"\nkind = "nccl"\n'
    )
    project.ok("fetch")
    project.ok("audit", "lead", "--accept", "as it was")
    project.ok("sync")
    said = lines(project, "audit")
    assert "acceptances of code that is not there; --json names them" in " ".join(said)
    [found] = json.loads(project.ok("audit", "--json").out)
    gone = [(stale["what"], stale["reason"]) for stale in found["stale"]]
    assert ("pkg/core.py:Engine.start torch.cuda.Stream", "as it was") in gone
    assert ("nccl in pkg", "none there") in gone


def test_residue_that_our_change_takes_away_is_none(project: Project) -> None:
    ours = CORE.replace("torch.cuda.Stream()", "None")
    project.change("lead", "No stream", {"pkg/core.py": ours})
    project.ok("fetch")
    assert project.ok("audit", "lead").out.splitlines()[0].split() == [
        "✓", "lead", "0", "findings", "at", "v1.0"
    ]  # fmt: skip


def test_mistakes_in_what_is_accepted_are_told_at_once(project: Project) -> None:
    accepted(project).write_text(
        '[[accepted]]\nreason = " "\nwhere = "pkg"\n'
        '[[accepted]]\nreason = "x"\nwhere = "pkg"\nkind = "cudas"\n'
        '[[accepted]]\nreason = "x"\nwher = "pkg"\n'
        '[[accepted]]\nreason = "x"\n[accepted.sites]\n"pkg/a.py:f" = { x = 0 }\n'
    )
    project.ok("fetch")
    done = project.forkman("audit")
    assert done.code == 2
    for said in (
        "forks/lead/accepted.toml: accepted[0]: reason is empty",
        "accepted[1]: kind 'cudas' is none of torch.cuda, ",
        "accepted[2].wher: no such key",
        "accepted[3]: sites: 'pkg/a.py:f': a count is 1 or more",
    ):
        assert " ".join(said.split()) in " ".join(done.err.split())
    before = project.files()
    done = project.forkman("sync")
    assert done.code == 1 and "lead could not be carried" in done.out
    assert project.files() == before


# -- contracts -------------------------------------------------------------------------------------

TREE = {
    "src/pkg/__init__.py": "from .api import Engine, run as go\nfrom .deep import *\n",
    "src/pkg/api.py": (
        "import torch\nfrom dataclasses import dataclass\nfrom torch import nn\n"
        "from pkg.deep import base\nalias = base\n"
        "LIMIT = 3\n"
        "def run(a, /, b, *, c=1): pass\n"
        "def anything(*args, **kwargs): pass\n"
        "class Engine(base.Base):\n"
        "    def __init__(self, config, size=2): self.ready = True\n"
        "    @staticmethod\n    def make(config): pass\n"
        "    @property\n    def name(self): return ''\n"
        "class Layer(nn.Module):\n    def forward(self, x): pass\n"
        "@dataclass\nclass Config(base.Basis):\n    width: int\n    depth: int = 2\n"
        "    @property\n    def size(self) -> int: ...\n"
        "class Request(base.Message, kw_only=True):\n    port: int\n    backend: str = 'nccl'\n"
    ),
    "src/pkg/deep/__init__.py": "def inner(x): pass\n",
    "src/pkg/deep/base.py": (
        "import dataclasses\n"
        "class Base:\n    def close(self, now): pass\n"
        "@dataclasses.dataclass\nclass Basis:\n    name: str\n"
        "import msgspec\nclass Message(msgspec.Struct, tag=True):\n    id: str = ''\n"
    ),
    "src/pkg/cli.py": (
        'def add(parser):\n    parser.add_argument("-n", "--size", type=int)\n'
        '    reset_arg(parser, "--mode", default=1)\n    print("--other")\n'
        "class Flags:\n    use_cache: bool = True\n"
    ),
    "tests/pkg/api.py": "def run(): pass\n",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> contracts.Tree:
    repo = Repo.new(tmp_path_factory.mktemp("contracts") / "repo")
    repo.commit(TREE, "All")
    objects = Objects(repo.path / ".git")
    commit = objects.git.resolve("HEAD")
    assert commit
    return contracts.Modules(objects).tree(objects.tree_of(commit))


def call(name: str, *parameters: str, **more: Any) -> contracts.Contract:
    kind = "class" if name.rpartition(".")[2][0].isupper() else "function"
    return contracts.Contract("x", name, kind, parameters, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "contract",
    [
        contracts.Contract("x", "pkg.api.run", "function"),
        contracts.Contract("x", "pkg.go", "function"),
        contracts.Contract("x", "pkg.inner", "function"),
        contracts.Contract("x", "pkg.Engine", "class"),
        contracts.Contract("x", "pkg.Engine.close", "function"),
        contracts.Contract("x", "pkg.Engine.ready", "attribute"),
        contracts.Contract("x", "pkg.Engine.name", "attribute"),
        contracts.Contract("x", "pkg.api.LIMIT", "attribute"),
        contracts.Contract("x", "pkg.api.nn.Module", "class"),
        contracts.Contract("x", "pkg.deep.base", "module"),
        contracts.Contract("x", "pkg.api.alias", "module"),
        contracts.Contract("x", "pkg.api.alias.Base", "class"),
        call("pkg.api.run", "a", "b", positional=1),
        call("pkg.api.run", "a", "b", "c", positional=2),
        call("pkg.api.anything", "a", "b", positional=1),
        call("pkg.Engine", "config"),
        call("pkg.Engine.make", "config"),
        call("pkg.Engine.close", "now"),
        call("pkg.api.Config", "name", "width"),
        call("pkg.api.Request", "port"),
        call("pkg.api.Request", "id", "port", "backend"),
        contracts.Contract("x", flag="--size", path="src/pkg"),
        contracts.Contract("x", flag="--mode", path="src/pkg/cli.py"),
        contracts.Contract("x", flag="--use-cache", path="src"),
        contracts.Contract("x", flag="--no-use-cache", path="src"),
        contracts.Contract("x", "pkg.gone", "class", when="src/pkg/gone.py"),
    ],
    ids=str,
)
def test_contracts_that_are_kept(tree: contracts.Tree, contract: contracts.Contract) -> None:
    assert tree.broken(contract) is None


@pytest.mark.parametrize(
    ("contract", "said"),
    [
        (contracts.Contract("x", "pkg.stop", "function"), "no stop in src/pkg/__init__.py"),
        (contracts.Contract("x", "gone.run", "function"), "no module of the tree has it"),
        (contracts.Contract("x", "pkg.api.run", "class"), "is a function in src/pkg/api.py:7"),
        (contracts.Contract("x", "pkg.api.Layer.to", "function"), "there is no to in"),
        (contracts.Contract("x", "pkg.api.nn", "module"), "from torch.nn, which is not in this"),
        (call("pkg.api.run", "a", "b"), "takes no a"),  # positional only
        (call("pkg.api.run", "b", "a", positional=2), "begins with (a, b)"),
        (call("pkg.api.run", "a", "b", "d", positional=1), "takes no d"),
        (call("pkg.Engine"), "needs config too"),
        (call("pkg.Engine.close"), "needs now too"),
        (call("pkg.api.Config", "width", "height"), "takes no height; needs name too"),
        (call("pkg.api.Layer", "x"), "has no constructor of its own"),
        (contracts.Contract("x", flag="--other", path="src"), "nothing in src declares it"),
        (contracts.Contract("x", flag="--size", path="lib"), "lib is not in the tree"),
        (contracts.Contract("x", "pkg.gone", "class", when="src/pkg"), "there is no gone"),
    ],
    ids=str,
)
def test_contracts_that_are_broken_say_how(
    tree: contracts.Tree, contract: contracts.Contract, said: str
) -> None:
    assert said in (tree.broken(contract) or "")


def promise(project: Project, table: str) -> None:
    path = project.root / "forks" / "lead" / "contracts.toml"
    path.write_text(f'[[contract]]\nwhy = "npu.py calls it"\n{table}\n')


def test_a_broken_contract_names_the_commit_that_broke_it_and_nothing_lands(
    project: Project,
) -> None:
    promise(project, 'name = "pkg.core.Engine.start"\nkind = "function"\nparameters = []')
    changed = CORE.replace("start(self)", "start(self, device)")
    guilty = project.upstream("lead").commit({"pkg/core.py": changed}, "Which device (#9)")
    release(project, changed + "\n\nX = 1\n", "Something else (#10)")
    before = project.files()
    done = project.forkman("sync")
    assert done.code == 1
    assert "broken contract pkg.core.Engine.start: pkg/core.py:5 needs device too" in done.out
    assert f'since {guilty[:9]} "Which device" (#9)' in done.out
    assert "relied on: npu.py calls it" in done.out
    assert "(#10)" not in done.out and "--accept" not in done.out
    assert project.files() == before


def test_a_file_that_goes_breaks_the_contracts_on_it(project: Project) -> None:
    promise(project, 'name = "pkg.old"\nkind = "module"')
    upstream = project.upstream("lead")
    upstream.git("checkout", "--quiet", "-b", "line", "v1.0")
    start = upstream.commit({"pkg/old.py": "x = 1\n"}, "Old")
    project.edit_manifest("lead", 'tag = "v1.0"  # the release\n', "")
    project.edit_manifest("lead", upstream.git("rev-parse", "v1.0"), start)
    guilty = upstream.commit({"pkg/old.py": None}, "Remove it (#11)", "v1.2")
    [broken] = project.report("sync")["forks"]["lead"]["audit"]["contracts"]
    assert broken["detail"] == "no module of the tree has it"
    assert [commit["id"] for commit in broken["by"]] == [guilty]


def test_a_contract_that_never_held_is_no_news_for_a_sync(project: Project) -> None:
    promise(project, 'name = "pkg.core.stop"\nkind = "function"')
    done = project.forkman("sync")
    assert done.code == 0, done.said
    assert "2 findings not new" in done.out
    assert project.forkman("audit").code == 1


def test_mistakes_in_contracts_are_told_at_once(project: Project) -> None:
    path = project.root / "forks" / "lead" / "contracts.toml"
    tables = (
        'name = "a.b"\nkind = "function"',
        'why = "x"\nname = "a.b"',
        'why = "x"\nname = "a/b"\nkind = "class"',
        'why = "x"\nflag = "--a"',
        'why = "x"\nname = "a"\nkind = "klass"',
        'why = "x"\nname = "a"\nkind = "function"\nparameters = ["b"]\npositional = 2',
    )
    path.write_text("".join(f"[[contract]]\n{table}\n" for table in tables))
    project.ok("fetch")
    done = project.forkman("audit")
    assert done.code == 2
    for said in (
        "contract[0].why: Field required",
        "contract[1]: a name needs its kind",
        "contract[2]: name 'a/b' is no dotted name",
        "contract[3]: a flag needs path",
        "contract[4].kind: Input should be 'function', 'class'",
        "contract[5]: positional counts parameters",
    ):
        assert said in done.err


# -- validity --------------------------------------------------------------------------------------


def test_a_file_that_our_change_broke_is_a_finding_that_names_the_change(
    project: Project,
) -> None:
    name = project.change("lead", "Break it", {"pkg/ours.py": "def f(:\n    pass\n"})
    done = project.forkman("sync")
    assert done.code == 1
    assert f"pkg/ours.py:1 does not parse after {name}: " in done.out
    assert project.pin("lead") == "v1.0"


def test_the_forks_python_decides_what_parses(project: Project) -> None:
    project.change("lead", "Match", {"pkg/ours.py": "match x:\n    case 1: pass\n"})
    project.ok("fetch")
    assert "does not parse" not in project.forkman("audit").out
    stack = project.root / "manifests" / "stack.toml"
    stack.write_text(stack.read_text().replace("3.11", "3.9"))
    assert "does not parse after match.patch" in project.forkman("audit").out


# -- when it runs ----------------------------------------------------------------------------------


def test_a_fork_without_the_table_is_not_audited(project: Project) -> None:
    project.edit_manifest("lead", '[audit]\npaths = ["pkg"]\n', "")
    release(project, CORE + MORE)
    assert project.report("sync")["forks"]["lead"]["audit"] is None
    assert "No manifest has an [audit]." in project.ok("audit").out
    done = project.forkman("audit", "lead")
    assert done.code == 2 and "no [audit]" in done.err


def test_a_fork_that_stays_or_is_in_conflict_is_not_audited(project: Project) -> None:
    project.ok("sync")
    assert project.report("sync")["forks"]["lead"]["audit"] is None
    project.change("lead", "Mine", {"pkg/core.py": CORE.replace("Stream", "Mine")})
    text = (project.root / "forks/lead/series").read_text()
    (project.root / "forks/lead/series").write_text(text)
    release(project, CORE.replace("Stream", "Theirs"))
    fork = project.report("sync")["forks"]["lead"]
    assert fork["outcomes"][-1]["status"] == "conflict" and fork["audit"] is None


def test_rebase_audits_and_a_dry_run_does_too(project: Project) -> None:
    release(project, CORE + MORE)
    for command in (["rebase", "lead", "--onto", "v1.2"], ["sync", "--dry-run"]):
        report = project.report(*command)
        assert len(report["forks"]["lead"]["audit"]["residue"]) == 1
        assert not report["landed"]


def test_a_path_that_upstream_no_longer_has_is_said(project: Project) -> None:
    project.edit_manifest("lead", '["pkg"]', '["pkg", "lib/x.py"]')
    assert "The tree has no lib/x.py, which [audit] names." in project.ok("sync").out


def test_the_command_looks_anywhere_and_lands_nothing(project: Project) -> None:
    release(project, CORE + MORE)
    project.ok("fetch")
    before = project.files()
    [found] = json.loads(project.forkman("audit", "--at", "v1.2", "--json").out)
    assert [site["scope"] for site in found["residue"]] == ["Engine.start", "Engine.stop"]
    assert found["at"]["tag"] == "v1.2"
    assert project.forkman("audit", "--at", "v9").code == 2
    assert project.files() == before


def test_accepting_needs_one_fork_and_a_reason(project: Project) -> None:
    project.ok("fetch")
    assert project.forkman("audit", "--accept", "x").code == 2
    assert project.forkman("audit", "lead", "--accept", " ").code == 2
    assert project.forkman("audit", "lead", "--accept", "a\nb").code == 2
    assert not accepted(project).exists()


def test_a_resolved_conflict_waits_for_what_the_audit_found(project: Project) -> None:
    release(project, CORE.replace("Stream", "Theirs"))
    project.change("lead", "Mine", {"pkg/core.py": CORE.replace("Stream", "Mine")})
    assert project.forkman("sync").code == 1
    project.ok("edit", "lead")
    worktree = Repo(project.root / ".forkman" / "worktrees" / "lead")
    worktree.write({"pkg/core.py": CORE.replace("Stream", "Both")})
    worktree.git("add", "pkg/core.py")
    done = project.forkman("continue", "lead")
    assert done.code == 1
    assert "torch.cuda.Both in Engine.start" in done.out
    assert project.pin("lead") == "v1.0"
    accepted(project).write_text('[[accepted]]\nreason = "both"\nwhere = "pkg"\n')
    project.ok("sync")
    assert project.pin("lead") == "v1.2"
    assert "Both" in project.built("lead", "pkg/core.py")
