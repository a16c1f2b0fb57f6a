#!/bin/bash
# Several machines without a scheduler: start this file on each of them, in a folder that all share.
#
# Start it:  bash several_machines.sh
# Stop it:   Ctrl-C, or SIGTERM to this process, on each machine. The run saves a checkpoint.
#
# A second start on all machines resumes.
set -euo pipefail

machines=2
head=node1:29500  # one of the machines, with a port that is free there and that the others can reach
run=(finetune --config llama3_1_8b/full data.source=my_chats.jsonl output_dir=runs/first)

exec leanft run --nproc-per-node gpu --nnodes "$machines" --rdzv-endpoint "$head" --max-restarts 3 "${run[@]}"
