#!/bin/bash
# Resources of each run of a grid, as in any sbatch script; the command of the run is added below these lines.
# python -m obbo_lightning compare --config fc100 --slurm configs/slurm/default.sh --jobs 20
#SBATCH --partition=gpu
#SBATCH --time=04:00:00
#SBATCH --gpus-per-node=1
#SBATCH --mem=16G
#SBATCH --cpus-per-task=4
# A run that reaches its time limit saves a checkpoint and is queued again. --cpus-per-task is also its number of threads.
# Add the shell commands that a run needs here, such as: module load cuda, source ~/venv/bin/activate
