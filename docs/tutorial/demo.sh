#!/bin/sh
# The main job on a checkpoint that real DeepSpeed wrote: ZeRO-3 on 4 ranks, to atoms, to ZeRO-1 on 2 ranks.
set -eu
SRC=fixtures/deepspeed/z3-dp4-bf16/checkpoint
OUT=demo-out
rm -rf "$OUT" && mkdir "$OUT"

run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

run ucp inspect "$SRC"
run ucp convert "$SRC" "$OUT/atoms"
run ucp verify "$OUT/atoms" --against "$SRC"
run ucp convert "$OUT/atoms" "$OUT/zero1" --to deepspeed --topology dp=2,zero=1
run ucp diff "$SRC" "$OUT/zero1"
printf '\nThe two hold the same atoms bit for bit. %s is what DeepSpeed with 2 ranks and ZeRO-1 loads:\n' "$OUT/zero1"
find "$OUT/zero1" -type f | sort
