#include "app/data/ngram.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <vector>

namespace qe {
namespace {

constexpr double kPriorWeight = 1;
constexpr std::int64_t kChunk = 1 << 16;

class Counts {
 public:
  explicit Counts(int vocab_size)
      : vocab_(static_cast<std::uint64_t>(vocab_size)), one_(vocab_, 0), after_one_(vocab_, 0) {}

  void add_file(const TokenFile& file, std::int64_t count) {
    std::uint64_t a = 0, b = 0;
    std::vector<std::int32_t> chunk;
    for (std::int64_t first = 0; first < count; first += kChunk) {
      chunk.resize(static_cast<std::size_t>(std::min(kChunk, count - first)));
      file.read(first, chunk);
      for (std::size_t i = 0; i < chunk.size(); ++i) {
        const auto c = static_cast<std::uint64_t>(chunk[i]);
        add(a, b, c, std::min<std::int64_t>(2, first + static_cast<std::int64_t>(i)));
        a = b;
        b = c;
      }
    }
  }

  [[nodiscard]] double p1(std::uint64_t c) const {
    return (static_cast<double>(one_[c]) + 1) / static_cast<double>(total_ + vocab_);
  }
  [[nodiscard]] double p2(std::uint64_t b, std::uint64_t c) const {
    return (find(two_, b * vocab_ + c) + kPriorWeight * p1(c)) / (static_cast<double>(after_one_[b]) + kPriorWeight);
  }
  [[nodiscard]] double p3(std::uint64_t a, std::uint64_t b, std::uint64_t c) const {
    const std::uint64_t ab = a * vocab_ + b;
    return (find(three_, ab * vocab_ + c) + kPriorWeight * p2(b, c)) / (find(after_two_, ab) + kPriorWeight);
  }

 private:
  using Table = std::unordered_map<std::uint64_t, std::uint32_t>;

  void add(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::int64_t context) {
    ++one_[c];
    ++total_;
    if (context >= 1) ++after_one_[b], ++two_[b * vocab_ + c];
    if (context >= 2) ++after_two_[a * vocab_ + b], ++three_[(a * vocab_ + b) * vocab_ + c];
  }
  static double find(const Table& table, std::uint64_t key) {
    const auto it = table.find(key);
    return it == table.end() ? 0 : it->second;
  }

  std::uint64_t vocab_;
  std::uint64_t total_ = 0;
  std::vector<std::uint64_t> one_, after_one_;  // [V]: n(c), n(b·)
  Table two_, after_two_, three_;               // n(bc), n(ab·), n(abc); V <= 2^21 keeps three ids in 64 bits
};

}  // namespace

NgramBaseline ngram_baseline(const TokenDataset& train, const TokenDataset& valid, int vocab_size, std::int64_t windows,
                             std::int64_t most_tokens) {
  Counts counts(vocab_size);
  for (const TokenFile& file : train.files()) {
    const std::int64_t take = std::min(file.size(), most_tokens);
    counts.add_file(file, take);
    most_tokens -= take;
  }
  const std::int64_t used = windows == 0 ? valid.windows() : std::min(windows, valid.windows());
  NgramBaseline sum;
  std::vector<std::int32_t> window(static_cast<std::size_t>(valid.seq_length()) + 1);
  const auto id = [&window](std::size_t i) { return static_cast<std::uint64_t>(window[i]); };
  for (std::int64_t w = 0; w < used; ++w) {
    valid.read_window(w, window);
    for (std::size_t i = 1; i < window.size(); ++i) {
      const double two = counts.p2(id(i - 1), id(i));
      sum.bigram -= std::log(two);
      sum.trigram -= std::log(i == 1 ? two : counts.p3(id(i - 2), id(i - 1), id(i)));
    }
  }
  const double targets = static_cast<double>(used) * valid.seq_length();
  return {sum.bigram / targets, sum.trigram / targets};
}

}  // namespace qe
