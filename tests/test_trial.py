"""forkman recipe try: what a recipe would do, and say of itself, without touching anything."""

import json
from pathlib import Path

import pytest
from conftest import RECIPE, Project, Repo, layer_patch

GREET = "def main():\n    greet('you')\n"


@pytest.fixture
def greeting(solo: Project) -> Project:
    """The leading fork; from v1.2 on upstream greets, in v1.3 from another file."""
    upstream = solo.upstream("lead")
    upstream.commit({"greet.py": GREET}, "Greet", "v1.2")
    upstream.commit({"greet.py": None, "hello.py": GREET}, "Move it", "v1.3")
    upstream.commit({"hello.py": "def main():\n    hail('you')\n"}, "Hail", "v1.4")
    solo.ok("fetch")
    return solo


def recipe(greeting: Project, fork: str = "lead", name: str = "greet.py") -> str:
    path = greeting.root / "forks" / fork / name
    path.write_text(RECIPE)
    return str(path)


def everything(greeting: Project) -> dict[str, int]:
    """Every file of the project, forkman's own among them, and when it was written."""
    return {
        str(path): path.stat().st_mtime_ns for path in greeting.root.rglob("*") if path.is_file()
    }


def test_it_shows_the_diff_and_the_places_and_touches_nothing(greeting: Project) -> None:
    file = recipe(greeting)
    before = everything(greeting)
    said = greeting.ok("recipe", "try", file, "--at", "v1.2").out
    assert "greet.py  applied  Greet from the runtime" in said
    assert "At v1.2: greet.py:2" in said
    assert "-    greet('you')\n+    slime_npu.greet('you')\n" in said
    after = everything(greeting)
    assert {path for path in after if before.get(path) != after[path]} <= {
        path for path in after if path.endswith("lock")
    }


def test_places_that_nobody_expected_are_named(greeting: Project) -> None:
    said = greeting.ok("recipe", "try", recipe(greeting), "--at", "v1.3").out
    assert "Moved: what was expected at greet.py is at hello.py:2." in said


def test_a_lost_anchor_names_candidates_and_ends_with_one(greeting: Project) -> None:
    upstream = greeting.upstream("lead")
    upstream.commit({"hello.py": "def main():\n    greets('you', 2)\n"}, "Change", "v1.5")
    greeting.ok("fetch")
    done = greeting.forkman("recipe", "try", recipe(greeting), "--at", "v1.5")
    assert done.code == 1
    assert "anchor lost" in done.out and "Nearest: hello.py:2 `greets('you', 2)`" in done.out


def test_json_has_all_of_it(greeting: Project) -> None:
    done = greeting.ok("recipe", "try", recipe(greeting), "--at", "v1.2", "--json")
    found = json.loads(done.out)
    assert found["outcome"]["status"] == "applied"
    assert found["outcome"]["places"] == ["greet.py:2"]
    assert found["at"]["tag"] == "v1.2" and found["fork"] == "lead"
    assert found["diff"].startswith("diff --git a/greet.py b/greet.py\n")


def test_the_pin_with_its_layers_is_what_it_runs_on(greeting: Project) -> None:
    done = greeting.forkman("recipe", "try", recipe(greeting))
    assert done.code == 1  # v1.0 does not greet
    assert "At v1.0" in done.out


def test_a_layer_goes_on_first_and_one_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    engine = Repo.new(tmp_path / "upstreams" / "engine")
    engine.commit({"greet.py": "# one\n# two\n"}, "First", "v0.5")
    layer = layer_patch(engine, {"greet.py": "# one\ngreet('layer')\n# two\n"})
    engine.commit({"greet.py": "greet('upstream')\n"}, "Second", "v0.6")
    lead = Repo.new(tmp_path / "upstreams" / "lead")
    lead.commit({"engine.patch": layer}, "Lead", "v1.0")
    greeting = Project(tmp_path)
    greeting.add("lead", "v1.0")
    blob = lead.git("rev-parse", "v1.0:engine.patch")
    table = (
        '[[layers]]\nfork = "lead"\npath = "engine.patch"\n'
        f'patches = [{{ path = "engine.patch", blob = "{blob}" }}]'
    )
    greeting.add("engine", "v0.5", table, layer)
    (greeting.root / "manifests/stack.toml").write_text('leader = "lead"\n[runtime]\n')
    greeting.ok("fetch")
    file = recipe(greeting, "engine")
    assert "+slime_npu.greet('layer')\n" in greeting.ok("recipe", "try", file).out
    said = greeting.ok("recipe", "try", file, "--at", "v0.6").out
    assert "+slime_npu.greet('upstream')\n" in said
    assert "Without engine.patch, which does not fit v0.6." in said


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("manifests/lead.toml", "lies in no fork's queue"),
        ("forks/other/greet.py", "lies in no fork's queue"),
        ("forks/lead/gone.py", "cannot be read: No such file"),
        ("forks/lead/series", "does not set `recipe` to a Recipe"),
    ],
)
def test_what_is_no_recipe_of_a_fork_is_said(greeting: Project, path: str, said: str) -> None:
    (greeting.root / "forks/lead/series").write_text("")
    done = greeting.forkman("recipe", "try", path)
    assert done.code == 2
    assert said in " ".join(done.err.split()) and "Traceback" not in done.err


def test_a_revision_that_is_not_there_is_said(greeting: Project) -> None:
    done = greeting.forkman("recipe", "try", recipe(greeting), "--at", "v9.9")
    assert done.code == 2
    assert "upstream has no 'v9.9'" in done.err
