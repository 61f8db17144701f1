"""forkman needs: what each branch must do, and how that is met at each target."""

import json

import pytest
from conftest import RECIPE, Project

NEEDS = """\
targets = ["v1.0", "v1.2", "v1.3"]

[[need]]
name = "greeting"
what = "Every greeting\\nis ours"
by = [{ change = "greet.py" }]

[[need]]
name = "health"
what = "Health is asked"
by = [{ upstream = "pkg", pattern = "health($$$)" }, { runtime = "slime_npu.device.health" }]
"""


@pytest.fixture
def greeting(solo: Project) -> Project:
    """From v1.2 on upstream greets, in v1.3 it asks for health; greet.py is the only change."""
    upstream = solo.upstream("lead")
    upstream.commit({"greet.py": "def main():\n    greet('you')\n"}, "Greet", "v1.2")
    upstream.commit({"pkg/a.py": "health(\n  1)\n", "pkg2.py": "health()\n"}, "Ask", "v1.3")
    queue = solo.root / "forks" / "lead"
    for name in solo.series("lead"):
        (queue / name).unlink()
    (queue / "series").write_text("greet.py\n")
    guard = 'expect=("greet.py",), needed=Code("greet($WHO)"),'
    (queue / "greet.py").write_text(RECIPE.replace('expect=("greet.py",),', guard))
    (queue / "needs.toml").write_text(NEEDS)
    runtime = solo.root / "slime_npu"
    runtime.mkdir()
    (runtime / "device.py").write_text("def health():\n    pass\n")
    solo.ok("fetch")
    return solo


def write(greeting: Project, text: str) -> None:
    (greeting.root / "forks" / "lead" / "needs.toml").write_text(text)


def test_each_need_is_shown_with_how_it_is_met_and_targets_that_agree_share_a_line(
    greeting: Project,
) -> None:
    said = [line.strip() for line in greeting.ok("needs").out.splitlines()]
    assert said == [
        "lead",
        "greeting: Every greeting is ours",
        "✓ v1.0: greet.py: not needed",
        "✓ v1.2, v1.3: greet.py: applied",
        "health: Health is asked",
        "✓ v1.0, v1.2: runtime: slime_npu.device.health",
        "✓ v1.3: upstream: pkg/a.py:1; runtime: slime_npu.device.health",
    ]


def test_a_need_that_nothing_meets_says_why_and_a_person_is_needed(greeting: Project) -> None:
    (greeting.root / "slime_npu" / "device.py").write_text("")
    done = greeting.forkman("needs", "lead")
    assert done.code == 1
    assert (
        "✗ v1.0, v1.2: upstream: pkg has no `health($$$)`; "
        "runtime: slime_npu/device.py has no health" in done.out
    )
    (greeting.root / "slime_npu" / "device.py").unlink()
    said = greeting.forkman("needs").out
    assert "runtime: this project has no slime_npu.device.health" in said


def test_targets_may_be_given(greeting: Project) -> None:
    rows = json.loads(greeting.ok("needs", "lead", "--at", "v1.2", "--json").out)
    assert [(row["need"], row["target"]) for row in rows] == [
        ("greeting", "v1.2"), ("health", "v1.2")
    ]  # fmt: skip


def test_without_targets_it_is_the_pin(greeting: Project) -> None:
    write(greeting, NEEDS.partition("\n")[2])
    assert "✓ v1.0: greet.py: not needed" in greeting.ok("needs").out


def test_a_change_in_conflict_meets_nothing(greeting: Project) -> None:
    recipe = greeting.root / "forks" / "lead" / "greet.py"
    recipe.write_text(recipe.read_text().replace('("greet.py",)', '("greet.py", "other.py")'))
    done = greeting.forkman("needs", "--at", "v1.2")
    assert done.code == 1
    assert "✗ v1.2: greet.py: conflict" in done.out


def test_a_change_of_another_fork_counts_where_that_one_stands(project: Project) -> None:
    project.ok("fetch")
    path = project.root / "forks" / "engine" / "needs.toml"
    by = '{ change = "rank-by-device.patch", fork = "lead" }'
    path.write_text(f'[[need]]\nname = "rank"\nwhat = "Ranks are by device"\nby = [{by}]\n')
    said = project.ok("needs", "engine", "--at", "v0.6").out
    assert "✓ v0.6: lead rank-by-device.patch: applied" in said


def test_mistakes_are_told_at_once(greeting: Project) -> None:
    write(
        greeting,
        '[[need]]\nname = "a"\nwhat = "b"\nby = []\n'
        '[[need]]\nname = "a"\nwhat = "b"\nby = [{ change = "x.py", runtime = "a.b" }]\n'
        '[[need]]\nname = "c"\nwhat = "b"\nby = [{ upstream = "x.py" }]\n'
        '[[need]]\nname = "d"\nwhat = "b"\nby = [{ runtime = "../x" }]\n'
        '[[need]]\nname = "e"\nby = [{ chang = "x.py" }]\n',
    )
    done = greeting.forkman("needs")
    assert done.code == 2
    for said in (
        "forks/lead/needs.toml: need[0]: by is empty",
        "need[1].by[0]: needs change, runtime or upstream, one of the three",
        "need[2].by[0]: upstream, a file or folder, and pattern go together",
        "need[3].by[0]: runtime '../x' is no dotted name",
        "need[4].what: Field required",
        "need[4].by[0].chang: no such key",
    ):
        assert said in done.err


@pytest.mark.parametrize(
    ("by", "said"),
    [
        ('{ change = "gone.py" }', "greeting: lead's series names no gone.py"),
        ('{ change = "greet.py", fork = "nobody" }', "greeting: there is no fork nobody"),
    ],
)
def test_what_a_need_names_is_there(greeting: Project, by: str, said: str) -> None:
    write(greeting, NEEDS.replace('{ change = "greet.py" }', by))
    done = greeting.forkman("needs")
    assert done.code == 2
    assert said in done.err


def test_a_project_without_needs_says_so(greeting: Project) -> None:
    (greeting.root / "forks" / "lead" / "needs.toml").unlink()
    assert "No fork has a needs.toml." in greeting.ok("needs").out
    assert greeting.forkman("needs", "lead").code == 2
