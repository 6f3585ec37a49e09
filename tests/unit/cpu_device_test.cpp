// What the lazy device promises: what runs when, what a missing edge does, what a graph keeps.
#include <cstdint>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "core/error.h"
#include "kernels/backend.h"
#include "kernels/cpu/device.h"
#include "tests/catch.h"

using qe::Buffer;
using qe::CpuDevice;
using qe::DrainPolicy;
using qe::MemoryKind;

namespace {

constexpr std::uint64_t kSeeds = 20;

struct TwoStreams {
  explicit TwoStreams(DrainPolicy policy = DrainPolicy::kAdversarial, std::uint64_t seed = 0) : device(policy, seed) {}
  CpuDevice device;
  std::unique_ptr<qe::Stream> a = device.make_stream("a");
  std::unique_ptr<qe::Stream> b = device.make_stream("b");
  std::unique_ptr<qe::Event> event = device.make_event();
};

}  // namespace

TEST_CASE("nothing runs before somebody synchronizes") {
  TwoStreams t;
  int runs = 0;
  t.device.enqueue(*t.a, [&] { ++runs; });
  t.device.host_call(*t.b, [&] { ++runs; });
  CHECK(runs == 0);
  t.device.synchronize();
  CHECK(runs == 2);
}

TEST_CASE("the immediate policy runs work on an idle stream inside its call") {
  TwoStreams t(DrainPolicy::kImmediate);
  int runs = 0;
  t.device.enqueue(*t.a, [&] { ++runs; });
  CHECK(runs == 1);
  t.device.record(*t.event, *t.a);
  t.device.wait(*t.b, *t.event);
  t.device.enqueue(*t.b, [&] { ++runs; });
  CHECK(runs == 2);
}

TEST_CASE("a wait edge forces what stands before the record and nothing more") {
  TwoStreams t;
  std::vector<int> order;
  t.device.enqueue(*t.a, [&] { order.push_back(1); });
  t.device.record(*t.event, *t.a);
  t.device.enqueue(*t.a, [&] { order.push_back(2); });
  t.device.wait(*t.b, *t.event);
  t.device.enqueue(*t.b, [&] { order.push_back(3); });
  t.device.synchronize(*t.b);
  CHECK(order == std::vector<int>{1, 3});
  t.device.synchronize();
  CHECK(order == std::vector<int>{1, 3, 2});
}

TEST_CASE("without the edge the read is stale every time, with it never") {
  const bool edge = GENERATE(false, true);
  TwoStreams t;
  int value = 0;
  int stale = 0;
  for (int i = 1; i <= 100; ++i) {
    int seen = -1;
    t.device.enqueue(*t.a, [&value, i] { value = i; });
    t.device.record(*t.event, *t.a);
    if (edge) t.device.wait(*t.b, *t.event);
    t.device.enqueue(*t.b, [&] { seen = value; });
    t.device.synchronize(*t.b);
    stale += seen != i;
    t.device.synchronize();
  }
  CHECK(stale == (edge ? 0 : 100));
}

TEST_CASE("edges hold under every seed, and a seed lets streams run ahead") {
  bool ahead = false;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    TwoStreams t(DrainPolicy::kAdversarial, seed);
    std::vector<int> trace;  // even from a, odd from b
    std::vector<std::unique_ptr<qe::Event>> events;
    for (int i = 0; i < 16; ++i) {
      auto& producer = i % 2 == 0 ? *t.a : *t.b;
      auto& consumer = i % 2 == 0 ? *t.b : *t.a;
      t.device.enqueue(producer, [&trace, i] { trace.push_back(i); });
      events.push_back(t.device.make_event());
      t.device.record(*events.back(), producer);
      t.device.wait(consumer, *events.back());
    }
    const auto free = t.device.make_stream("free");
    int free_runs = 0;
    t.device.enqueue(*free, [&] { ++free_runs; });
    t.device.synchronize(*t.a);
    ahead = ahead || free_runs != 0;
    std::vector<int> expected(16);
    std::iota(expected.begin(), expected.end(), 0);
    CHECK(trace == expected);
  }
  CHECK(ahead);
}

TEST_CASE("a wait takes the record of its own time when the event is recorded again") {
  TwoStreams t;
  std::vector<int> order;
  t.device.wait(*t.b, *t.event);  // never recorded: done
  t.device.enqueue(*t.b, [&] { order.push_back(0); });
  t.device.enqueue(*t.a, [&] { order.push_back(1); });
  t.device.record(*t.event, *t.a);
  t.device.wait(*t.b, *t.event);
  t.device.enqueue(*t.a, [&] { order.push_back(2); });
  t.device.record(*t.event, *t.a);
  t.device.enqueue(*t.b, [&] { order.push_back(3); });
  t.device.synchronize(*t.b);
  CHECK(order == std::vector<int>{0, 1, 3});
  t.device.wait(*t.b, *t.event);
  t.device.synchronize(*t.b);
  CHECK(order == std::vector<int>{0, 1, 3, 2});
}

TEST_CASE("a stream that goes away drops its work and does not block who waits for it") {
  TwoStreams t;
  int runs = 0;
  t.device.enqueue(*t.a, [&] { runs += 100; });
  t.device.record(*t.event, *t.a);
  t.device.wait(*t.b, *t.event);
  t.device.enqueue(*t.b, [&] { ++runs; });
  t.a.reset();
  t.device.synchronize();
  CHECK(runs == 1);
}

TEST_CASE("a graph replays over the memory of the moment and keeps its scalars") {
  const auto policy = GENERATE(DrainPolicy::kImmediate, DrainPolicy::kAdversarial);
  TwoStreams t(policy);
  float in = 1, out = 0;
  float factor = 2;
  const auto graph = t.device.capture(*t.a, [&] {
    t.device.enqueue(*t.a, [&in, &out, factor] { out = in * factor; });
    t.device.enqueue(*t.a, [&out] { out += 1; });
  });
  CHECK(graph->nodes() == 2);
  t.device.synchronize();
  CHECK(out == 0);  // captured, not run
  factor = 100;
  in = 5;
  t.device.launch(*graph, *t.a);
  t.device.synchronize();
  CHECK(out == 11);
  in = 7;
  t.device.launch(*graph, *t.b);
  t.device.synchronize();
  CHECK(out == 15);
}

TEST_CASE("copy, zero and download are captured") {
  TwoStreams t;
  Buffer from = t.device.allocate(8, MemoryKind::kStep);
  Buffer to = t.device.allocate(8, MemoryKind::kStep);
  std::uint64_t host = 1;
  const auto graph = t.device.capture(*t.a, [&] {
    t.device.copy(*t.a, to.data(), from.data(), 8);
    t.device.zero(*t.a, from.data(), 8);
    t.device.download(*t.a, &host, to.data(), 8);
  });
  *from.as<std::uint64_t>() = 42;
  t.device.launch(*graph, *t.a);
  t.device.synchronize();
  CHECK(host == 42);
  CHECK(*from.as<std::uint64_t>() == 0);
}

TEST_CASE("a capture refuses what a graph cannot hold and leaves capture mode") {
  TwoStreams t;
  int runs = 0;
  const auto other = [&](const std::function<void()>& body) {
    CHECK_THROWS_AS(t.device.capture(*t.a, body), std::logic_error);
    t.device.enqueue(*t.a, [&] { ++runs; });
    t.device.synchronize();
  };
  other([&] { t.device.enqueue(*t.b, [] {}); });
  other([&] { (void)t.device.allocate(16, MemoryKind::kTape); });
  other([&] { t.device.record(*t.event, *t.a); });
  other([&] { t.device.wait(*t.a, *t.event); });
  other([&] { t.device.synchronize(); });
  other([&] { t.device.upload(*t.a, &runs, &runs, 0); });
  other([&] { (void)t.device.capture(*t.a, [] {}); });
  CHECK(runs == 7);
  CHECK_THROWS_AS(t.device.capture(*t.a, [] { throw qe::DataError("x"); }), qe::DataError);
  t.device.enqueue(*t.a, [&] { ++runs; });
  t.device.synchronize();
  CHECK(runs == 8);
}

TEST_CASE("an upload reads the host bytes inside its call") {
  TwoStreams t;
  Buffer to = t.device.allocate(4, MemoryKind::kStep);
  int host = 7;
  t.device.upload(*t.a, to.data(), &host, 4);
  host = 8;
  t.device.synchronize();
  CHECK(*to.as<int>() == 7);
}

TEST_CASE("what work throws leaves the call that made it run, and the device goes on") {
  TwoStreams lazy;
  int runs = 0;
  lazy.device.enqueue(*lazy.a, [] { throw qe::DeviceError("broken op"); });
  lazy.device.enqueue(*lazy.a, [&] { ++runs; });
  REQUIRE_THROWS_WITH(lazy.device.synchronize(), ContainsSubstring("broken op"));
  lazy.device.synchronize();
  CHECK(runs == 1);

  TwoStreams now(DrainPolicy::kImmediate);
  CHECK_THROWS_AS(now.device.enqueue(*now.a, [] { throw qe::DeviceError("broken op"); }), qe::DeviceError);
  now.device.enqueue(*now.a, [&] { ++runs; });
  CHECK(runs == 2);
}

TEST_CASE("work on a stream that calls the device is refused") {
  TwoStreams t;
  t.device.host_call(*t.a, [&] { t.device.synchronize(); });
  CHECK_THROWS_AS(t.device.synchronize(), std::logic_error);
}

TEST_CASE("a device that goes away drops what has not run") {
  int runs = 0;
  {
    TwoStreams t;
    t.device.enqueue(*t.a, [&] { ++runs; });
    t.device.record(*t.event, *t.a);
    t.device.wait(*t.b, *t.event);
  }
  CHECK(runs == 0);
}

TEST_CASE("memory is aligned, zeroed and accounted by kind and peak") {
  CpuDevice device;
  {
    Buffer tape = device.allocate(1000, MemoryKind::kTape);
    CHECK(reinterpret_cast<std::uintptr_t>(tape.data()) % 256 == 0);
    const auto* bytes = tape.as<unsigned char>();
    CHECK(std::accumulate(bytes, bytes + 1000, 0) == 0);
    Buffer weights = device.allocate(24, MemoryKind::kWeights);
    CHECK(device.memory_by_kind()[static_cast<std::size_t>(MemoryKind::kTape)] == 1000);
    CHECK(device.memory_by_kind()[static_cast<std::size_t>(MemoryKind::kWeights)] == 24);
    CHECK(device.memory_peak() == 1024);
  }
  CHECK(device.memory_by_kind() == std::array<std::size_t, qe::kMemoryKinds>{});
  CHECK(device.memory_peak() == 1024);
  CHECK(device.allocate(0, MemoryKind::kTape).bytes() == 0);
  REQUIRE_THROWS_WITH(device.allocate(~std::size_t{0}, MemoryKind::kMoments), ContainsSubstring("moments"));
  REQUIRE_THROWS_AS(device.allocate(std::size_t{1} << 60, MemoryKind::kMoments), qe::DeviceError);
}

TEST_CASE("the backend is made by name") {
  CHECK_THAT(qe::make_backend("cpu").device->description(), ContainsSubstring("CPU reference backend"));
  CHECK(qe::make_backend("auto").ops != nullptr);
  REQUIRE_THROWS_WITH(qe::make_backend("cpp"), ContainsSubstring("'cpp'"));
}
