#!/usr/bin/env bash
# One node. The first argument is the number of ranks (default 4); further flags go to the server.
#   launch/local.sh                  two replicas of two ranks on the embedded default
#   launch/local.sh 8 --tp-size 2 --model-path /models/Qwen2.5-VL-7B-Instruct
set -euo pipefail
nproc=${1:-4}
shift || true
exec torchrun --nproc-per-node "$nproc" -m spmd_encoder "${@:---tp-size=2}"
