// Completion, device half: both edges around every call, checked on a device that only remembers them.
#include "core/qeffect/handoff.h"

#include <string>
#include <vector>

#include "tests/catch.h"

using namespace qe;

namespace {

struct NamedStream final : Stream {
  explicit NamedStream(std::string n) : name(std::move(n)) {}
  std::string name;
};
struct NumberedEvent final : Event {
  explicit NumberedEvent(int n) : number(n) {}
  int number;
};

class EdgeRecorder final : public Device {
 public:
  std::vector<std::string> edges;

  [[nodiscard]] std::string description() const override { return "edge recorder"; }
  std::unique_ptr<Stream> make_stream(const std::string& name) override { return std::make_unique<NamedStream>(name); }
  std::unique_ptr<Event> make_event() override { return std::make_unique<NumberedEvent>(events_++); }
  void record(Event& e, Stream& s) override { note("record", e, s); }
  void wait(Stream& s, const Event& e) override { note("wait", e, s); }

  // A hand-off uses nothing else of a device.
  std::unique_ptr<Event> make_timed_event() override { unexpected(); }
  double elapsed_ms(const Event&, const Event&) override { unexpected(); }
  Buffer allocate(std::size_t, MemoryKind) override { unexpected(); }
  [[nodiscard]] std::array<std::size_t, kMemoryKinds> memory_by_kind() const override { return {}; }
  [[nodiscard]] std::size_t memory_peak() const override { return 0; }
  [[nodiscard]] MemoryPool memory_pool() const override { return {}; }
  HostMemory allocate_host(std::size_t) override { unexpected(); }
  void copy(Stream&, void*, const void*, std::size_t) override { unexpected(); }
  void zero(Stream&, void*, std::size_t) override { unexpected(); }
  void upload(Stream&, void*, const void*, std::size_t) override { unexpected(); }
  void download(Stream&, void*, const void*, std::size_t) override { unexpected(); }
  void host_call(Stream&, std::function<void()>) override { unexpected(); }
  void synchronize(Stream&) override { unexpected(); }
  void synchronize() override { unexpected(); }
  std::unique_ptr<Graph> capture(Stream&, const std::function<void()>&) override { unexpected(); }
  void launch(Graph&, Stream&) override { unexpected(); }

 private:
  [[noreturn]] static void unexpected() { throw std::logic_error("a hand-off records and waits, nothing else"); }
  void note(const char* what, const Event& e, const Stream& s) {
    edges.push_back(std::string(what) + " event " + std::to_string(static_cast<const NumberedEvent&>(e).number) +
                    " on " + static_cast<const NamedStream&>(s).name);
  }
  void deallocate(void*, std::size_t, MemoryKind) noexcept override {}
  int events_ = 0;
};

}  // namespace

TEST_CASE("a hand-off is two-way at every call and is counted") {
  EdgeRecorder device;
  NamedStream caller("caller");
  NamedStream graph("graph");
  Handoff handoff(device, caller, graph);
  CHECK(handoff.count() == 0);
  for (int call = 1; call <= 3; ++call) {
    device.edges.clear();
    handoff.enter();
    CHECK(device.edges == std::vector<std::string>{"record event 0 on caller", "wait event 0 on graph"});
    device.edges.clear();
    handoff.leave();
    CHECK(device.edges == std::vector<std::string>{"record event 1 on graph", "wait event 1 on caller"});
    CHECK(handoff.count() == static_cast<std::uint64_t>(2 * call));
  }
}
