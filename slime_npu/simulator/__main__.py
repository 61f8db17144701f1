"""Runs a program, and every Python process it starts, on simulated NPUs.

python -m slime_npu.simulator [--devices 8] [--memory 64G] -- COMMAND [ARGUMENT ...]
"""

import argparse
import os
import re
import shutil
import sys

from slime_npu import simulator

NOT_FOUND = 127  # as a shell says it


def main(arguments: list[str] | None = None) -> None:
    """Becomes the program, so that its exit code and every signal are its own."""
    parser = argparse.ArgumentParser(
        prog="python -m slime_npu.simulator", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--devices", type=int, default=8, help="NPUs, 1 to 64 (default: 8)")
    parser.add_argument(
        "--memory", type=_bytes, default="64G", help="memory of each: 64G, 512M (default: 64G)"
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --")
    options = parser.parse_args(arguments)
    try:
        environment = simulator.environment(options.devices, options.memory)
        if reason := simulator.real_npu():
            raise simulator.SimulatorError(f"{reason}; the simulator only runs where there is none")
        simulator.build()
    except (ValueError, simulator.SimulatorError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    program = shutil.which(options.command[0])
    if program is None:
        parser.exit(NOT_FOUND, f"{parser.prog}: {options.command[0]}: command not found\n")
    sys.stdout.flush()
    os.execve(program, options.command, os.environ | environment)


def _bytes(text: str) -> int:
    """`512M` → 536870912; K, M, G and T are powers of 1024."""
    match = re.fullmatch(r"(\d+)([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it like 64G or 512M")
    return int(match[1]) << 10 * "KMGT".find(match[2].upper() or "-") + 10


if __name__ == "__main__":
    main()
