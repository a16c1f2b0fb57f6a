#!/bin/bash
# One machine: a process per GPU.
#
# Start it:  bash one_machine.sh
# Stop it:   Ctrl-C, or SIGTERM to this process. The run saves a checkpoint.
#
# A second start resumes. On a service that replaces preempted machines, put output_dir on a disk that remains.
set -euo pipefail

run=(finetune --config qwen3_8b/qlora data.source=my_chats.jsonl output_dir=runs/first)

# After a process dies, all processes restart from the newest checkpoint, at most 3 times.
exec leanft run --nproc-per-node gpu --max-restarts 3 "${run[@]}"
