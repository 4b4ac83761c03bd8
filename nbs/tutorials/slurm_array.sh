#!/bin/bash
# Several copies of one command share the work through the store: sbatch slurm_array.sh reinit_cnn --scale paper
#SBATCH --job-name=reinit
#SBATCH --array=0-3                 # four copies, on any nodes
#SBATCH --cpus-per-task=2
#SBATCH --mem=8G
#SBATCH --time=08:00:00
#SBATCH --signal=B:TERM@120         # two minutes before the end: write a last checkpoint
#SBATCH --requeue                   # a copy that was stopped begins again, and resumes
##SBATCH --gres=gpu:1               # for studies that need a GPU: remove one of the two signs

set -euo pipefail
export REINIT_RUNS=${REINIT_RUNS:-$HOME/reinit_runs}    # a folder that all nodes see
export OMP_NUM_THREADS=1                                # each process computes with one core
mkdir -p "$REINIT_RUNS"
echo "copy ${SLURM_ARRAY_TASK_ID:-0} on $(hostname)"

# exec: the signal must reach Python and not the shell
exec reinit_repro "$@" --workers "${SLURM_CPUS_PER_TASK:-1}" --out "${OUT:-$REINIT_RUNS-report}"
