#!/usr/bin/env bash
# One node: as many ranks as you like (default: 4, two replicas of two ranks). Further flags go to the server.
#   launch/local.sh 8 --tp-size 2 --model-path /models/Qwen2.5-VL-7B-Instruct
set -euo pipefail
nproc=${1:-4}
shift || true
exec torchrun --nproc-per-node "$nproc" -m spmd_encoder "${@:---tp-size=2}"
