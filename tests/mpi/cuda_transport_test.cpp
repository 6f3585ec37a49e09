// The transports of cards under mpirun: IPC with all ranks on one card and, where there are enough, each on its own,
// and NCCL there. A case must end on all ranks in the same way, or the job hangs.
#include <mpi.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/ipc_transport.h"
#include "kernels/cuda/nccl_transport.h"
#include "kernels/wire/mpi_wire.h"
#include "tests/catch.h"

using qe::Action;
using qe::ActionKind;
using qe::Buffer;
using qe::CudaDevice;
using qe::Group;
using qe::MemoryKind;

namespace {

int world_size() {
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  return ranks;
}
int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

Action label(ActionKind kind, int stage, int microbatch) {
  return {kind, qe::StageIndex{stage}, qe::MicrobatchIndex{microbatch}};
}

enum class Mode { kIpcOneCard, kIpc, kNccl };

std::vector<Mode> modes() {
  std::vector<Mode> all{Mode::kIpcOneCard};
  if (CudaDevice::count() < world_size()) return all;
  all.push_back(Mode::kIpc);
  if (qe::nccl_was_built()) all.push_back(Mode::kNccl);
  return all;
}

struct Rank {
  explicit Rank(Mode mode, double timeout_s = 60, int data = 1)
      : device(mode == Mode::kIpcOneCard ? 0 : world_rank()), transport(make(mode, timeout_s, data)) {}

  std::unique_ptr<qe::Transport> make(Mode mode, double timeout_s, int data) {
    qe::MpiWorld world = qe::join_mpi_world(world_size() / data, data);
    return mode == Mode::kNccl ? qe::make_nccl_transport(device, std::move(world.wire), world.layout, timeout_s)
                               : qe::make_ipc_transport(device, std::move(world.wire), world.layout, timeout_s);
  }
  Buffer allocate(std::size_t bytes) { return device.allocate(bytes, MemoryKind::kStep); }
  template <class T>
  void upload(qe::Stream& s, const Buffer& to, const std::vector<T>& from) {
    device.upload(s, to.data(), from.data(), from.size() * sizeof(T));
  }
  template <class T>
  std::vector<T> download(const Buffer& from, std::size_t count) {
    std::vector<T> to(count);
    device.synchronize();  // the value may come from either stream
    device.download(*in, to.data(), from.data(), count * sizeof(T));
    device.synchronize();
    return to;
  }
  // About a tenth of a second of work, so that what comes after it on the stream is late.
  void delay(qe::Stream& s) {
    constexpr std::size_t kBytes = std::size_t{512} << 20;
    if (ballast.bytes() == 0) ballast = allocate(2 * kBytes);
    for (int i = 0; i < 300; ++i) device.copy(s, ballast.as<std::byte>() + kBytes, ballast.data(), kBytes);
  }

  CudaDevice device;
  std::unique_ptr<qe::Transport> transport;
  std::unique_ptr<qe::Stream> out = device.make_stream("out");
  std::unique_ptr<qe::Stream> in = device.make_stream("in");
  Buffer ballast;
};

std::string failure_of(const std::function<void()>& wait) {
  try {
    wait();
  } catch (const qe::Error& e) {
    return e.what();
  }
  return "nothing";
}

// All ranks of a world waited in vain, and this is what one of them said. Whoever was past the deadline first told the
// others, and they stopped for that. Then the next world works.
void expect_first_late(const std::string& said) {
  Rank r(Mode::kIpcOneCard);
  int late = 0;
  for (const std::string& text : r.transport->exchange(said, Group::kWorld)) {
    const bool is_late = text.find("which is past the deadline") != std::string::npos;
    if (!is_late) CHECK_THAT(text, ContainsSubstring("failed; its message says why"));
    late += is_late ? 1 : 0;
  }
  CHECK(late > 0);
}

}  // namespace

TEST_CASE("messages of one directed edge arrive in list order while both directions are in use") {
  for (const Mode mode : modes()) {
    Rank r(mode);
    const int rank = r.transport->rank(Group::kPipeline);
    const int next = (rank + 1) % world_size();
    const int previous = (rank + world_size() - 1) % world_size();
    constexpr int kMessages = 60;
    constexpr std::size_t kWords = std::size_t{1} << 18;
    const Buffer source = r.allocate(kWords * sizeof(int));
    const Buffer all = r.allocate(kMessages * kWords * sizeof(int));
    for (int i = 0; i < kMessages; ++i) {
      // One source: a send that copied late would carry a later value.
      r.upload(*r.out, source, std::vector<int>(kWords, 1000 * rank + i));
      r.transport->send(*r.out, source.data(), source.bytes(), next, label(ActionKind::kSendF, rank, i));
      r.transport->recv(*r.in, all.as<int>() + static_cast<std::size_t>(i) * kWords, source.bytes(), previous,
                        label(ActionKind::kRecvF, rank, i));
    }
    const std::vector<int> got = r.download<int>(all, kMessages * kWords);
    bool ordered = true;
    for (std::size_t i = 0; i < got.size(); ++i) {
      ordered = ordered && got[i] == 1000 * previous + static_cast<int>(i / kWords);
    }
    CHECK(ordered);
    r.transport->barrier(Group::kWorld);
  }
}

TEST_CASE("a receive waits for work that the other process has issued and not done") {
  for (const Mode mode : modes()) {
    Rank r(mode);
    const int rank = r.transport->rank(Group::kPipeline);
    const Buffer value = r.allocate(sizeof(int));
    if (rank % 2 == 0) {
      r.delay(*r.out);
      r.upload(*r.out, value, std::vector<int>{42});
      r.transport->send(*r.out, value.data(), sizeof(int), rank + 1, label(ActionKind::kSendF, 0, 0));
    } else {
      r.transport->recv(*r.in, value.data(), sizeof(int), rank - 1, label(ActionKind::kRecvF, 1, 0));
    }
    CHECK(r.download<int>(value, 1).front() == 42);
    r.transport->barrier(Group::kWorld);
  }
}

TEST_CASE("a block is not rewritten before a slow receiver has read it") {
  for (const Mode mode : modes()) {
    Rank r(mode);
    const int rank = r.transport->rank(Group::kPipeline);
    constexpr int kMessages = 8;
    const Buffer values = r.allocate(kMessages * sizeof(int));
    for (int i = 0; i < kMessages; ++i) {
      if (rank % 2 == 0) {
        r.upload(*r.out, values, std::vector<int>{i});
        r.transport->send(*r.out, values.data(), sizeof(int), rank + 1, label(ActionKind::kSendB, 0, i));
      } else {
        if (i % 3 == 0) r.delay(*r.in);
        r.transport->recv(*r.in, values.as<int>() + i, sizeof(int), rank - 1, label(ActionKind::kRecvB, 1, i));
      }
      r.transport->barrier(Group::kWorld);  // the block is given back on the host, and its reader still waits
    }
    if (rank % 2 == 1) {
      const std::vector<int> got = r.download<int>(values, kMessages);
      for (int i = 0; i < kMessages; ++i) CHECK(got[static_cast<std::size_t>(i)] == i);
    }
    r.transport->barrier(Group::kWorld);
  }
}

TEST_CASE("every rank may send much through IPC before it receives anything") {
  for (const Mode mode : modes()) {
    if (mode == Mode::kNccl) continue;  // there a send may hold its stream until it is received
    Rank r(mode);
    const int rank = r.transport->rank(Group::kPipeline);
    const int peer = rank ^ 1;
    constexpr int kAhead = 24;
    constexpr std::size_t kBytes = std::size_t{3} << 20;  // not a multiple of the driver's page
    const Buffer source = r.allocate(kBytes), sink = r.allocate(kBytes);
    for (int round = 0; round < 2; ++round) {
      for (int i = 0; i < kAhead; ++i) {
        r.upload(*r.out, source, std::vector<unsigned char>(kBytes, static_cast<unsigned char>(10 * rank + i)));
        r.transport->send(*r.out, source.data(), kBytes, peer, label(ActionKind::kSendF, rank, i));
      }
      r.transport->barrier(Group::kWorld);
      for (int i = 0; i < kAhead; ++i) {
        r.transport->recv(*r.in, sink.data(), kBytes, peer, label(ActionKind::kRecvF, rank, i));
        const auto got = r.download<unsigned char>(sink, kBytes);
        CHECK(got == std::vector<unsigned char>(kBytes, static_cast<unsigned char>(10 * peer + i)));
      }
      r.transport->barrier(Group::kWorld);
    }
    const std::size_t staged = r.device.memory_by_kind()[static_cast<std::size_t>(MemoryKind::kBoundary)];
    CHECK(staged == kAhead * (std::size_t{4} << 20));  // the second round took the blocks of the first
  }
}

TEST_CASE("reductions on cards have rank order and equal bits on every rank") {
  const std::size_t count = GENERATE(std::size_t{1}, std::size_t{3}, std::size_t{1000003});
  for (const Mode mode : modes()) {
    Rank r(mode);
    const int rank = r.transport->rank(Group::kWorld);
    const Buffer sum = r.allocate(count * sizeof(float)), peak = r.allocate(count * sizeof(float));
    const Buffer in = r.allocate(sizeof(int)), all = r.allocate(64 * sizeof(int));
    // From the left 1 is lost beside 2^24, however many follow.
    r.upload(*r.out, sum, std::vector<float>(count, rank == 0 ? 0x1p24f : 1.0f));
    r.upload(*r.out, peak, std::vector<float>(count, static_cast<float>(-rank)));
    r.upload(*r.out, in, std::vector<int>{100 + rank});
    r.transport->all_reduce_sum(*r.out, sum.as<float>(), static_cast<std::int64_t>(count), Group::kWorld);
    r.transport->all_reduce_max(*r.out, peak.as<float>(), static_cast<std::int64_t>(count), Group::kPipeline);
    r.transport->all_reduce_sum(*r.out, peak.as<float>(), static_cast<std::int64_t>(count), Group::kData);  // of one
    r.transport->all_gather(*r.out, in.data(), all.data(), sizeof(int), Group::kWorld);
    r.device.synchronize(*r.out);
    CHECK(r.download<float>(sum, count) == std::vector<float>(count, 0x1p24f));
    CHECK(r.download<float>(peak, count) == std::vector<float>(count, 0.0f));
    const auto gathered = r.download<int>(all, static_cast<std::size_t>(world_size()));
    for (int i = 0; i < world_size(); ++i) CHECK(gathered[static_cast<std::size_t>(i)] == 100 + i);
    r.transport->barrier(Group::kWorld);
  }
}

TEST_CASE("reductions on cards stay within their group") {
  if (world_size() != 4) return;
  for (const Mode mode : modes()) {
    Rank r(mode, 60, 2);
    const int rank = r.transport->rank(Group::kWorld);
    const Buffer values = r.allocate(3 * sizeof(float));
    r.upload(*r.out, values, std::vector<float>(3, static_cast<float>(1 << rank)));
    r.transport->all_reduce_sum(*r.out, values.as<float>(), 1, Group::kWorld);
    r.transport->all_reduce_sum(*r.out, values.as<float>() + 1, 1, Group::kPipeline);
    r.transport->all_reduce_sum(*r.out, values.as<float>() + 2, 1, Group::kData);
    const std::vector<float> expected{15, rank < 2 ? 3.0f : 12.0f, rank % 2 == 0 ? 5.0f : 10.0f};
    CHECK(r.download<float>(values, 3) == expected);
    r.transport->barrier(Group::kWorld);
  }
}

TEST_CASE("texts are exchanged in rank order beside the messages of cards") {
  Rank r(Mode::kIpcOneCard);
  const int rank = r.transport->rank(Group::kWorld);
  const auto texts = r.transport->exchange(std::string(static_cast<std::size_t>(rank * 5000), 'x'), Group::kWorld);
  REQUIRE(texts.size() == static_cast<std::size_t>(world_size()));
  for (std::size_t i = 0; i < texts.size(); ++i) CHECK(texts[i] == std::string(i * 5000, 'x'));
}

TEST_CASE("a message of another size names itself and both sizes on cards too") {
  Rank r(Mode::kIpcOneCard);
  const int rank = r.transport->rank(Group::kPipeline);
  const Buffer memory = r.allocate(32);
  if (rank % 2 == 0) {
    r.transport->send(*r.out, memory.data(), 8, rank + 1, label(ActionKind::kSendF, rank, 3));
  } else {
    REQUIRE_THROWS_WITH(r.transport->recv(*r.in, memory.data(), 16, rank - 1, label(ActionKind::kRecvF, rank, 3)),
                        ContainsSubstring("RECV_F3") && ContainsSubstring("carries 8 bytes where 16"));
  }
  r.transport->barrier(Group::kWorld);
}

TEST_CASE("past the deadline a rank on a card names the message and the peer, and the next world works") {
  const int peer = world_rank() ^ 1;
  const std::string said = failure_of([&] {
    Rank r(Mode::kIpcOneCard, 0.3);
    const Buffer value = r.allocate(sizeof(int));
    r.transport->recv(*r.in, value.data(), sizeof(int), peer, label(ActionKind::kRecvB, 1, 2));
  });
  CHECK_THAT(said, ContainsSubstring("waits for 1RECV_B2") &&
                       ContainsSubstring("from rank " + std::to_string(peer) + " since"));
  expect_first_late(said);
}

TEST_CASE("when a rank fails the others leave their waits at once and name it") {
  const auto start = std::chrono::steady_clock::now();
  try {
    Rank r(Mode::kIpcOneCard);
    r.transport->barrier(Group::kWorld);
    if (world_rank() == 0) throw std::runtime_error("first failure");
    const Buffer value = r.allocate(sizeof(int));
    CHECK_THROWS_WITH(r.transport->recv(*r.in, value.data(), sizeof(int), 0, label(ActionKind::kRecvF, 1, 0)),
                      ContainsSubstring("rank 0 failed"));
  } catch (const std::runtime_error& e) {
    // A rank may still be in the barrier when it hears of the failure.
    CHECK_THAT(e.what(), ContainsSubstring(world_rank() == 0 ? "first failure" : "rank 0 failed"));
  }
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
  Rank r(Mode::kIpcOneCard);
  r.transport->barrier(Group::kWorld);
}

TEST_CASE("a rank that waits for its card leaves when another rank fails") {
  const auto start = std::chrono::steady_clock::now();
  std::atomic<bool> go_on = false;
  try {
    Rank r(Mode::kIpcOneCard);
    r.transport->barrier(Group::kWorld);
    if (world_rank() == 0) throw std::runtime_error("first failure");
    r.device.host_call(*r.out, [&] {
      while (!go_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    CHECK_THROWS_WITH(r.device.synchronize(), ContainsSubstring("rank 0 failed"));
    go_on = true;
  } catch (const std::runtime_error& e) {
    // A rank may still be in the barrier when it hears of the failure.
    CHECK_THAT(e.what(), ContainsSubstring(world_rank() == 0 ? "first failure" : "rank 0 failed"));
  }
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
  Rank r(Mode::kIpcOneCard);
  r.transport->barrier(Group::kWorld);
}

TEST_CASE("past the deadline a rank that waits for its card names the stream, also in a copy from or to the host") {
  std::vector<unsigned char> host(std::size_t{1} << 20);
  using Wait = std::function<void(Rank&, const Buffer&)>;
  for (const Wait& wait :
       {Wait([](Rank&r, const Buffer&) { r.device.synchronize(); }),
        Wait([&](Rank&r, const Buffer&b) { r.device.download(*r.out, host.data(), b.data(), 4); }),
        Wait([&](Rank&r, const Buffer&b) { r.device.upload(*r.out, b.data(), host.data(), host.size()); })}) {
    std::atomic<bool> go_on = false;
    const std::string said = failure_of([&] {
      Rank r(Mode::kIpcOneCard, 0.3);
      const Buffer memory = r.allocate(host.size());
      r.device.host_call(*r.out, [&] {
        while (!go_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      });
      const std::shared_ptr<void> at_last(nullptr, [&](void*) { go_on = true; });  // or the device could not be left
      wait(r, memory);
    });
    CHECK_THAT(said, ContainsSubstring("waits for stream 'out' since"));
    expect_first_late(said);
  }
}
