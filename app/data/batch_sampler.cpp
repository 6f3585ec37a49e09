#include "app/data/batch_sampler.h"

#include <algorithm>
#include <bit>

#include "core/error.h"
#include "core/random.h"

namespace qe {
namespace {

constexpr int kFeistelRounds = 6;

// A permutation of [0, 2^(2·half_bits)): a Feistel network whose round function is Philox.
std::uint64_t permute(std::uint64_t key, std::uint64_t epoch, std::uint64_t value, int half_bits) {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits) - 1;
  std::uint64_t left = value >> half_bits, right = value & mask;
  for (int round = 0; round < kFeistelRounds; ++round) {
    const auto bits = philox(key, (epoch << 3) | static_cast<std::uint64_t>(round), right);
    const std::uint64_t next = left ^ (((std::uint64_t{bits.w[0]} << 32) | bits.w[1]) & mask);
    left = right;
    right = next;
  }
  return (left << half_bits) | right;
}

}  // namespace

std::int64_t shuffled_window(std::uint64_t seed, std::int64_t epoch, std::int64_t index, std::int64_t windows) {
  QE_EXPECTS(index >= 0 && index < windows, "an index is below the number of windows");
  const auto n = static_cast<std::uint64_t>(windows);
  const int half_bits = std::max(1, (static_cast<int>(std::bit_width(n - 1)) + 1) / 2);
  const std::uint64_t key = random_key(seed, "data order");
  // Walking the cycle until it is back below n keeps a permutation of [0, n); the domain is less than four times n.
  auto value = static_cast<std::uint64_t>(index);
  do {
    value = permute(key, static_cast<std::uint64_t>(epoch), value, half_bits);
  } while (value >= n);
  return static_cast<std::int64_t>(value);
}

BatchSampler::BatchSampler(std::int64_t windows, int batch, std::uint64_t seed)
    : windows_(windows), batch_(batch), seed_(seed) {
  QE_EXPECTS(windows > 0 && batch > 0, "there is something to sample");
}

std::vector<std::int64_t> BatchSampler::next() {
  std::vector<std::int64_t> ids;
  ids.reserve(static_cast<std::size_t>(batch_));
  for (int i = 0; i < batch_; ++i) {
    ids.push_back(shuffled_window(seed_, position_.epoch, position_.index, windows_));
    if (++position_.index == windows_) position_ = {position_.epoch + 1, 0};
  }
  return ids;
}

void BatchSampler::seek(DataPosition position) {
  QE_EXPECTS(position.epoch >= 0 && position.index >= 0 && position.index < windows_, "a position is inside its epoch");
  position_ = position;
}

void fill_rows(const TokenDataset& data, std::span<const std::int64_t> ids, std::span<std::int32_t> tokens,
               std::span<std::int32_t> targets) {
  const auto length = static_cast<std::size_t>(data.seq_length());
  QE_EXPECTS(tokens.size() == ids.size() * length && targets.size() == tokens.size(), "rows are [ids, L]");
  std::vector<std::int32_t> window(length + 1);
  for (std::size_t r = 0; r < ids.size(); ++r) {
    data.read_window(ids[r], window);
    std::copy(window.begin(), window.end() - 1, tokens.begin() + static_cast<std::ptrdiff_t>(r * length));
    std::copy(window.begin() + 1, window.end(), targets.begin() + static_cast<std::ptrdiff_t>(r * length));
  }
}

Evaluation::Evaluation(const TokenDataset& data, int micro_batch_size, std::int64_t limit)
    : data_(data),
      micro_batch_size_(micro_batch_size),
      microbatches_((data.windows() + micro_batch_size - 1) / micro_batch_size) {
  if (limit > 0) microbatches_ = std::min(microbatches_, limit);
}

std::int64_t Evaluation::target_tokens() const noexcept {
  return std::min(data_.windows(), microbatches_ * micro_batch_size_) * data_.seq_length();
}

void Evaluation::fill(std::int64_t microbatch, std::span<std::int32_t> tokens, std::span<std::int32_t> targets) const {
  QE_EXPECTS(microbatch >= 0 && microbatch < microbatches_, "a microbatch of the evaluation");
  std::vector<std::int64_t> ids;
  for (int r = 0; r < micro_batch_size_; ++r) {
    const std::int64_t id = microbatch * micro_batch_size_ + r;
    if (id < data_.windows()) ids.push_back(id);
  }
  const std::size_t filled = ids.size() * static_cast<std::size_t>(data_.seq_length());
  fill_rows(data_, ids, tokens.first(filled), targets.first(filled));
  std::fill(tokens.begin() + static_cast<std::ptrdiff_t>(filled), tokens.end(), 0);
  std::fill(targets.begin() + static_cast<std::ptrdiff_t>(filled), targets.end(), -1);
}

}  // namespace qe
