#include "app/bench/gemm_tune.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>

#include "core/error.h"
#include "core/fp8/codec.h"
#include "core/random.h"

namespace qe {
namespace {

// More than twice the last-level cache of any card so far; an H200 has 50 MiB.
constexpr std::size_t kUncached = std::size_t{256} << 20;
constexpr std::size_t kMostCopies = 2048;  // of small products, which are warm in a step as well
constexpr std::size_t kFewestCalls = 32;   // in a round: a launch counts little beside them
constexpr int kRounds = 9;
constexpr double kWorthChanging = 0.98;
constexpr std::size_t kRandomValues = 65537;  // repeated; a prime, so that rows of a matrix differ

std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }
std::size_t extent(const Tensor& t) { return static_cast<std::size_t>(t.shape.rows * t.row_pitch) * size_of(t.dtype); }

// The residual is last: forms of a product with and without one have the same places for the others.
std::vector<Tensor*> matrices(GemmArgs& g) {
  std::vector<Tensor*> all{&g.a, &g.b, &g.bias, &g.d, &g.residual};
  std::erase_if(all, [](const Tensor* t) { return t->empty(); });
  return all;
}
std::size_t extent(GemmArgs g) {
  std::size_t bytes = 0;
  for (const Tensor* t : matrices(g)) bytes += aligned(extent(*t));
  return bytes;
}

// Uniform in [-1, 1): zeros would time faster than real data.
std::vector<unsigned char> random_values(DType type) {
  std::vector<unsigned char> bytes(kRandomValues * size_of(type));
  for (std::size_t i = 0; i < kRandomValues; ++i) {
    const float value = static_cast<float>(philox(1, 0, i).w[0] >> 8) * 0x1p-23f - 1.0f;
    unsigned char* to = &bytes[i * size_of(type)];
    if (type == DType::kF32) {
      std::memcpy(to, &value, sizeof value);
    } else if (type == DType::kBF16) {
      const Bf16 rounded = to_bf16(value);
      std::memcpy(to, &rounded, sizeof rounded);
    } else {
      *to = encode_fp8(type, value);
    }
  }
  return bytes;
}

// Copies of a product's matrices, one after another, all with the same values; every scale_inv is 1.
class Copies {
 public:
  // `forms` of one product.
  Copies(Device& device, Stream& stream, const std::vector<GemmArgs>& forms) : forms_(forms) {
    const auto larger = [](const GemmArgs& x, const GemmArgs& y) { return extent(x) < extent(y); };
    const GemmArgs& largest = *std::max_element(forms.begin(), forms.end(), larger);
    one_ = extent(largest);
    count_ = std::min(kUncached / one_ + 1, kMostCopies);
    memory_ = device.allocate(count_ * one_, MemoryKind::kWorkspace);
    fill(device, stream, largest);
    const std::vector<float> ones(std::max(extent(largest.a_scale_inv), extent(largest.b_scale_inv)) / sizeof(float),
                                  1);
    ones_ = device.allocate(ones.size() * sizeof(float), MemoryKind::kWorkspace);
    device.upload(stream, ones_.data(), ones.data(), ones_.bytes());
    device.synchronize(stream);
  }

  [[nodiscard]] std::size_t count() const { return count_; }

  // The i-th call: forms and copies take turns.
  [[nodiscard]] GemmArgs call(std::size_t i) const {
    GemmArgs g = forms_[i % forms_.size()];
    auto* place = memory_.as<unsigned char>() + i % count_ * one_;
    for (Tensor* t : matrices(g)) {
      t->data = place;
      place += aligned(extent(*t));
    }
    if (!g.a_scale_inv.empty()) g.a_scale_inv.data = g.b_scale_inv.data = ones_.data();
    return g;
  }

 private:
  void fill(Device& device, Stream& stream, GemmArgs g) {
    std::vector<unsigned char> host(one_);
    std::size_t place = 0;
    for (const Tensor* t : matrices(g)) {
      const std::vector<unsigned char> values = random_values(t->dtype);
      for (std::size_t done = 0; done < extent(*t); done += values.size()) {
        std::memcpy(&host[place + done], values.data(), std::min(values.size(), extent(*t) - done));
      }
      place += aligned(extent(*t));
    }
    auto* to = memory_.as<unsigned char>();
    device.upload(stream, to, host.data(), host.size());
    for (std::size_t done = one_; done < memory_.bytes(); done *= 2) {
      device.copy(stream, to + done, to, std::min(done, memory_.bytes() - done));
    }
    device.synchronize(stream);
  }

  const std::vector<GemmArgs>& forms_;
  std::size_t one_ = 0, count_ = 0;  // bytes of a copy, and how many there are
  Buffer memory_, ones_;
};

class Tuner {
 public:
  Tuner(Device& device, Ops& ops, GemmChooser& chooser)
      : device_(device),
        ops_(ops),
        chooser_(chooser),
        stream_(device.make_stream("tune")),
        start_(device.make_timed_event()),
        end_(device.make_timed_event()) {}
  ~Tuner() { chooser_.use_gemms({}, ""); }
  Tuner(const Tuner&) = delete;
  Tuner& operator=(const Tuner&) = delete;

  GemmTableEntry tune(const std::string& product, const std::vector<GemmArgs>& forms) {
    const Copies copies(device_, *stream_, forms);
    const std::vector<Proposal> proposals = record(product, chooser_.gemm_candidates(forms.front()), copies);
    const std::vector<double> us = time(proposals, copies);
    const std::size_t best =
        pick_algorithm(us, [&](std::size_t i) { return repeats(product, proposals[i].algorithm, copies); });
    return {product, proposals[best].algorithm, us[best], us[0]};
  }

 private:
  struct Proposal {
    std::string algorithm;
    std::unique_ptr<Graph> graph;  // of one round
  };

  void use(const std::string& product, const std::string& algorithm) {
    const GemmChoice choice{product, algorithm};
    chooser_.use_gemms({&choice, 1}, "A proposal of the library itself");
  }

  static std::size_t calls(const Copies& copies) {
    return (kFewestCalls + copies.count() - 1) / copies.count() * copies.count();
  }

  // Without those that the library proposes and then refuses; the first may not be one of them.
  std::vector<Proposal> record(const std::string& product, const std::vector<std::string>& algorithms,
                               const Copies& copies) {
    std::vector<Proposal> proposals;
    for (const std::string& algorithm : algorithms) {
      use(product, algorithm);
      try {
        ops_.gemm(*stream_, copies.call(0));
      } catch (const DeviceError&) {
        if (proposals.empty()) throw;
        continue;
      }
      proposals.push_back({algorithm, device_.capture(*stream_, [&] {
                             for (std::size_t i = 0; i < calls(copies); ++i) ops_.gemm(*stream_, copies.call(i));
                           })});
    }
    return proposals;
  }

  // Microseconds of one call of each.
  std::vector<double> time(const std::vector<Proposal>& proposals, const Copies& copies) {
    std::vector<std::vector<double>> rounds(proposals.size());
    for (int round = -1; round < kRounds; ++round) {  // one warms up
      for (std::size_t i = 0; i < proposals.size(); ++i) {
        device_.record(*start_, *stream_);
        device_.launch(*proposals[i].graph, *stream_);
        device_.record(*end_, *stream_);
        device_.synchronize(*stream_);
        const double us = device_.elapsed_ms(*start_, *end_) * 1e3 / static_cast<double>(calls(copies));
        if (round >= 0) rounds[i].push_back(us);
      }
    }
    std::vector<double> medians;
    for (std::vector<double>& all : rounds) {
      std::nth_element(all.begin(), all.begin() + kRounds / 2, all.end());
      medians.push_back(std::round(all[kRounds / 2] * 1e3) / 1e3);  // nanoseconds
    }
    return medians;
  }

  bool repeats(const std::string& product, const std::string& algorithm, const Copies& copies) {
    use(product, algorithm);
    const GemmArgs g = copies.call(0);
    std::vector<unsigned char> first(extent(g.d)), second(first);
    for (std::vector<unsigned char>* result : {&first, &second}) {
      device_.zero(*stream_, g.d.data, first.size());
      ops_.gemm(*stream_, g);
      device_.download(*stream_, result->data(), g.d.data, first.size());
      device_.synchronize(*stream_);
    }
    return first == second;
  }

  Device& device_;
  Ops& ops_;
  GemmChooser& chooser_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> start_, end_;
};

}  // namespace

std::size_t pick_algorithm(const std::vector<double>& us, const std::function<bool(std::size_t)>& repeats) {
  std::vector<std::size_t> fastest(us.size());
  std::iota(fastest.begin(), fastest.end(), std::size_t{0});
  std::stable_sort(fastest.begin(), fastest.end(), [&](std::size_t x, std::size_t y) { return us[x] < us[y]; });
  for (const std::size_t i : fastest) {
    if (us[i] > kWorthChanging * us[0]) break;
    if (repeats(i)) return i;
  }
  return 0;
}

void tune_gemms(Device& device, Ops& ops, GemmChooser& chooser, std::span<const GemmArgs> products,
                const std::function<void(const GemmTableEntry&)>& tell) {
  std::map<std::string, std::vector<GemmArgs>> forms;
  for (const GemmArgs& g : products) {
    std::vector<GemmArgs>& known = forms[chooser.gemm_product(g)];
    const bool is_new = std::none_of(known.begin(), known.end(), [&](const GemmArgs& k) {
      return k.accumulate == g.accumulate && k.residual.empty() == g.residual.empty();
    });
    if (is_new) known.push_back(g);
  }
  Tuner tuner(device, ops, chooser);
  for (const auto& [product, all] : forms) tell(tuner.tune(product, all));
}

}  // namespace qe
