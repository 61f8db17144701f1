"""How long a recipe takes on a large tree, against reading the same blobs.

    python benchmarks/bench_recipe.py [--runs N] [--repository GIT_DIR --revision REV]

The tree is SGLang's `python/` folder: by default release 0.5.9, from the package index. Every run
opens the repository anew. "read" reads every file there; a recipe's time includes what it reads.
Timed are the changes of `forks/sglang`, and two patterns that are looked for in the whole tree.
Times are the best of N, in milliseconds of processor time; the first run has the files cached.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rebase import archives, recipe
from rebase.branch import Files
from rebase.objects import Objects

QUEUE = Path(__file__).parents[1] / "forks" / "sglang"
WHOLE_TREE = ("torch.compile($$$)", "get_attention_tp_size()")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="runs of each (default: 5)")
    parser.add_argument("--repository", type=Path, help="a git directory that has the tree")
    parser.add_argument("--revision", default="v0.5.9")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forkman-bench-") as folder:
        mirror = options.repository or download(Path(folder))
        measure(mirror, options.revision, options.runs)


def download(folder: Path) -> Path:
    mirror = folder / "sglang.git"
    archives.update(
        mirror, "sglang", "v{version}", "python", versions=["0.5.9"], cache=folder / "cache"
    )
    return mirror


def measure(mirror: Path, revision: str, runs: int) -> None:
    def files() -> Files:
        objects = Objects(mirror)
        commit = objects.git.resolve(revision)
        assert commit, f"{mirror} has no {revision}"
        return Files(objects, objects.tree_of(commit))

    def read() -> None:
        tree = files()
        for path in tree.paths(b"python/"):
            tree.read(path)

    reading = best(read, runs)
    print(f"read{reading * 1000:45.0f} ms")
    loaded = {
        path.name: recipe.load(path, path.read_bytes()) for path in sorted(QUEUE.glob("*.py"))
    }
    for name, each in (loaded | {pattern: anywhere(pattern) for pattern in WHOLE_TREE}).items():
        taken = best(lambda each=each: each.run(files()), runs)
        print(f"{name:40}{taken * 1000:9.0f} ms{taken / reading:8.2f} × reading")


def anywhere(pattern: str) -> recipe.Recipe:
    """A recipe that edits every match in the tree."""
    rule = recipe.Rule(find=recipe.Code(pattern), edit=recipe.insert_before("pass"), expect=("*",))
    return recipe.Recipe(
        subject="Everywhere",
        by="A <a@example.com>",
        date="2026-01-01T00:00:00+00:00",
        why="To see how long it takes.",
        how="Before each match.",
        until="Now.",
        rules=(rule,),
    )


def best(run: Callable[[], object], runs: int) -> float:
    """The shortest of `runs` times, in seconds."""
    times = []
    for _ in range(runs):
        gc.collect()
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


if __name__ == "__main__":
    main()
