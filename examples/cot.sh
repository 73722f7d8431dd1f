#!/usr/bin/env bash
# CoT-MoTE's fine-tuning (arXiv:2304.10195, section 4.2): train on negatives from BM25, mine with the result, train again from
# the same start. DATA holds folders retrieval/NAME with pairs. Each command resumes by itself, so the same call resumes all.
#
#   bash examples/cot.sh MODEL DATA OUT [KEY=VALUE...]     # → OUT/stage2/train/model; KEY=VALUE: settings of both recipes
set -euo pipefail
model=$1 data=$2 out=$3

mine() { # STAGE, options of the teacher
  mote mine 'retrieval/*' --data "$data" --out "$out/$1/mined" --negatives 15 --depth 200 --sampling random \
    --relative-margin -1 "${@:2}"
}
train() { # STAGE, settings
  [ -d "$out/$1/train/model" ] || # finished
    mote train "cot-$1" model.source="$model" data.folder="$out/$1/mined" output="$out/$1/train" "${@:2}"
}

mine stage1 --model bm25
train stage1 "${@:4}"
mine stage2 --model "$out/stage1/train/model" --trust-remote-code --query-task search_query --document-task search_document
train stage2 "${@:4}"
