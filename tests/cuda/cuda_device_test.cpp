// What the CUDA device promises: order within a stream, edges between streams, what a graph keeps, where memory goes.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/device.h"
#include "tests/catch.h"

using namespace qe;

namespace {

using Bytes = std::vector<unsigned char>;

Bytes pattern(std::size_t bytes, unsigned char first) {
  Bytes all(bytes);
  std::iota(all.begin(), all.end(), first);
  return all;
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

struct TwoStreams {
  CudaDevice device;
  std::unique_ptr<Stream> a = device.make_stream("a");
  std::unique_ptr<Stream> b = device.make_stream("b");
  std::unique_ptr<Event> event = device.make_event();

  Bytes read(const Buffer& from) {
    Bytes all(from.bytes());
    device.download(*a, all.data(), from.data(), all.size());
    device.synchronize(*a);
    return all;
  }
  std::size_t workspace() const { return device.memory_by_kind()[static_cast<std::size_t>(MemoryKind::kWorkspace)]; }
};

// False, with a warning, on a machine without a GPU.
bool has_device() {
  if (CudaDevice::count() > 0) return true;
  WARN("skipped: no CUDA device here");
  return false;
}

}  // namespace

TEST_CASE("without a device the error says what to do") {
  if (CudaDevice::count() > 0) {
    REQUIRE_THROWS_WITH(CudaDevice(99), ContainsSubstring("CUDA device 99"));
  } else {
    REQUIRE_THROWS_WITH(CudaDevice(), ContainsSubstring("no CUDA device") && ContainsSubstring("execution.backend"));
  }
}

TEST_CASE("the device says what card it is") {
  if (!has_device()) return;
  CHECK_THAT(CudaDevice().description(), ContainsSubstring("NVIDIA") && ContainsSubstring(", sm_"));
}

TEST_CASE("upload, copy, zero, download and host calls keep the order of their stream") {
  if (!has_device()) return;
  for (const std::size_t bytes : {std::size_t{4}, std::size_t{65536}, std::size_t{5} << 20}) {
    INFO(bytes << " bytes");
    TwoStreams t;
    Buffer x = t.device.allocate(bytes, MemoryKind::kStep);
    Buffer y = t.device.allocate(bytes, MemoryKind::kStep);
    const Bytes sent = pattern(bytes, 3);
    Bytes before(bytes, 1), after(bytes, 1), cleared(bytes, 1);
    std::vector<int> order;
    t.device.download(*t.a, before.data(), y.data(), bytes);
    t.device.upload(*t.a, x.data(), sent.data(), bytes);
    t.device.host_call(*t.a, [&] { order.push_back(1); });
    t.device.copy(*t.a, y.data(), x.data(), bytes);
    t.device.zero(*t.a, x.data(), bytes);
    t.device.download(*t.a, after.data(), y.data(), bytes);
    t.device.download(*t.a, cleared.data(), x.data(), bytes);
    t.device.host_call(*t.a, [&] { order.push_back(after == sent ? 2 : -1); });
    t.device.synchronize(*t.a);
    CHECK(before == Bytes(bytes, 0));
    CHECK(after == sent);
    CHECK(cleared == Bytes(bytes, 0));
    CHECK(order == std::vector<int>{1, 2});
  }
}

TEST_CASE("an upload reads the host bytes inside its call, also while its stream is busy") {
  if (!has_device()) return;
  for (const std::size_t bytes : {std::size_t{4}, std::size_t{40000}, std::size_t{65536}, std::size_t{3} << 20}) {
    INFO(bytes << " bytes");
    TwoStreams t;
    Buffer to = t.device.allocate(bytes, MemoryKind::kStep);
    Bytes host = pattern(bytes, 7);
    t.device.host_call(*t.a, [] { sleep_ms(30); });
    t.device.upload(*t.a, to.data(), host.data(), bytes);
    std::fill(host.begin(), host.end(), static_cast<unsigned char>(0));
    CHECK(t.read(to) == pattern(bytes, 7));
  }
}

TEST_CASE("a wait edge holds, and one of an event that was never recorded is none") {
  if (!has_device()) return;
  TwoStreams t;
  std::vector<std::int32_t> host(1);
  Buffer cell = t.device.allocate(sizeof(std::int32_t), MemoryKind::kStep);
  t.device.wait(*t.b, *t.event);
  for (std::int32_t i = 1; i <= 20; ++i) {
    t.device.host_call(*t.a, [] { sleep_ms(2); });
    t.device.upload(*t.a, cell.data(), &i, sizeof i);
    t.device.record(*t.event, *t.a);
    t.device.wait(*t.b, *t.event);
    t.device.download(*t.b, host.data(), cell.data(), sizeof i);
    t.device.synchronize(*t.b);
    CHECK(host[0] == i);
  }
}

TEST_CASE("a download into page-locked memory does not hold the host back") {
  if (!has_device()) return;
  TwoStreams t;
  const Bytes sent = pattern(64, 3);
  Buffer cell = t.device.allocate(sent.size(), MemoryKind::kStep);
  t.device.upload(*t.a, cell.data(), sent.data(), sent.size());
  const HostMemory host = t.device.allocate_host(sent.size());
  std::atomic<bool> queued = false;
  bool in_time = false;
  t.device.host_call(*t.a, [&] {
    for (int i = 0; i < 5000 && !queued; ++i) sleep_ms(1);
    in_time = queued;
  });
  t.device.download(*t.a, host.get(), cell.data(), sent.size());
  queued = true;
  t.device.synchronize(*t.a);
  CHECK(in_time);
  CHECK(Bytes(host.get(), host.get() + sent.size()) == sent);
}

TEST_CASE("synchronize waits for every stream of the device") {
  if (!has_device()) return;
  TwoStreams t;
  int runs = 0;
  t.device.host_call(*t.a, [&] {
    sleep_ms(20);
    ++runs;
  });
  t.device.record(*t.event, *t.a);
  t.device.wait(*t.b, *t.event);
  t.device.host_call(*t.b, [&] { ++runs; });
  t.device.synchronize();
  CHECK(runs == 2);
}

TEST_CASE("a capture runs nothing; each replay runs all of it, over the memory of the moment") {
  if (!has_device()) return;
  const std::size_t bytes = 3 << 20;
  TwoStreams t;
  Buffer from = t.device.allocate(bytes, MemoryKind::kStep);
  Buffer to = t.device.allocate(bytes, MemoryKind::kStep);
  Bytes large(bytes, 1), small(4, 1), tail(4, 1);  // pageable
  int calls = 0;
  bool complete = false;
  const auto graph = t.device.capture(*t.a, [&] {
    t.device.copy(*t.a, to.data(), from.data(), bytes);
    t.device.download(*t.a, small.data(), to.data(), small.size());
    t.device.download(*t.a, large.data(), to.data(), bytes);
    t.device.zero(*t.a, from.data(), bytes);
    t.device.download(*t.a, tail.data(), from.data(), tail.size());
    t.device.host_call(*t.a, [&] {
      ++calls;
      complete = large.back() == small.front() && tail == Bytes(4, 0);
    });
  });
  CHECK(graph->nodes() == 9);  // three downloads have a copy and a host node each
  t.device.synchronize();
  CHECK(calls == 0);
  CHECK(large == Bytes(bytes, 1));
  CHECK(t.read(to) == Bytes(bytes, 0));
  for (const unsigned char value : Bytes{5, 6, 7}) {
    t.device.upload(*t.a, from.data(), Bytes(bytes, value).data(), bytes);
    t.device.launch(*graph, *t.a);
    t.device.synchronize(*t.a);
    CHECK(large == Bytes(bytes, value));
    CHECK(small == Bytes(4, value));
    CHECK(complete);
    CHECK(t.read(from) == Bytes(bytes, 0));
  }
  CHECK(calls == 3);
}

TEST_CASE("a graph replays on another stream") {
  if (!has_device()) return;
  TwoStreams t;
  int calls = 0;
  const auto graph = t.device.capture(*t.a, [&] { t.device.host_call(*t.a, [&] { ++calls; }); });
  t.device.launch(*graph, *t.b);
  t.device.launch(*graph, *t.b);
  t.device.synchronize(*t.b);
  CHECK(calls == 2);
}

TEST_CASE("a capture refuses what a graph cannot hold and leaves capture mode") {
  if (!has_device()) return;
  TwoStreams t;
  Buffer memory = t.device.allocate(16, MemoryKind::kStep);
  const auto graph = t.device.capture(*t.a, [] {});
  int runs = 0;
  const auto refuses = [&](const std::function<void()>& body) {
    CHECK_THROWS_AS(t.device.capture(*t.a, body), std::logic_error);
    t.device.host_call(*t.a, [&] { ++runs; });
    t.device.synchronize();
  };
  refuses([&] { t.device.zero(*t.b, memory.data(), 16); });
  refuses([&] { (void)t.device.allocate(16, MemoryKind::kTape); });
  refuses([&] { (void)t.device.make_stream("c"); });
  refuses([&] { t.device.record(*t.event, *t.a); });
  refuses([&] { t.device.wait(*t.a, *t.event); });
  refuses([&] { t.device.synchronize(); });
  refuses([&] { t.device.upload(*t.a, memory.data(), &runs, 4); });
  refuses([&] { t.device.launch(*graph, *t.a); });
  refuses([&] { (void)t.device.capture(*t.a, [] {}); });
  CHECK(runs == 9);
}

TEST_CASE("a body that throws ends its capture, and its error comes through") {
  if (!has_device()) return;
  TwoStreams t;
  Buffer memory = t.device.allocate(16, MemoryKind::kStep);
  CHECK_THROWS_AS(t.device.capture(*t.a,
                                   [&] {
                                     t.device.zero(*t.a, memory.data(), 16);
                                     throw DataError("x");
                                   }),
                  DataError);
  const auto graph = t.device.capture(*t.a, [&] { t.device.zero(*t.a, memory.data(), 16); });
  t.device.launch(*graph, *t.a);
  t.device.synchronize();
  CHECK(graph->nodes() == 1);
}

TEST_CASE("what a host call throws leaves the next synchronize as DeviceError, and the device goes on") {
  if (!has_device()) return;
  TwoStreams t;
  t.device.host_call(*t.a, [] { throw std::runtime_error("broken call"); });
  REQUIRE_THROWS_WITH(t.device.synchronize(*t.a), ContainsSubstring("broken call"));
  const auto graph =
      t.device.capture(*t.a, [&] { t.device.host_call(*t.a, [] { throw std::runtime_error("broken node"); }); });
  for (int replay = 0; replay < 2; ++replay) {
    t.device.launch(*graph, *t.a);
    CHECK_THROWS_AS(t.device.synchronize(), DeviceError);
  }
  t.device.synchronize();
}

TEST_CASE("an eager host call goes when it has run, a captured one with its graph") {
  if (!has_device()) return;
  TwoStreams t;
  const auto token = std::make_shared<int>(0);
  t.device.host_call(*t.a, [held = token] { ++*held; });
  t.device.synchronize(*t.a);
  CHECK(token.use_count() == 1);
  auto graph = t.device.capture(*t.a, [&] { t.device.host_call(*t.a, [held = token] { ++*held; }); });
  t.device.launch(*graph, *t.a);
  t.device.synchronize(*t.a);
  CHECK(token.use_count() == 2);
  CHECK(*token == 2);
  graph.reset();
  CHECK(token.use_count() == 1);
}

TEST_CASE("memory is aligned, zeroed and accounted by kind and peak") {
  if (!has_device()) return;
  TwoStreams t;
  for (int round = 0; round < 2; ++round) {  // the second time over memory that was written
    Buffer tape = t.device.allocate(1000, MemoryKind::kTape);
    Buffer weights = t.device.allocate(24, MemoryKind::kWeights);
    CHECK(reinterpret_cast<std::uintptr_t>(tape.data()) % 256 == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(weights.data()) % 256 == 0);
    CHECK(t.read(tape) == Bytes(1000, 0));
    CHECK(t.device.memory_by_kind()[static_cast<std::size_t>(MemoryKind::kTape)] == 1000);
    CHECK(t.device.memory_by_kind()[static_cast<std::size_t>(MemoryKind::kWeights)] == 24);
    CHECK(t.device.memory_peak() == 1024);
    t.device.upload(*t.a, tape.data(), Bytes(1000, 9).data(), 1000);
    t.device.synchronize();
  }
  CHECK(t.device.memory_by_kind() == std::array<std::size_t, kMemoryKinds>{});
  CHECK(t.device.memory_peak() == 1024);
  CHECK(t.device.allocate(0, MemoryKind::kTape).bytes() == 0);
  REQUIRE_THROWS_WITH(t.device.allocate(std::size_t{1} << 50, MemoryKind::kMoments),
                      ContainsSubstring("moments") && ContainsSubstring("GiB free"));
  CHECK(t.device.allocate(16, MemoryKind::kTape).bytes() == 16);  // and the device goes on
}

TEST_CASE("a stream has operations' memory from its first operation or capture on, and never inside one") {
  if (!has_device()) return;
  TwoStreams t;
  CHECK(t.workspace() == 0);
  const auto graph = t.device.capture(*t.a, [&] {
    const cuda::Launch& launch = t.device.launch_on(*t.a);
    CHECK(launch.scratch.bytes == cuda::kScratchBytes);
    CHECK(launch.multiprocessors > 0);
  });
  const std::size_t one = t.workspace();
  CHECK(one >= cuda::kScratchBytes);
  const cuda::Launch& launch = t.device.launch_on(*t.a);
  CHECK(t.device.gemm_workspace(*t.a).as<unsigned char>() == launch.scratch.as<unsigned char>() + launch.scratch.bytes);
  CHECK(t.workspace() == one);
  CHECK(t.device.launch_on(*t.b).scratch.data != launch.scratch.data);
  CHECK(t.workspace() == 2 * one);
  t.b.reset();
  CHECK(t.workspace() == one);
}

TEST_CASE("a table is uploaded once and found again by its bytes") {
  if (!has_device()) return;
  TwoStreams t;
  cuda::DeviceTables& tables = t.device.launch_on(*t.a).tables;
  const Bytes one = pattern(1000, 1), two = pattern(1000, 2);
  const void* first = tables.find_or_upload(one.data(), one.size());
  const void* second = tables.find_or_upload(two.data(), two.size());
  CHECK(first != second);
  CHECK(tables.find_or_upload(Bytes(one).data(), one.size()) == first);
  Bytes seen(1000);
  t.device.download(*t.a, seen.data(), first, seen.size());
  t.device.synchronize();
  CHECK(seen == one);
  const auto graph = t.device.capture(*t.a, [&] {
    CHECK(tables.find_or_upload(one.data(), one.size()) == first);
    CHECK_THROWS_AS(tables.find_or_upload(one.data(), 10), std::logic_error);
  });
}
