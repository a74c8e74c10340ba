#!/usr/bin/env bash
# Several nodes by hand: run this on each with the same arguments.
#   launch/multinode.sh HEAD_HOST NUM_NODES RANKS_PER_NODE [server flags]
set -euo pipefail
head=$1 nodes=$2 nproc=$3
shift 3
exec torchrun --nnodes "$nodes" --nproc-per-node "$nproc" --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id spmd_encoder \
  -m spmd_encoder --host 0.0.0.0 "$@"
