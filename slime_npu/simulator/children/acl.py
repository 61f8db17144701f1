"""The part of CANN's Python interface by which Ray finds the NPUs of a machine."""

import ctypes

from slime_npu import simulator

simulator.load_from_environment()
_cann = ctypes.CDLL("libascendcl.so")


class rt:
    @staticmethod
    def get_device_count() -> tuple[int, int]:
        """How many NPUs can be seen, and CANN's error code."""
        count = ctypes.c_uint32()
        error = _cann.aclrtGetDeviceCount(ctypes.byref(count))
        return count.value, error


def get_soc_name() -> str:
    """The kind of NPU, "Ascend910B3"."""
    _cann.aclrtGetSocName.restype = ctypes.c_char_p
    name: bytes = _cann.aclrtGetSocName()
    return name.decode()
