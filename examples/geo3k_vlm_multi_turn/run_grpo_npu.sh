#!/usr/bin/env bash
# Sources CANN, then trains by GRPO with the options given; --help says which there are.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$here/cann.sh"
exec python3 "$here/run_geo3k_vlm_multi_turn_grpo_npu.py" "$@"
