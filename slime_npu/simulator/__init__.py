"""Runs the real `torch_npu` on a machine without an NPU, over a simulated CANN and HCCL.

    python -m slime_npu.simulator --devices 8 -- pytest tests      # any program, and its children
    slime_npu.simulator.load(devices=8)                            # this process, before torch_npu

Owns: building the CANN and HCCL stand-ins (`cann.c`, `hccl.c`), loading them into this process and
those it starts, and the count of NPU operator calls. `aten.py` gives PyTorch's operators CPU
kernels, `operators.py` the NPU's own. `README.md` says what all this cannot prove.

The stand-ins are compiled once for each user, torch_npu and compiler, into
`$XDG_CACHE_HOME/slime_npu` (`~/.cache/slime_npu`). What torch_npu links to and they lack fails by
its own name when it is called.
"""

import ctypes
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
CHILDREN = HERE / "children"  # sitecustomize and acl, for the processes this one starts

# The wheel asks the loader for these names; all of CANN's own symbols live in the first.
LIBRARIES = ("ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "hccl")

_DEVICES, _MEMORY = "SLIME_NPU_SIMULATOR_DEVICES", "SLIME_NPU_SIMULATOR_MEMORY"  # cann.c reads them

_counter: Counter[str] = Counter()
_loaded: list[ctypes.CDLL] = []


class SimulatorError(RuntimeError):
    """The simulator cannot run here; the message says why and what to do."""


def calls() -> Counter[str]:
    """How often each NPU operator ran in this process, by its name (`npu_rms_norm`).

    The counter itself, not a copy: `calls().clear()` starts a new count.
    """
    return _counter


def count(operator: str) -> None:
    """Notes that `operator` ran once."""
    _counter[operator] += 1


def loaded() -> bool:
    """Whether this process runs on the simulator."""
    return bool(_loaded)


def load(devices: int = 8, memory: int = 64 << 30) -> None:
    """Makes torch_npu in this process, and in those it starts, run on simulated NPUs.

    Call it before torch_npu is imported. A second call changes nothing and must ask for the same.

    Args:
        devices: NPUs of this machine, before `ASCEND_RT_VISIBLE_DEVICES` hides any; 1 to 64.
        memory: bytes of each. Memory is the host's, taken when it is written to.

    Raises:
        SimulatorError: a real NPU or a real CANN is here, torch_npu is not installed or came first,
            or there is no C compiler.

    """
    wanted = environment(devices, memory)
    if loaded():
        has = tuple(int(os.environ[name]) for name in (_DEVICES, _MEMORY))
        if has != (devices, memory):
            raise SimulatorError(
                f"the simulator runs with {has[0]} devices of {has[1]} bytes in this process; that "
                f"cannot become {devices} of {memory}. Start another process."
            )
        return
    if "torch_npu" in sys.modules:
        raise SimulatorError(
            "torch_npu was imported before the simulator; call slime_npu.simulator.load() first"
        )
    if reason := real_npu():
        raise SimulatorError(f"{reason}; the simulator only runs where there is none")
    os.environ |= wanted
    folder = build()
    for name in LIBRARIES:  # in this order: the others depend on the first
        _loaded.append(ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL))
    if str(CHILDREN) not in sys.path:
        sys.path.append(str(CHILDREN))  # where `import acl` finds its stand-in
    sys.meta_path.insert(0, _AfterTorchNpu())


def environment(devices: int = 8, memory: int = 64 << 30) -> dict[str, str]:
    """The environment in which a Python process runs on the simulator from its start.

    Whoever gives a child a `PYTHONPATH` of its own must keep this one in it.

    Raises:
        ValueError: `devices` is not from 1 to 64, or `memory` is not positive.

    """
    if not 1 <= devices <= 64:
        raise ValueError(f"{devices} devices cannot be simulated, only 1 to 64")
    if memory <= 0:
        raise ValueError(f"a device cannot have {memory} bytes of memory")
    path = [str(CHILDREN)]
    path += [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in path]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        _DEVICES: str(devices),
        _MEMORY: str(memory),
        # Kernels run where they are called. A queue would let a collective overtake its input.
        "TASK_QUEUE_ENABLE": "0",
    }


def load_from_environment() -> None:
    """Loads what the environment asks for (see `environment`), or the defaults."""
    load(
        int(os.environ.get(_DEVICES, 8)),
        int(os.environ.get(_MEMORY, 64 << 30)),
    )


def real_npu(dev: Path = Path("/dev")) -> str | None:
    """What shows that this machine has an NPU or CANN, or None; devices are looked for in `dev`."""
    if found := sorted(dev.glob("davinci[0-9]*")):
        return f"this machine has a real NPU ({found[0]})"
    try:
        library = ctypes.CDLL("libascendcl.so")
    except OSError:
        return None
    if hasattr(library, "simulated_error"):
        return None
    return "a real libascendcl.so is on the loader's path (LD_LIBRARY_PATH, /etc/ld.so.conf)"


# -- building --------------------------------------------------------------------------------------


def build() -> Path:
    """The folder with the built stand-ins; compiles them if this is the first time.

    Raises:
        SimulatorError: torch_npu is not installed, or the compiler is missing or failed.

    """
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise SimulatorError(
            "torch_npu is not installed; the simulator runs the real wheel: "
            "pip install --no-deps torch_npu (the minor version of your torch)"
        )
    wheel = sorted((Path(spec.origin).parent / "lib").glob("*.so"))
    compiler = shutil.which(os.environ.get("CC", "cc")) or ""
    sources = [HERE / "cann.c", HERE / "hccl.c"]
    key = hashlib.sha256(repr((LIBRARIES, compiler, platform.machine())).encode())
    for source in sources:
        key.update(source.read_bytes())
    for library in wheel:
        stat = library.stat()
        key.update(f"{library} {stat.st_size} {stat.st_mtime_ns}".encode())

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slime_npu"
    folder = cache / key.hexdigest()[:16]
    if folder.is_dir():
        return folder
    if not compiler:
        raise SimulatorError("no C compiler: install gcc or clang, or name one in CC")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as made:
        _compile(compiler, Path(made), wheel)
        Path(made).chmod(0o755)
        try:
            Path(made).rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
        else:
            Path(made).mkdir()  # for TemporaryDirectory to remove
    return folder


def _compile(compiler: str, folder: Path, wheel: list[Path]) -> None:
    options = ["-std=gnu11", "-O2", "-Wall", "-fPIC", "-shared", "-pthread"]
    undefined = _undefined(wheel)
    hccl = {name for name in undefined if name.startswith("Hccl")}
    sources = {"ascendcl": (HERE / "cann.c", undefined - hccl), "hccl": (HERE / "hccl.c", hccl)}
    for name in LIBRARIES:
        output = folder / f"lib{name}.so"
        parts: list[str | Path] = ["-xc", os.devnull]
        if name in sources:
            source, functions = sources[name]
            missing = folder / f"missing_{name}.c"
            missing.write_text(_missing(functions))
            parts = [source, missing]
        if name != "ascendcl":
            parts += [f"-L{folder}", "-Wl,--no-as-needed", "-lascendcl"]
        _run([compiler, *options, f"-Wl,-soname,{output.name}", "-o", output, *parts])


def _undefined(wheel: list[Path]) -> set[str]:
    """The CANN functions that the wheel's libraries expect from others."""
    listed = _run(["nm", "-D", "--undefined-only", *wheel])
    names = {line.split()[-1] for line in listed.splitlines() if " U " in line}
    prefixes = ("acl", "Hccl", "Msprof", "rt")
    return {n for n in names if n.startswith(prefixes) and n.isidentifier()}


def _missing(names: set[str]) -> str:
    """C in which each function says that it is not simulated; cann.c's own definitions win."""
    functions = (
        f'__attribute__((weak)) int {name}(void) {{ return simulated_missing("{name}"); }}'
        for name in sorted(names)
    )
    return "int simulated_missing(const char *);\n" + "\n".join(functions) + "\n"


def _run(command: Sequence[str | Path]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise SimulatorError(f"{command[0]} is missing; install a C compiler") from error
    except subprocess.CalledProcessError as error:
        line = " ".join(map(str, command))
        raise SimulatorError(
            f"the simulator could not be built:\n{line}\n{error.stderr}"
        ) from error
    return done.stdout


# -- kernels, once torch_npu is there --------------------------------------------------------------


class _AfterTorchNpu(MetaPathFinder):
    """Gives torch_npu its kernels as soon as it has been imported."""

    def find_spec(
        self, name: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch_npu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, None, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)  # not sooner: who only asks for the spec imports nothing
            _install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install() -> None:
    from . import aten, operators

    aten.register()
    operators.register()
