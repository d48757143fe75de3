#!/usr/bin/env bash
# One node's part in ray_cluster.sbatch, which says what the variables mean.
#
#   ray_node.sh address             prints the address of MOONCAKE_INTERFACE
#   ray_node.sh head PORT           Ray's head, until it is ended
#   ray_node.sh worker HEAD:PORT    a worker, until it is ended
set -euo pipefail

address() {
  ip -4 -o addr show dev "$MOONCAKE_INTERFACE" |
    awk '{ split($4, parts, "/"); print parts[1]; exit }'
}

if [[ $1 == address ]]; then
  address
  exit
fi
here=$(address)
# Instances are not to yield to all else on the node, as Ray would have it.
export RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0
options=(
  --block
  --node-ip-address "$here"
  --num-cpus "${SLURM_CPUS_PER_TASK:-1}"
  --min-worker-port 0
  --max-worker-port 0
)
case $1 in
  head)
    exec .venv/bin/ray start --head --port "$2" --include-dashboard=false \
      --temp-dir "$MOONCAKE_RAY_FOLDER" \
      "${options[@]}"
    ;;
  worker)
    exec .venv/bin/ray start --address "$2" "${options[@]}"
    ;;
  *)
    echo "ray_node.sh: $1 is not address, head or worker" >&2
    exit 2
    ;;
esac
