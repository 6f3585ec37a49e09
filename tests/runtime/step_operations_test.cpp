// What a step asks of the device from the host, and in what order: each operation before the first F, and each that the
// host waits for between the last W and the norm, is time in which a card stands still.
#include <algorithm>
#include <iterator>
#include <map>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/thread_transport.h"
#include "tests/catch.h"
#include "tests/runtime/training_run.h"

namespace qe::testing {
namespace {

// Notes what passes through it, but not what a replay does. Memory and streams are those of the device behind it.
class WatchedDevice final : public Device {
 public:
  explicit WatchedDevice(Device& device) : device_(device) {}

  std::vector<std::string> calls;  // "upload caller", "launch graph", "synchronize graph"

  [[nodiscard]] std::string description() const override { return device_.description(); }
  std::unique_ptr<Stream> make_stream(const std::string& name) override {
    auto stream = device_.make_stream(name);
    names_[stream.get()] = name;
    return stream;
  }
  std::unique_ptr<Event> make_event() override { return device_.make_event(); }
  std::unique_ptr<Event> make_timed_event() override { return device_.make_timed_event(); }
  Buffer allocate(std::size_t bytes, MemoryKind kind) override { return device_.allocate(bytes, kind); }
  [[nodiscard]] std::array<std::size_t, kMemoryKinds> memory_by_kind() const override {
    return device_.memory_by_kind();
  }
  [[nodiscard]] std::size_t memory_peak() const override { return device_.memory_peak(); }
  [[nodiscard]] MemoryPool memory_pool() const override { return device_.memory_pool(); }
  HostMemory allocate_host(std::size_t bytes) override { return device_.allocate_host(bytes); }
  void copy(Stream& s, void* to, const void* from, std::size_t bytes) override {
    note("copy", s);
    device_.copy(s, to, from, bytes);
  }
  void zero(Stream& s, void* data, std::size_t bytes) override {
    note("zero", s);
    device_.zero(s, data, bytes);
  }
  void upload(Stream& s, void* to, const void* from, std::size_t bytes) override {
    note("upload", s);
    device_.upload(s, to, from, bytes);
  }
  void download(Stream& s, void* to, const void* from, std::size_t bytes) override {
    note("download", s);
    device_.download(s, to, from, bytes);
  }
  void host_call(Stream& s, std::function<void()> call) override { device_.host_call(s, std::move(call)); }
  void record(Event& e, Stream& s) override { device_.record(e, s); }
  void wait(Stream& s, const Event& e) override { device_.wait(s, e); }
  double elapsed_ms(const Event& from, const Event& to) override { return device_.elapsed_ms(from, to); }
  void synchronize(Stream& s) override {
    note("synchronize", s);
    device_.synchronize(s);
  }
  void synchronize() override {
    calls.emplace_back("synchronize all");
    device_.synchronize();
  }
  std::unique_ptr<Graph> capture(Stream& s, const std::function<void()>& body) override {
    return device_.capture(s, body);
  }
  void launch(Graph& g, Stream& s) override {
    note("launch", s);
    device_.launch(g, s);
  }

 private:
  void note(const char* what, const Stream& s) { calls.push_back(std::string(what) + " " + names_.at(&s)); }
  void deallocate(void*, std::size_t, MemoryKind) noexcept override {}  // buffers are the device's behind it

  Device& device_;
  std::map<const Stream*, std::string> names_;
};

// The first rank's calls in the second step, in which nothing is made for the first time. Two stages a rank.
std::vector<std::string> calls_of_step(int ranks, Overrides overrides) {
  overrides.insert(overrides.end(),
                   {"execution.mode=graph", "pipeline.schedule=interleaved_1f1b",
                    "pipeline.pipeline_model_parallel_size=" + std::to_string(ranks),
                    "pipeline.virtual_pipeline_model_parallel_size=2", "training.global_batch_size=4"});
  const Config config = test_config(overrides);
  ThreadWorld world(ranks, 1);
  std::vector<std::string> calls;
  run_ranks(world, [&](int r) {
    CpuDevice device;
    WatchedDevice watched(device);
    CpuOps ops(device);
    const std::unique_ptr<Transport> transport = world.connect(r, device);
    PipelineRank rank(watched, ops, *transport, make_rank_config(config), make_rank_plan(config), nullptr);
    for (const std::uint32_t step : {1u, 2u}) {
      watched.calls.clear();
      const Batch batch = synthetic_batch(config, step);
      rank.train_step(batch.tokens, batch.targets, 1e-3, step);
    }
    if (r == 0) calls = watched.calls;
  });
  return calls;
}

std::ptrdiff_t count(const std::vector<std::string>& calls, const std::string& what) {
  return std::count_if(calls.begin(), calls.end(), [&](const std::string& c) { return c.starts_with(what); });
}
std::ptrdiff_t first(const std::vector<std::string>& calls, const std::string& what) {
  return std::find(calls.begin(), calls.end(), what) - calls.begin();
}

}  // namespace

TEST_CASE("a step begins with one upload, one memset and one copy a stage") {
  const std::vector<std::string> calls = calls_of_step(1, {"gradients.placement=arena"});
  const std::vector<std::string> start(calls.begin(), calls.begin() + first(calls, "launch graph"));
  CHECK(start == std::vector<std::string>{"upload caller", "zero caller", "copy caller", "copy caller"});
}

TEST_CASE("an F needs an upload only where microbatches share slots") {
  // The batch, then the update's scalars.
  CHECK(count(calls_of_step(1, {"gradients.placement=arena"}), "upload") == 2);
  CHECK(count(calls_of_step(1, {"gradients.placement=accumulate", "pipeline.tape_slots=peak"}), "upload") == 2 + 2 * 4);
}

TEST_CASE("the host waits twice a step, and the norm is enqueued before the first time") {
  const std::vector<std::string> calls = calls_of_step(1, {"gradients.placement=arena"});
  CHECK(count(calls, "synchronize") == 2);
  CHECK(count(calls, "download") == 3);  // counters; the update's scalars and the losses
  const std::vector<std::string> rest(calls.begin() + first(calls, "download graph"), calls.end());
  CHECK(rest == std::vector<std::string>{"download graph", "upload caller", "synchronize graph", "download caller",
                                         "download caller", "synchronize caller"});
}

TEST_CASE("a step is finalized when the host has waited for its messages, those that it sent too") {
  const std::vector<std::string> calls = calls_of_step(2, {"gradients.placement=arena"});
  std::vector<std::string> waits;
  std::copy_if(calls.begin(), calls.end(), std::back_inserter(waits),
               [](const std::string& c) { return c.starts_with("synchronize"); });
  CHECK(waits == std::vector<std::string>{"synchronize graph", "synchronize to rank 1", "synchronize from rank 1",
                                          "synchronize caller"});
}

}  // namespace qe::testing
