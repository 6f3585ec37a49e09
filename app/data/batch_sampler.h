// Which windows a step trains on, and how windows become the token and target rows of a step. Owns the data position.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "app/data/token_dataset.h"

namespace qe {

// The window at place `index` of the shuffled epoch: for each (seed, epoch) a permutation of [0, windows), computed
// without a table, so that a position is two integers and resuming needs nothing else.
std::int64_t shuffled_window(std::uint64_t seed, std::int64_t epoch, std::int64_t index, std::int64_t windows);

struct DataPosition {
  std::int64_t epoch = 0;
  std::int64_t index = 0;  // windows of the epoch already used
  bool operator==(const DataPosition&) const = default;
};

class BatchSampler {
 public:
  // `windows` of the data set; `batch` windows a step (training.global_batch_size).
  BatchSampler(std::int64_t windows, int batch, std::uint64_t seed);

  // The next step's window ids in sample order; moves on. An epoch's last windows and the next epoch's first share a
  // step.
  std::vector<std::int64_t> next();
  [[nodiscard]] DataPosition position() const noexcept { return position_; }
  void seek(DataPosition position);  // index in [0, windows)

 private:
  std::int64_t windows_;
  int batch_;
  std::uint64_t seed_;
  DataPosition position_;
};

// Row r of tokens and targets ([rows, L]) is window ids[r]; sample r of a step is sequence r mod micro_batch_size of
// microbatch r / micro_batch_size, so the rows of a whole step are [M, T].
void fill_rows(const TokenDataset& data, std::span<const std::int64_t> ids, std::span<std::int32_t> tokens,
               std::span<std::int32_t> targets);

// One pass over a data set in order, in microbatches. The last is filled up with rows of token 0 whose targets are -1.
class Evaluation {
 public:
  // `limit` microbatches at most; 0: all.
  Evaluation(const TokenDataset& data, int micro_batch_size, std::int64_t limit);

  [[nodiscard]] std::int64_t microbatches() const noexcept { return microbatches_; }
  [[nodiscard]] std::int64_t target_tokens() const noexcept;  // of the whole pass: what its summed loss is divided by
  // tokens and targets are [micro_batch_size, L].
  void fill(std::int64_t microbatch, std::span<std::int32_t> tokens, std::span<std::int32_t> targets) const;

 private:
  const TokenDataset& data_;
  int micro_batch_size_;
  std::int64_t microbatches_;
};

}  // namespace qe
