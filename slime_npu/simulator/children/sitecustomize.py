"""Found by Python in every process that a simulated one starts: puts that on the simulator too.

Loads nothing before torch is imported, so that other programs start as fast as ever. The
sitecustomize that this one hides is run as well.
"""

import importlib.machinery
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

HERE = Path(__file__).resolve().parent


class BeforeTorch(MetaPathFinder):
    def find_spec(
        self, name: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in ("torch", "torch_npu"):
            return None
        sys.meta_path.remove(self)
        from slime_npu import simulator

        simulator.load_from_environment()
        return importlib.util.find_spec(name)  # from the start: loading added a finder


def run_hidden() -> None:
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if importlib.util.find_spec("slime_npu") is None:
    sys.path.append(str(HERE.parents[2]))
sys.meta_path.insert(0, BeforeTorch())
run_hidden()
