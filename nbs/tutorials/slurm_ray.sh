#!/bin/bash
# One Ray cluster over all nodes of a job, and one sweep on it: sbatch slurm_ray.sh reinit_cnn --scale paper
#SBATCH --job-name=reinit-ray
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1         # one Ray process per node, which starts the workers
#SBATCH --exclusive
#SBATCH --gres=gpu:4
#SBATCH --time=08:00:00

set -euo pipefail
export REINIT_RUNS=${REINIT_RUNS:-$HOME/reinit_runs}    # a folder that all nodes see
export OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

name="$*"                                               # a report for each command
out=${OUT:-$REINIT_RUNS-report/${name//[ \/]/_}}

# no binding: the task of a node, and all workers that it starts, may use all of its cores
srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --cpu-bind=none \
    ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_NNODES" -- \
    reinit_repro "$@" --cluster auto --out "$out"
