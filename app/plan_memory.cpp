#include "app/plan_memory.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace qe {
namespace {

class NoStream final : public Stream {};
class NoEvent final : public Event {};
class NoGraph final : public Graph {
 public:
  [[nodiscard]] int nodes() const override { return 0; }
};

// Every address is given once and never read; whatever is enqueued is dropped.
class CountingDevice final : public Device {
 public:
  explicit CountingDevice(bool runs_captures) : runs_captures_(runs_captures) {}

  [[nodiscard]] std::string description() const override { return "a plan"; }
  std::unique_ptr<Stream> make_stream(const std::string&) override { return std::make_unique<NoStream>(); }
  std::unique_ptr<Event> make_event() override { return std::make_unique<NoEvent>(); }
  std::unique_ptr<Event> make_timed_event() override { return make_event(); }

  Buffer allocate(std::size_t bytes, MemoryKind kind) override {
    if (bytes == 0) return Buffer(*this, nullptr, 0, kind);
    void* data = reinterpret_cast<void*>(next_);
    next_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    bytes_[static_cast<std::size_t>(kind)] += bytes;
    peak_ = std::max(peak_, std::accumulate(bytes_.begin(), bytes_.end(), std::size_t{0}));
    return Buffer(*this, data, bytes, kind);
  }
  [[nodiscard]] std::array<std::size_t, kMemoryKinds> memory_by_kind() const override { return bytes_; }
  [[nodiscard]] std::size_t memory_peak() const override { return peak_; }
  [[nodiscard]] MemoryPool memory_pool() const override { return {}; }

  HostMemory allocate_host(std::size_t bytes) override {
    return {new unsigned char[bytes], [](unsigned char* p) noexcept { delete[] p; }};
  }

  void copy(Stream&, void*, const void*, std::size_t) override {}
  void zero(Stream&, void*, std::size_t) override {}
  void upload(Stream&, void*, const void*, std::size_t) override {}
  void download(Stream&, void*, const void*, std::size_t) override {}
  void host_call(Stream&, std::function<void()>) override {}
  void record(Event&, Stream&) override {}
  void wait(Stream&, const Event&) override {}
  double elapsed_ms(const Event&, const Event&) override { return 0.0; }
  void synchronize(Stream&) override {}
  void synchronize() override {}
  std::unique_ptr<Graph> capture(Stream&, const std::function<void()>& body) override {
    if (runs_captures_) body();
    return std::make_unique<NoGraph>();
  }
  void launch(Graph&, Stream&) override {}

 private:
  static constexpr std::size_t kAlignment = 256;
  void deallocate(void*, std::size_t bytes, MemoryKind kind) noexcept override {
    bytes_[static_cast<std::size_t>(kind)] -= bytes;
  }

  const bool runs_captures_;  // else what a graph would hold is not even asked for
  std::uintptr_t next_ = kAlignment;
  std::array<std::size_t, kMemoryKinds> bytes_{};
  std::size_t peak_ = 0;
};

// Arithmetic on addresses that are never read; products are noted if somebody wants to know them.
class NoArithmetic final : public Ops {
 public:
  explicit NoArithmetic(std::vector<GemmArgs>* products) : products_(products) {}

  void embedding_forward(Stream&, const EmbeddingForwardArgs&) override {}
  void embedding_backward(Stream&, const EmbeddingBackwardArgs&) override {}
  void layernorm_quantize(Stream&, const LayerNormArgs&) override {}
  void layernorm_backward_residual(Stream&, const LayerNormBackwardArgs&) override {}
  void quantize(Stream&, const QuantizeArgs&) override {}
  void quantize_weight(Stream&, const QuantizeWeightArgs&) override {}
  void dynamic_scale(Stream&, const DynamicScaleArgs&) override {}
  void cast(Stream&, const Tensor&, const Tensor&) override {}
  void gemm(Stream&, const GemmArgs& args) override {
    if (products_ != nullptr) products_->push_back(args);
  }
  void gelu_quantize(Stream&, const GeluArgs&) override {}
  void gelu_backward_quantize_bias(Stream&, const GeluBackwardArgs&) override {}
  void attention_forward(Stream&, const AttentionArgs&) override {}
  void attention_backward(Stream&, const AttentionBackwardArgs&) override {}
  void cross_entropy(Stream&, const CrossEntropyArgs&) override {}
  void update_scales(Stream&, const UpdateScalesArgs&) override {}
  void gradient_norm(Stream&, const GradientNormArgs&) override {}
  void clip_factor(Stream&, const ClipArgs&) override {}
  void adamw(Stream&, const AdamWArgs&) override {}

 private:
  std::vector<GemmArgs>* products_;
};

PipelineRank dry_rank(CountingDevice& device, NoArithmetic& ops, PlaceInJob& place, RankConfig config,
                      const RankPlan& plan) {
  config.initialize = false;
  config.hooks = nullptr;
  return {device, ops, place, config, plan, nullptr};
}

}  // namespace

std::size_t RankFootprint::total() const noexcept {
  return std::accumulate(bytes.begin(), bytes.end(), std::size_t{0});
}

RankFootprint lay_out(const RankConfig& config, const RankPlan& plan, int rank, int replicas) {
  CountingDevice device(false);
  NoArithmetic ops(nullptr);
  PlaceInJob place(rank, plan.schedule.shape.ranks, replicas);
  const PipelineRank built = dry_rank(device, ops, place, config, plan);
  RankFootprint footprint;
  footprint.bytes = device.memory_by_kind();
  footprint.graphs = built.counts().graphs;
  footprint.first_write_graphs = built.counts().first_write_graphs;
  footprint.refresh_graphs = built.counts().refresh_graphs;
  return footprint;
}

std::vector<GemmArgs> matrix_products(const RankConfig& config, const RankPlan& plan, int replicas) {
  RankConfig captured = config;
  captured.captured = true;  // capture calls every unit once
  std::vector<GemmArgs> products;
  for (int rank = 0; rank < plan.schedule.shape.ranks; ++rank) {
    CountingDevice device(true);
    NoArithmetic ops(&products);
    PlaceInJob place(rank, plan.schedule.shape.ranks, replicas);
    (void)dry_rank(device, ops, place, captured, plan);
  }
  return products;
}

int PlaceInJob::rank(Group group) const { return group == Group::kData ? 0 : rank_; }
int PlaceInJob::size(Group group) const {
  return group == Group::kPipeline ? ranks_ : group == Group::kData ? replicas_ : ranks_ * replicas_;
}
void PlaceInJob::send(Stream&, const void*, std::size_t, int, const Action&) {
  QE_EXPECTS(false, "a rank by itself sends nothing");
}
void PlaceInJob::recv(Stream&, void*, std::size_t, int, const Action&) {
  QE_EXPECTS(false, "a rank by itself receives nothing");
}
void PlaceInJob::all_reduce_sum(Stream&, float*, std::int64_t, Group group) {
  QE_EXPECTS(size(group) == 1, "a rank by itself reduces over nobody else");
}
void PlaceInJob::all_reduce_max(Stream&, float*, std::int64_t, Group group) {
  QE_EXPECTS(size(group) == 1, "a rank by itself reduces over nobody else");
}
void PlaceInJob::all_gather(Stream&, const void*, void*, std::size_t, Group) {
  QE_EXPECTS(false, "a rank by itself gathers from nobody");
}
void PlaceInJob::barrier(Group) {}
std::vector<std::string> PlaceInJob::exchange(const std::string& mine, Group) { return {mine}; }

}  // namespace qe
