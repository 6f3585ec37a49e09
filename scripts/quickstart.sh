#!/usr/bin/env bash
# From a fresh machine to a trained model: installs what is missing, builds, fetches public-domain text, trains a small
# model on two ranks and prints its loss beside n-gram baselines. Options: --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<TXT
usage: scripts/quickstart.sh [--text FILE] [--steps N]
  --text FILE   train on your own UTF-8 text; every twentieth block of it is held out for validation
  --steps N     optimizer steps instead of those in configs/quickstart.json
The run's folder, with report.json, is printed at the end.
TXT
}

text=""
steps=""
while [ $# -gt 0 ]; do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --text) [ $# -ge 2 ] || die "--text needs a file."; text=$2; shift 2 ;;
    --steps) [ $# -ge 2 ] || die "--steps needs a number."; steps=$2; shift 2 ;;
    *) usage >&2; exit 2 ;;
  esac
done
if [ -n "$text" ]; then
  if [ ! -f "$text" ] || [ ! -r "$text" ]; then die "--text $text is no readable file."; fi
  text=$(realpath "$text")
fi
[[ "$steps" =~ ^([1-9][0-9]*)?$ ]] || die "--steps takes a positive whole number, not '$steps'."

cd "$ROOT"
install_missing
SECONDS=0
build_preset cpu qeffect
echo "built in $SECONDS s"
qeffect="$ROOT/build/cpu/qeffect"

say "Making the corpus"
SECONDS=0
corpus=build/corpus
if [ -n "$text" ]; then
  corpus=build/corpus-own
  python3 scripts/make_corpus.py "$corpus" --text "$text"
else
  python3 scripts/make_corpus.py "$corpus"
fi
corpus_field() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$corpus/corpus.json" "$1"; }
train=$(corpus_field train)
valid=$(corpus_field valid)
for name in "$corpus"/*.txt; do
  shard="${name%.txt}.bin"
  if [ ! -f "$shard" ] || [ "$name" -nt "$shard" ]; then
    # Renamed when complete, so that an interrupted call leaves no half shard to be reused.
    "$qeffect" tokenize --input "$name" --output "$shard.new" --force >/dev/null
    mv "$shard.new" "$shard"
  fi
done
echo "made in $SECONDS s"

run="runs/quickstart-$(date +%Y%m%d-%H%M%S)"
say "Training on two ranks; the run's folder is $run"
export_mpi_environment
SECONDS=0
settings=(--set "data.train=$corpus/$train.bin" --set "data.valid=$corpus/$valid.bin" --set "report.dir=$run")
if [ -f "$corpus/jargon.bin" ]; then settings+=(--set "data.out_of_domain=$corpus/jargon.bin"); fi
if [ -n "$steps" ]; then
  # The warm-up keeps its share of the run, but a short one would start at full learning rate and stumble.
  warmup=$((steps / 12))
  [ "$warmup" -ge 20 ] || warmup=$((steps < 40 ? steps / 2 : 20))
  settings+=(--set "training.train_iters=$steps" --set "training.lr_warmup_iters=$warmup")
fi
mpirun -n 2 "$qeffect" train --config configs/quickstart.json "${settings[@]}"
echo "trained in $SECONDS s"

say "Result"
python3 - "$run/report.json" "$corpus/corpus.json" <<'PY'
import json, sys
report, corpus = (json.load(open(path)) for path in sys.argv[1:])
rows = [(f"{name} counts", report["baselines"][name]) for name in ("bigram", "trigram")] if report["baselines"] else []
rows.append(("this model", report["final"]["valid_loss"]))
rows.append(("on another text", report["final"]["out_of_domain_loss"]))
print("held-out loss in nats per byte, lower is better:")
for name, loss in rows:
    print(f"  {name:<16} {'none' if loss is None else format(loss, '.4f')}")
losses = dict(rows)
if losses.get("bigram counts") and losses["this model"] > losses["bigram counts"]:
    print("Too few steps to beat counting: the full run takes about five minutes on two cores.")
if corpus["note"]:
    print(f"Note: {corpus['note']}")
print(f"report: {sys.argv[1]}")
PY
