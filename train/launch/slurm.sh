#!/bin/bash
# Several machines under SLURM: sbatch --nodes 2 --gpus-per-node 8 slurm.sh paper-big
# Before the time limit the run saves and ends. Submit again to resume from the last checkpoint.
#SBATCH --job-name=vanilla_transformer
#SBATCH --ntasks-per-node=1
# one task starts the processes of all GPUs, so it needs all cores of the machine
#SBATCH --exclusive
#SBATCH --signal=TERM@120
set -euo pipefail
# time between SIGTERM and SIGKILL, within the 120 seconds that SLURM gives
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110

launch_folder=$(python -c 'import vanilla_transformer.train as t; print(t.__path__[0] + "/launch")')
export MAIN_PROCESS_IP=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export NUM_PROCESSES=$((SLURM_NNODES * ${SLURM_GPUS_ON_NODE:-1}))
export CONFIG_FILE="$launch_folder/several-nodes.yaml"

# SLURM_PROCID differs between machines, so it is read only after srun has started there
srun --cpu-bind=none --kill-on-bad-exit=1 bash -c 'exec accelerate launch --config_file "$CONFIG_FILE" \
    --num_machines "$SLURM_NNODES" --num_processes "$NUM_PROCESSES" \
    --machine_rank "$SLURM_PROCID" --main_process_ip "$MAIN_PROCESS_IP" \
    -m vanilla_transformer.train "$@" --resume' bash "$@"
