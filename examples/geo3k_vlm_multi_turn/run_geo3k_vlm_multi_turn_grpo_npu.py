"""Trains Qwen3-VL on geo3k by GRPO on Ascend NPUs; --help says what it takes."""

import sys
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])  # this example, and slime_npu

from geo3k_vlm_multi_turn.run import main  # noqa: E402
from geo3k_vlm_multi_turn.training import GRPO  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(GRPO))
