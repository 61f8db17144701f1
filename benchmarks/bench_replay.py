"""How fast forkman replays, against `git rebase` and `git replay`, and how fast it starts.

    python benchmarks/bench_replay.py [--runs N] [--json]

Makes a repository of 5,000 files, a branch of 100 one-file changes on its base, and an upstream
that changed half of those files (so that they need a content merge) and 500 others. Every run
starts from a fresh copy of it, and the contenders take turns, so that all meet the same machine:

- forkman: open the repository, read the branch's commits, replay, write the objects and the ref;
- `git rebase --onto` in a worktree that has all files checked out;
- `git replay`, where `git`, or the git that FORKMAN_BENCH_GIT names, has it.

Beside them the start of the program: `forkman --help`, and `forkman status` in a project of five
forks that fetched before, against `python3 -c pass`.

Times are medians, in milliseconds of wall time on disk. Memory is the peak of a process that does
nothing but the replay.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

FILES, CHANGES, LINES = 5000, 100, 200
ENV = os.environ | {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.com",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=7, help="runs of each (default: 7)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--replay", nargs=2, metavar=("BASE", "REPOSITORY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replay:
        print(json.dumps(replay(options.replay[0], Path(options.replay[1]))))
        return
    with tempfile.TemporaryDirectory(prefix="forkman-bench-") as folder:
        numbers = measure(Path(folder), options.runs)
    print(json.dumps(numbers, indent=2) if options.json else table(numbers))


# -- what is measured ----------------------------------------------------------------------------


def measure(folder: Path, runs: int) -> dict[str, float]:
    """All numbers, by name: `… ms` are medians of wall times, `… MB` is 10⁶ bytes."""
    made = folder / "made.git"
    base = generate(made)
    replaying = git_with_replay()
    starting = starts(folder, made, base)
    times: dict[str, list[float]] = {}
    trees: set[str] = set()
    peak = 0.0
    for run in range(runs):
        ours = shutil.copytree(made, folder / f"forkman-{run}.git")
        done = json.loads(output([sys.executable, __file__, "--replay", base, str(ours)]))
        times.setdefault("forkman replay", []).append(done["ms"])
        peak = max(peak, done["peak MB"])
        trees.add(git(ours, "rev-parse", "result^{tree}"))

        theirs = shutil.copytree(made, folder / f"rebase-{run}.git")
        worktree = folder / f"worktree-{run}"
        git(theirs, "worktree", "add", "--quiet", "--detach", str(worktree), "npu")
        rebase = ["git", "-C", str(worktree), "rebase", "--quiet", "--onto", "upstream", "main"]
        times.setdefault("git rebase", []).append(timed(rebase))
        trees.add(git(worktree, "rev-parse", "HEAD^{tree}"))
        shutil.rmtree(worktree)

        if replaying:
            bare = shutil.copytree(made, folder / f"replay-{run}.git")
            command = [replaying, "-C", str(bare), "replay", "--onto", "upstream", "main..npu"]
            times.setdefault("git replay", []).append(timed(command))
        for name, command in starting.items():
            times.setdefault(name, []).append(timed(command, folder / "project"))
    if len(trees) != 1:
        raise SystemExit(f"forkman and git rebase disagree: {trees}")
    return {f"{name} ms": statistics.median(found) for name, found in times.items()} | {
        "forkman replay peak MB": peak
    }


def replay(base: str, repository: Path) -> dict[str, float]:
    """Replay the branch in this process: its wall time and the process's peak memory so far."""
    from rebase.git import ObjectId
    from rebase.history import History
    from rebase.objects import Objects
    from rebase.outcome import Status
    from rebase.replay import Edit, Step
    from rebase.replay import replay as replayed

    onto, tip = (ObjectId(git(repository, "rev-parse", ref)) for ref in ("upstream", "npu"))
    began = time.perf_counter()
    objects = Objects(repository)
    steps: list[Step] = []
    while tip != base:
        head, _, message = objects.read(tip).partition(b"\n\n")
        author = next(line[7:] for line in head.split(b"\n") if line.startswith(b"author "))
        (parent,) = objects.parents_of(tip)
        edit = Edit(objects.tree_of(parent), objects.tree_of(tip))
        steps.insert(0, Step(tip[:9], author, message, edit))
        tip = parent
    outcomes = list(replayed(objects, steps, onto, History(objects.git, ObjectId(base), onto)))
    objects.flush()
    assert outcomes[-1].commit
    objects.git.run("update-ref", "refs/heads/result", outcomes[-1].commit)
    took = time.perf_counter() - began
    assert [outcome.status for outcome in outcomes] == [Status.APPLIED] * CHANGES
    return {"ms": took * 1e3, "peak MB": peak_memory()}


def peak_memory() -> float:
    """This process's peak memory in MB."""
    # getrusage() would also count the parent this process was forked from.
    status = Path("/proc/self/status").read_text()
    return (
        int(next(line for line in status.split("\n") if line.startswith("VmHWM")).split()[1]) / 1e3
    )


def starts(folder: Path, upstream: Path, pin: str) -> dict[str, list[str]]:
    """The commands whose start is measured, in a project of five forks of `upstream`."""
    project = folder / "project"
    for fork in ("one", "two", "three", "four", "five"):
        queue = project / "forks" / fork
        queue.mkdir(parents=True)
        (queue / "series").write_text("# No change yet.\n")
        (project / "manifests").mkdir(exist_ok=True)
        (project / "manifests" / f"{fork}.toml").write_text(
            f"""\
[upstream]
url = {json.dumps(str(upstream))}
releases = {{ tags = 'v(?P<version>.+)' }}
[pin]
commit = "{pin}"
tag = "v1.0"
[queue]
path = "forks/{fork}"
[export]
name = "{fork}.patch"
"""
        )
    (project / "manifests" / "stack.toml").write_text('leader = "one"\n[runtime]\n')
    forkman = [sys.executable, "-m", "rebase.cli"]
    output([*forkman, "fetch"], project)
    return {
        "python3 -c pass": [sys.executable, "-c", "pass"],
        "forkman --help": [*forkman, "--help"],
        "forkman status": [*forkman, "status"],
    }


def git_with_replay() -> str | None:
    for candidate in filter(None, (os.environ.get("FORKMAN_BENCH_GIT"), "git")):
        # without arguments git replay explains itself (129); a git without it says so (1)
        if subprocess.run([candidate, "replay", "-h"], capture_output=True).returncode == 129:
            return candidate
    return None


# -- how it is shown -----------------------------------------------------------------------------

TARGETS = (
    ("forkman replay ms", "git rebase ms", 1 / 15),
    ("forkman replay ms", "git replay ms", 1.5),
    ("forkman --help ms", "python3 -c pass ms", 6),
    ("forkman status ms", "python3 -c pass ms", 15),
)


def table(numbers: dict[str, float]) -> str:
    lines = [f"{name:24} {number:8.1f}" for name, number in numbers.items()]
    for name, other, most in TARGETS:
        if name in numbers and other in numbers:
            ratio = numbers[name] / numbers[other]
            lines.append(f"{name} / {other}: {ratio:.3f} (at most {most:.3f})")
    lines.append(f"peak memory: {numbers['forkman replay peak MB']:.1f} MB (at most 120)")
    return "\n".join(lines)


# -- what it is measured on ----------------------------------------------------------------------


def generate(path: Path) -> str:
    """Make the repository; its branches are main, npu and upstream. Returns the base, main's id."""
    output(["git", "init", "--quiet", "--bare", "--initial-branch=main", str(path)])
    names = [f"pkg{i // 100:02}/sub{i // 20 % 5}/module_{i:04}.py" for i in range(FILES)]
    touched = names[:: FILES // CHANGES]
    others = random.Random(7).sample(sorted(set(names) - set(touched)), 500)
    bodies = {
        name: [f"line {line} of {number}\n" for line in range(LINES)]
        for number, name in enumerate(names)
    }

    def changed(name: str, edits: dict[int, str]) -> tuple[str, list[str]]:
        return name, [edits.get(number, line) for number, line in enumerate(bodies[name])]

    script = [commit("main", None, "base", 0, bodies.items())]
    script += [
        commit("npu", None if number else "main", f"change {number}", number,
               [changed(name, {100: f"our change {number}\n"})])
        for number, name in enumerate(touched)
    ]  # fmt: skip
    released = [
        changed(name, {20: "upstream edit\n", 150: "upstream edit\nand one more line\n"})
        for name in touched[1::2]
    ] + [changed(name, {5: "upstream edit\n"}) for name in others]
    script.append(commit("upstream", "main", "release", 1, released))
    subprocess.run(
        ["git", "-C", str(path), "fast-import", "--quiet"],
        input="".join(script).encode(), env=ENV, check=True,
    )  # fmt: skip
    for number, branch in enumerate(("main", "upstream")):
        git(path, "tag", f"v1.{number}", branch)
    return git(path, "rev-parse", "main")


def commit(
    branch: str, start: str | None, message: str, age: int, files: Iterable[tuple[str, list[str]]]
) -> str:
    """A commit in the language of git fast-import."""
    who = f"A <a@example.com> {1700000000 + age} +0000\n"
    script = f"commit refs/heads/{branch}\nauthor {who}committer {who}"
    script += f"data {len(message)}\n{message}\n" + (f"from refs/heads/{start}\n" if start else "")
    for name, lines in files:
        body = "".join(lines)
        script += f"M 100644 inline {name}\ndata {len(body)}\n{body}\n"
    return script


# -- running -------------------------------------------------------------------------------------


def git(repository: Path, *args: str) -> str:
    return output(["git", "-C", str(repository), *args])


def output(command: list[str], folder: Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, env=ENV, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return done.stdout.strip()


def timed(command: list[str], folder: Path | None = None) -> float:
    """The wall time of a command, in milliseconds."""
    began = time.perf_counter()
    output(command, folder)
    return (time.perf_counter() - began) * 1e3


if __name__ == "__main__":
    main()
