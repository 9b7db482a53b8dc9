#!/usr/bin/env bash
# A sweep as one Slurm array: three schedulers, four rates, three seeds, a job each.
#
#   pip install 'paxserve[slurm]'
#   experiments/slurm_sweep.sh run_dir=/shared/sweep hydra.launcher.partition=gpu
#   experiments/slurm_sweep.sh run_dir=/tmp/sweep hydra.launcher.cluster=local    # no Slurm: try it
#
# run_dir must be seen by all machines. The command waits for the jobs and writes the table; begun
# again after a kill or a lost machine it submits what is missing (resume=failed: and what failed).
# Ctrl-C cancels the jobs. After a kill -9 of this command end its array (scancel) first: jobs that
# are still under way are not known to the next one. The settings are those of
# configs/hydra/launcher/slurm.yaml; submitit's own files are in run_dir/submitit.
set -euo pipefail
exec paxserve run -m hydra/launcher=slurm \
    executor=simulated model=opt-13b hardware=a100-40g \
    workload=synthetic workload/lengths=lognormal workload.num_requests=500 \
    limits.max_model_len=2048 \
    baseline=orca_max,orca_pow2,vllm_v0 workload.arrivals.rate=1,2,4,8 seed=0,1,2 "$@"
