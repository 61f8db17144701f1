"""The command line: what it says, in which form, and how it ends."""

import html
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Host, Project, Repo, lines

COMMANDS = [
    "status", "fetch", "sync", "rebase", "export", "verify", "apply", "log", "diff", "edit",
    "save", "continue", "skip", "abort", "adopt", "audit", "needs", "recipe try",
]  # fmt: skip


# -- starting ------------------------------------------------------------------------------------


def test_help_lists_every_command(solo: Project) -> None:
    said = solo.ok("--help").out
    listed = [line.split()[0] for line in said.partition("Commands:")[2].splitlines() if line]
    assert sorted(listed) == sorted({command.split()[0] for command in COMMANDS})


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_takes_json(solo: Project, command: str) -> None:
    said = solo.ok(*command.split(), "--help").out
    assert said.startswith(f"Usage: forkman {command}")
    assert "--json" in said


def test_help_waits_for_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['forkman', '--help']\n"
        "from rebase import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'pygit2', 'git', 'rich', 'tomlkit', 'ast_grep_py', 'griffe', 'requests'}"
        " & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.decode().splitlines()[-1] == "[]"


def test_status_waits_for_no_libgit2(solo: Project) -> None:
    script = (
        "import sys; sys.argv = ['forkman', 'status']\n"
        "from rebase import cli\n"
        "cli.cli(standalone_mode=False)\n"
        "print(sorted({'pygit2', 'git', 'tomlkit', 'ast_grep_py', 'griffe'} & sys.modules.keys()))"
    )
    solo.ok("sync")
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=solo.root, capture_output=True, check=True
    )
    assert done.stdout.decode().splitlines()[-1] == "[]"


def test_the_version_is_the_packages(solo: Project) -> None:
    assert solo.ok("--version").out.startswith("forkman, version ")


def test_it_runs_from_a_folder_below_the_project(project: Project) -> None:
    done = project.forkman("status", cwd=project.root / "forks" / "lead")
    assert done.code == 0 and "engine" in done.out


def test_in_a_directory_that_is_gone_it_says_so(solo: Project) -> None:
    """As is a shell's that stands in a worktree which a landing removed."""
    gone = solo.folder / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", f"rmdir . ../gone; exec {sys.executable} -m rebase.cli status"],
        cwd=gone, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "The current directory is gone." in done.stderr and "Traceback" not in done.stderr


def test_outside_of_a_project_it_says_so(solo: Project) -> None:
    for command in ("status", "sync", "export"):
        done = solo.forkman(command, cwd=solo.folder)
        assert done.code == 2
        assert "is in no forkman project" in done.err


# -- JSON ----------------------------------------------------------------------------------------


def parsed(project: Project, *args: str) -> Any:
    return json.loads(project.ok(*args, "--json").out)


def test_what_each_command_answers_as_json(solo: Project) -> None:
    assert [row["fetched"] for row in parsed(solo, "status")] == [False]
    assert [row["source"] for row in parsed(solo, "fetch")] == ["git"]
    assert parsed(solo, "rebase", "lead", "--onto", "v1.0")["landed"]
    assert parsed(solo, "sync")["forks"][0]["new"]["tag"] == "v1.1"
    assert parsed(solo, "export")["command"] == "export"
    assert parsed(solo, "verify")[0]["findings"] == []
    assert [change["status"] for change in parsed(solo, "log", "lead")] == ["applied"] * 2
    assert "Rank by device" in parsed(solo, "diff", "lead")
    assert parsed(solo, "edit", "lead")["run"] is None
    assert parsed(solo, "save", "lead")["kept"] == ["rank-by-device.patch", "add-the-runtime.patch"]
    assert parsed(solo, "abort", "lead") is None
    patch = solo.folder / "p.patch"
    patch.write_text("diff --git a/x b/x\nnew file mode 100644\n--- /dev/null\n+++ b/x\n"
                     "@@ -0,0 +1 @@\n+x\n")  # fmt: skip
    assert parsed(solo, "adopt", "lead", str(patch))[0]["change"] == "p.patch"
    checkout = solo.folder / "checkout"
    solo.upstream("lead").git("worktree", "add", "--quiet", "--detach", str(checkout), "v1.1")
    exports = str(solo.root / "exports")
    assert parsed(solo, "apply", exports, "--to", str(checkout))["changed"] == ["app.py", "npu.py"]


def test_json_alone_is_on_standard_output(project: Project) -> None:
    done = project.process("sync", "--json")
    assert json.loads(done.out)["landed"]
    assert done.err  # progress


def test_an_error_is_json_too(solo: Project) -> None:
    summary = solo.folder / "summary.md"
    done = solo.forkman("sync", "--to", "nope", "--json", "--summary", str(summary))
    assert done.code == 2
    found = json.loads(done.out)
    assert found["version"] == 1
    assert found["error"].pop("todo").startswith("Name a tag, a branch or a commit of ")
    assert found["error"] == {
        "what": "lead: upstream has no 'nope'.", "kept": "Nothing was changed.", "exit_code": 2,
    }  # fmt: skip
    assert "lead: upstream has no 'nope'." in done.err
    assert html.unescape(summary.read_text()).startswith("lead: upstream has no 'nope'.\n\n")


def test_a_report_with_conflicts_is_json_too(solo: Project) -> None:
    solo.upstream("lead").commit({"app.py": lines({5: "theirs"})}, "Two", "v2.0")
    done = solo.forkman("sync", "--json")
    assert done.code == 1
    assert json.loads(done.out)["forks"][0]["outcomes"][0]["conflicts"][0]["kind"] == "content"
    assert parsed(solo, "edit", "lead")["run"]["command"] == "sync"
    assert parsed(solo, "skip", "lead")["landed"]


# -- words ---------------------------------------------------------------------------------------


def test_status_says_where_each_fork_stands_and_what_is_new(project: Project) -> None:
    first = project.ok("status").out.splitlines()
    assert first[1].split() == ["lead", "v1.0", "not", "fetched", "2"]
    project.ok("fetch")
    lead, engine, trainer = project.ok("status").out.splitlines()[1:]
    assert lead.split() == ["lead", "v1.0", "v1.1", "2"]
    assert engine.split() == ["engine", "v0.5", "v0.6", "1"]
    assert trainer.split() == ["trainer", "v0.1", "v0.1", "2"]
    project.ok("sync")
    assert "v1.1: 2 applied" in project.ok("status").out


def test_log_shows_the_queue_with_each_changes_last_outcome(project: Project) -> None:
    project.ok("sync", "--dry-run")
    head, twelve, four = project.ok("log", "trainer").out.splitlines()
    assert head.split() == ["change", "subject", "author", "last", "outcome"]
    assert "twelve.patch" in twelve and "already upstream" in twelve
    assert "Ann Maintainer" in four and four.rstrip().endswith("applied")


def test_log_of_an_empty_queue_says_so(solo: Project) -> None:
    for path in (solo.root / "forks" / "lead").iterdir():
        path.write_text("") if path.name == "series" else path.unlink()
    assert "The queue is empty." in solo.ok("log", "lead").out
    solo.ok("sync")
    assert solo.pin("lead") == "v1.1"
    solo.ok("verify")


def test_verify_says_which_file_was_edited_and_ends_with_one(solo: Project) -> None:
    solo.ok("sync")
    path = solo.root / "exports" / "lead.patch"
    path.write_text(path.read_text().replace("+ours 5", "+mine 5"))
    done = solo.forkman("verify")
    assert done.code == 1
    assert "lead.patch: sha256: was changed after it was exported" in done.out
    assert "✗" in done.out


def test_verify_without_exports_says_how_to_make_them(solo: Project) -> None:
    done = solo.forkman("verify")
    assert done.code == 2
    assert "forkman export" in done.err


def test_downstream_applies_an_export_without_a_project(solo: Project) -> None:
    solo.ok("sync")
    checkout = solo.folder / "checkout"
    solo.upstream("lead").git("clone", "--quiet", str(solo.upstream("lead").path), str(checkout))
    Repo(checkout).git("checkout", "--quiet", "--detach", "v1.1")
    exports = shutil.copytree(solo.root / "exports", solo.folder / "exports")

    def apply(*options: str) -> str:
        done = solo.forkman("apply", str(exports), "--to", str(checkout), *options, cwd=checkout)
        assert done.code == 0, done.said
        return done.out

    assert apply("--check") == "lead: would change app.py\nlead: would change npu.py\n"
    assert Repo(checkout).git("status", "--porcelain") == ""
    assert apply() == "lead: applied to app.py\nlead: applied to npu.py\n"
    assert Repo(checkout).read("app.py") == lines({5: "ours 5", 25: "upstream 25"})
    assert "nothing to do" in apply()
    assert "lead: taken away from app.py" in apply("--reverse")
    assert Repo(checkout).git("status", "--porcelain") == ""


def test_a_report_is_added_to_a_step_summary(solo: Project) -> None:
    summary = solo.folder / "summary.md"
    summary.write_text("# Before\n")
    solo.ok("sync", "--summary", str(summary))
    assert summary.read_text().startswith("# Before\n## forkman <code>sync</code>")


def test_a_summary_that_cannot_be_written_does_not_hide_what_was_done(solo: Project) -> None:
    summary = solo.folder / "nowhere" / "summary.md"
    done = solo.forkman("sync", "--json", "--summary", str(summary))
    assert done.code == 3
    assert json.loads(done.out)["landed"] and solo.pin("lead") == "v1.1"
    assert f"The summary {summary} cannot be written: No such file or directory." in done.err
    assert "What the report above says was done." in done.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_that_cannot_be_written_does_not_say_that_nothing_happened(
    solo: Project, options: list[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rebase.cli", "sync", *options],
            cwd=solo.root, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 3
    assert solo.pin("lead") == "v1.1"
    assert "No space left on device" in done.stderr and "Traceback" not in done.stderr
    assert "as they were" not in done.stderr and "Nothing was" not in done.stderr


def test_a_dry_run_names_the_command_that_lands_it(solo: Project) -> None:
    done = solo.ok("sync", "--to", "v2.0rc1", "--dry-run")
    assert "To land it:\n  forkman sync --to v2.0rc1\n" in done.out


def test_a_pipe_gets_whole_lines(project: Project) -> None:
    done = project.process("sync", env={"COLUMNS": "40"})
    assert "  exports/lead/0001-rank-by-device.patch\n" in done.out


def test_a_pipe_gets_whole_rows(solo: Project) -> None:
    subject = "Keep the mask of the attention where the kernel of the device has it"
    name = solo.change("lead", subject, {"x.py": "x\n"})
    (row,) = [
        line for line in solo.process("log", "lead", env={"COLUMNS": "40"}).out.splitlines()
        if "mask" in line
    ]  # fmt: skip
    assert name in row and subject in row and "Ann Maintainer" in row
    solo.ok("fetch")
    branch = solo.branch("lead")
    branch.commit({"y.py": "y\n"}, f"Also: {subject.lower()}")
    patch = solo.folder / "also.patch"
    patch.write_text(branch.git("format-patch", "-1", "--stdout") + "\n")
    done = solo.process("adopt", "lead", str(patch), env={"COLUMNS": "40"})
    assert done.out.count("\n") == 1 and f"Also: {subject.lower()}" in done.out


def test_what_a_terminal_cannot_show_is_shown_as_escapes(solo: Project) -> None:
    solo.change("lead", "修复 [npu]", {"x.py": "x\n"})
    for command in ("sync", "verify", "status", "log lead", "diff lead"):
        done = solo.process(*command.split(), env={"PYTHONIOENCODING": "ascii"})
        assert done.code == 0, done.said
        assert done.said.isascii()
        if command == "log lead":
            assert r"\u4fee\u590d [npu]" in done.out


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_any_locale_shows_any_subject(solo: Project, locale: str) -> None:
    solo.change("lead", "修复 [npu]", {"x.py": "x\n"})
    env = {"LANG": locale, "LC_ALL": locale}
    for command in (["log", "lead"], ["sync"], ["diff", "lead"], ["status", "--json"]):
        done = solo.process(*command, env=env)
        assert done.code == 0, done.said
        assert "Traceback" not in done.said


# -- words of others -----------------------------------------------------------------------------


def test_control_bytes_and_markup_of_others_are_shown_as_text(solo: Project) -> None:
    evil = "\x1b[31m[red]Fix[/red] a[mask] \x07\u202e"
    solo.upstream("lead").commit({"app.py": lines({5: "\x1b]0;owned\x07"})}, evil, "v2.0")
    branch = solo.branch("lead")
    branch.git("checkout", "--quiet", "npu")
    branch.commit({"[bold]x[/].py": "x\n"}, "[link=http://x]Click[/link] \x1b[2J")
    solo.queue("lead", "evil.patch", branch.git("format-patch", "-1", "-k", "--stdout") + "\n")
    for command in (
        ["sync"],
        ["log", "lead"],
        ["edit", "lead"],
        ["skip", "lead"],
        ["diff", "lead"],
    ):
        done = solo.forkman(*command)
        assert not {"\x1b", "\x07", "\u202e"} & set(done.said), command
        assert done.code in (0, 1)
    said = solo.forkman("log", "lead").out
    assert "[link=http://x]Click[/link] \\x1b[2J" in said


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["log", "../lead"], "There is no fork '../lead'"),
        (["edit", "-x"], "No such option"),
        (["sync", "\x1b[31m"], "There is no fork"),
        (["sync", "--to", "-x"], "upstream has no '-x'"),
        (["sync", "--to", ""], "it is empty"),
        (["rebase", "lead", "--onto", " "], "it is empty"),
        (["rebase", "lead", "--onto", "--upload-pack=x"], "upstream has no '--upload-pack=x'"),
        (["rebase", "lead", "--onto", "v1.0^{tree}"], "upstream has no"),
        (["rebase", "lead", "--onto", "HEAD"], "upstream has no 'HEAD'"),
        (["diff", "lead", "--output=x", "y"], "No such option"),
        (["diff", "lead", "../v1", "v1.0"], "no state of its branch on ../v1"),
        (["sync", "--upstream", "lead"], "'lead' is not FORK=URL"),
        (["sync", "--upstream", "nobody=x"], "There is no fork 'nobody'"),
        (["adopt", "lead"], "Missing argument"),
        (["verify", "nowhere"], "nowhere"),
        (["apply", "nowhere", "--to", "."], "nowhere"),
        (["continue", "lead"], "no replay is open"),
        (["unknown"], "No such command"),
    ],
)
def test_arguments_that_cannot_be_used_are_said(
    solo: Project, command: list[str], said: str
) -> None:
    solo.ok("fetch")
    before = solo.files()
    done = solo.forkman(*command)
    assert done.code in (1, 2)
    assert said in done.said
    assert "Traceback" not in done.said and "\x1b" not in done.said
    assert solo.files() == before


# -- how it ends ---------------------------------------------------------------------------------


def test_a_mistake_of_ours_is_called_one(solo: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rebase.inspect.status", lambda ws: 1 / 0)
    done = solo.forkman("status")
    assert done.code == 70
    assert "This is a bug in forkman" in done.err


def test_without_git_it_says_so(solo: Project) -> None:
    done = solo.process("fetch", env={"PATH": "/nowhere"})
    assert done.code == 3
    assert "git is not installed" in done.out and "Traceback" not in done.said


def test_a_project_that_cannot_be_written_is_the_environments_fault(solo: Project) -> None:
    (solo.root / ".forkman").write_text("in the way")
    done = solo.forkman("sync")
    assert done.code == 3
    assert ".forkman" in done.err and "Traceback" not in done.err


def test_a_damaged_mirror_is_the_environments_fault(solo: Project) -> None:
    solo.ok("fetch")
    for name in ("HEAD", "config", "packed-refs"):
        (solo.mirror("lead").path / name).write_bytes(b"\0")
    done = solo.forkman("sync")
    assert done.code == 3, done.said
    assert "lead: git failed on its mirror" in done.out
    assert "See whether the disk and the temporary directory (TMPDIR) have room" in done.out
    assert f"remove {solo.mirror('lead').path} and fetch again" in done.out
    assert "with it go the resolutions it remembers" in done.out
    shutil.rmtree(solo.mirror("lead").path)
    solo.ok("sync")


def test_a_queue_without_series_is_a_mistake_in_the_project(solo: Project) -> None:
    (solo.root / "forks" / "lead" / "series").unlink()
    done = solo.forkman("status")
    assert done.code == 2
    assert "forks/lead/series" in done.err


def test_hooks_variables_of_git_do_not_lead_elsewhere(solo: Project) -> None:
    env = {"GIT_DIR": "/nowhere", "GIT_INDEX_FILE": "/nowhere", "GIT_WORK_TREE": "/nowhere"}
    done = solo.process("sync", env=env)
    assert done.code == 0, done.said
    assert solo.pin("lead") == "v1.1"


def test_fetch_ends_with_what_went_wrong(project: Project, host: Host) -> None:
    away = f"lead={host.address}/git/away"
    done = project.forkman("fetch", "--upstream", away)
    assert done.code == 3
    assert "lead out of reach" in done.out and "engine fetched" in done.out
    project.ok("fetch")
    done = project.forkman("fetch", "--upstream", away)
    assert done.code == 3
    assert "lead out of reach, as fetched before" in done.out and "engine fetched" in done.out
    other = f"lead={project.upstream('engine').path}"
    assert project.forkman("fetch", "lead", "--upstream", other).code == 2


def test_progress_and_reports_fit_a_terminal(solo: Project) -> None:
    """`script` gives it one."""
    if not shutil.which("script"):
        pytest.skip("there is no script(1)")
    command = f"{sys.executable} -m rebase.cli sync"
    done = subprocess.run(
        ["script", "--quiet", "--return", "--command", command, "/dev/null"],
        cwd=solo.root, capture_output=True, env=os.environ | {"COLUMNS": "80", "TERM": "xterm"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "Landed: 1 fork moved" in done.stdout.decode()
    assert Path(solo.root, "exports", "index.json").exists()
