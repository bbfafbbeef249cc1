#!/bin/bash
# What each run of a grid asks of Slurm, as in any sbatch script; the runs themselves are added below these lines.
# python -m obbo_lightning compare --config fc100 --slurm configs/slurm/default.sh --jobs 20
#SBATCH --partition=gpu
#SBATCH --time=04:00:00
#SBATCH --gpus-per-node=1
#SBATCH --mem=16G
#SBATCH --cpus-per-task=4
# A run that needs more than its time is saved and queued again. --cpus-per-task is also its number of threads.
# Lines of shell that a run needs: module load cuda, source ~/venv/bin/activate
