"""Puts the tests in this folder on simulated NPUs, or skips each file and says why."""

import pytest

from slime_npu import simulator
from slime_npu.simulator import plugin
from slime_npu.simulator.plugin import npu_calls, ranks  # noqa: F401  (fixtures)

missing = None
if not simulator.loaded() and simulator.real_npu() is None:
    try:
        simulator.load_from_environment()
    except simulator.SimulatorError as error:
        missing = str(error)


class Missing(pytest.Module):
    def collect(self):
        pytest.skip(missing, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return Missing.from_parent(parent, path=module_path) if missing else None


def pytest_collection_modifyitems(items):
    plugin.pytest_collection_modifyitems(items)
