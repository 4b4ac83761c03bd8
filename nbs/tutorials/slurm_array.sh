#!/bin/bash
# Several copies of one command share the work through the store: sbatch slurm_array.sh reinit_cnn --scale paper
#SBATCH --job-name=reinit
#SBATCH --array=0-3                 # four copies, on any nodes; 0-15%4: sixteen one after another, four at a time
#SBATCH --cpus-per-task=2
#SBATCH --mem=8G
#SBATCH --time=08:00:00
#SBATCH --signal=B:TERM@120         # two minutes before the end: write a last checkpoint
#SBATCH --requeue                   # after preemption or the loss of its node, a copy begins again, and resumes
##SBATCH --gres=gpu:1               # for studies that need a GPU: remove one of the two signs

set -euo pipefail
export REINIT_RUNS=${REINIT_RUNS:-$HOME/reinit_runs}    # a folder that all nodes see
export OMP_NUM_THREADS=1                                # each process computes with one core
mkdir -p "$REINIT_RUNS"
echo "copy ${SLURM_ARRAY_TASK_ID:-0} on $(hostname)"

places=(--workers "${SLURM_CPUS_PER_TASK:-1}")
if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then places=(--gpus "$SLURM_GPUS_ON_NODE"); fi   # one process for each
name="$*"                                               # a report for each command
out=${OUT:-$REINIT_RUNS-report/${name//[ \/]/_}}

# exec: the signal must reach Python and not the shell
exec reinit_repro "$@" "${places[@]}" --out "$out"
