#!/bin/sh
# The main job on checkpoints that real DeepSpeed wrote with ZeRO-3 on 4 ranks: to ZeRO-1 on 2 ranks, and on in PyTorch FSDP2.
set -eu
SRC=fixtures/deepspeed/z3-dp4-bf16/checkpoint
OUT=demo-out
rm -rf "$OUT" && mkdir "$OUT"

run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

run ucp inspect "$SRC"
run ucp convert "$SRC" "$OUT/zero1" --to deepspeed --topology dp=2,zero=1
run ucp diff "$SRC" "$OUT/zero1"
printf '\nThe two hold the same atoms bit for bit. %s is what DeepSpeed with 2 ranks and ZeRO-1 loads:\n' "$OUT/zero1"
find "$OUT/zero1" -type f | sort

if command -v torchrun >/dev/null; then
    printf '\nAnother run of ZeRO-3 on 4 ranks goes on in FSDP2 on 2 ranks, with the losses that DeepSpeed itself had:\n'
    PYTHONWARNINGS=ignore run torchrun --nproc-per-node 2 docs/examples/resume_in_fsdp2.py
fi
