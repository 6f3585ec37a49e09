// Bigram and trigram tables as yardsticks: a model that does not beat them has learned no context.
//
// Dirichlet smoothing, each order leaning on the next lower one with weight a = 1:
//   p1(c)    = (n(c) + 1) / (n + V)
//   p2(c|b)  = (n(bc) + a·p1(c)) / (n(b·) + a)
//   p3(c|ab) = (n(abc) + a·p2(c|b)) / (n(ab·) + a)
#pragma once

#include <cstdint>

#include "app/data/token_dataset.h"

namespace qe {

struct NgramBaseline {
  double bigram = 0;   // nats per target token of the validation windows
  double trigram = 0;  // its first target of a window has one token before it, and takes p2
};

// Counts over the first `most_tokens` training tokens (shards apart), measured over the first `windows` validation
// windows (0: all): the same targets as an evaluation of those windows.
NgramBaseline ngram_baseline(const TokenDataset& train, const TokenDataset& valid, int vocab_size,
                             std::int64_t windows = 0, std::int64_t most_tokens = std::int64_t{1} << 25);

}  // namespace qe
