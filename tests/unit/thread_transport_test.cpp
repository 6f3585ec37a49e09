// What the transports promise, over threads: order of an edge, reductions, obligations, and that failure never hangs.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "core/error.h"
#include "kernels/cpu/thread_transport.h"
#include "tests/catch.h"

using qe::Action;
using qe::ActionKind;
using qe::CpuDevice;
using qe::DrainPolicy;
using qe::Group;
using qe::run_ranks;
using qe::ThreadWorld;

namespace {

constexpr std::uint64_t kSeeds = 20;

Action label(ActionKind kind, int stage, int microbatch) {
  return {kind, qe::StageIndex{stage}, qe::MicrobatchIndex{microbatch}};
}

// Catch's assertions are not for several threads, so a rank throws instead.
void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("not kept: " + what);
}

double seconds_of(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

TEST_CASE("messages of one directed edge arrive in list order under every seed") {
  for (std::uint64_t seed = 0; seed <= kSeeds; ++seed) {
    INFO("seed " << seed);
    constexpr int kMessages = 24;
    ThreadWorld world(2, 1);
    run_ranks(world, [&](int rank) {
      CpuDevice device(DrainPolicy::kAdversarial, seed == 0 ? 0 : 2 * seed + static_cast<std::uint64_t>(rank));
      const auto transport = world.connect(rank, device);
      // The boundary of two stage pairs: F of both and B of one share the edge, from three streams.
      std::vector<std::unique_ptr<qe::Stream>> streams;
      for (const char* name : {"x", "y", "z"}) streams.push_back(device.make_stream(name));
      std::vector<int> out(kMessages), in(kMessages, -1);
      for (int i = 0; i < kMessages; ++i) {
        qe::Stream& s = *streams[static_cast<std::size_t>(i) % 3];
        auto& mine = out[static_cast<std::size_t>(i)];
        device.enqueue(s, [&mine, i, rank] { mine = 100 * rank + i; });
        transport->send(s, &mine, sizeof(int), 1 - rank, label(ActionKind::kSendF, i % 3, i));
        transport->recv(*streams[static_cast<std::size_t>(i + 1) % 3], &in[static_cast<std::size_t>(i)], sizeof(int),
                        1 - rank, label(ActionKind::kRecvF, i % 3, i));
      }
      device.synchronize();
      for (int i = 0; i < kMessages; ++i) require(in[static_cast<std::size_t>(i)] == 100 * (1 - rank) + i, "order");
    });
  }
}

TEST_CASE("a send reads its memory when its stream gets there, and the memory is free after it") {
  const auto policy = GENERATE(DrainPolicy::kImmediate, DrainPolicy::kAdversarial);
  ThreadWorld world(2, 1);
  run_ranks(world, [&](int rank) {
    CpuDevice device(policy);
    const auto transport = world.connect(rank, device);
    const auto stream = device.make_stream("s");
    int value = 0;
    if (rank == 0) {
      for (int i = 1; i <= 3; ++i) {
        device.enqueue(*stream, [&value, i] { value = i; });
        transport->send(*stream, &value, sizeof value, 1, label(ActionKind::kSendF, 0, i));
      }
      device.synchronize();
    } else {
      for (int i = 1; i <= 3; ++i) {
        transport->recv(*stream, &value, sizeof value, 0, label(ActionKind::kRecvF, 1, i));
        device.synchronize();
        require(value == i, "value of its time");
      }
    }
  });
}

TEST_CASE("two ranks that receive first and send from another stream complete") {
  for (std::uint64_t seed = 0; seed <= kSeeds; ++seed) {
    ThreadWorld world(2, 1, 20);
    run_ranks(world, [&](int rank) {
      CpuDevice device(DrainPolicy::kAdversarial, seed);
      const auto transport = world.connect(rank, device);
      const auto compute = device.make_stream("compute");
      const auto out = device.make_stream("out");
      const auto in = device.make_stream("in");
      const auto ready = device.make_event();
      int mine = 0, theirs = 0;
      device.enqueue(*compute, [&] { mine = rank + 1; });
      device.record(*ready, *compute);
      device.wait(*out, *ready);
      transport->send(*out, &mine, sizeof mine, 1 - rank, label(ActionKind::kSendF, rank, 0));
      transport->recv(*in, &theirs, sizeof theirs, 1 - rank, label(ActionKind::kRecvF, 1 - rank, 0));
      device.synchronize(*in);  // demands neither `out` nor `compute`
      require(theirs == 2 - rank, "the peer's value");
      transport->barrier(Group::kWorld);  // a rank whose message was there at once has not sent its own yet
    });
  }
}

TEST_CASE("a rank in a barrier still sends what others wait for") {
  ThreadWorld world(2, 1, 20);
  run_ranks(world, [&](int rank) {
    CpuDevice device(DrainPolicy::kAdversarial);
    const auto transport = world.connect(rank, device);
    const auto stream = device.make_stream("s");
    int value = rank == 0 ? 9 : 0;
    if (rank == 0) {
      transport->send(*stream, &value, sizeof value, 1, label(ActionKind::kSendF, 0, 0));
    } else {
      transport->recv(*stream, &value, sizeof value, 0, label(ActionKind::kRecvF, 1, 0));
      device.synchronize();
      require(value == 9, "the value");
    }
    transport->barrier(Group::kWorld);
  });
}

TEST_CASE("a reduction is summed in rank order and has equal bits on every rank") {
  // In floats 2^24 + 1 + 1 depends on the order: from the left both ones are lost, ones first give 2^24 + 2.
  const std::vector<std::vector<float>> parts = {{0x1p24f, 1}, {1, 1}, {1, 0x1p24f}, {-0x1p24f, 0}};
  const std::vector<float> expected = {0, 0x1p24f + 2};
  const auto policy = GENERATE(DrainPolicy::kImmediate, DrainPolicy::kAdversarial);
  ThreadWorld world(4, 1);
  run_ranks(world, [&](int rank) {
    CpuDevice device(policy, static_cast<std::uint64_t>(rank));
    const auto transport = world.connect(rank, device);
    const auto stream = device.make_stream("s");
    std::vector<float> data = parts[static_cast<std::size_t>(rank)];
    transport->all_reduce_sum(*stream, data.data(), 2, Group::kWorld);
    device.synchronize();
    require(data == expected, "rank order");
  });
}

TEST_CASE("reductions and gathers stay within their group and keep their calls apart") {
  constexpr int kPipeline = 2, kData = 2;
  for (std::uint64_t seed = 0; seed <= kSeeds; ++seed) {
    ThreadWorld world(kPipeline, kData);
    run_ranks(world, [&](int rank) {
      CpuDevice device(DrainPolicy::kAdversarial, seed == 0 ? 0 : 4 * seed + static_cast<std::uint64_t>(rank));
      const auto transport = world.connect(rank, device);
      require(transport->rank(Group::kPipeline) == rank % kPipeline, "pipeline rank");
      require(transport->rank(Group::kData) == rank / kPipeline, "data rank");
      require(transport->size(Group::kWorld) == 4, "world size");
      // Ranks run them in another order than they call them: the streams are independent.
      const auto a = device.make_stream("a");
      const auto b = device.make_stream("b");
      float data_sum = static_cast<float>(rank), pipeline_sum = static_cast<float>(rank);
      float again = static_cast<float>(10 * rank), peak = static_cast<float>(-rank);
      int mine = rank;
      std::vector<int> all(4, -1);
      transport->all_reduce_sum(*a, &data_sum, 1, Group::kData);
      transport->all_reduce_sum(*b, &again, 1, Group::kData);
      transport->all_reduce_sum(*b, &pipeline_sum, 1, Group::kPipeline);
      transport->all_reduce_max(*a, &peak, 1, Group::kWorld);
      transport->all_gather(*b, &mine, all.data(), sizeof(int), Group::kWorld);
      device.synchronize(rank % 2 == 0 ? *a : *b);
      device.synchronize();
      require(data_sum == static_cast<float>(2 * (rank % 2) + 2), "sum over replicas");
      require(again == 10 * data_sum, "second sum over replicas");
      require(pipeline_sum == (rank < 2 ? 1.0F : 5.0F), "sum over the pipeline");
      require(peak == 0, "maximum");
      require(all == std::vector<int>{0, 1, 2, 3}, "gather");
    });
  }
}

TEST_CASE("a NaN of any rank wins the maximum") {
  ThreadWorld world(3, 1);
  run_ranks(world, [&](int rank) {
    CpuDevice device;
    const auto transport = world.connect(rank, device);
    const auto stream = device.make_stream("s");
    std::vector<float> data(3, 1);
    data[static_cast<std::size_t>(rank)] = std::numeric_limits<float>::quiet_NaN();
    transport->all_reduce_max(*stream, data.data(), 3, Group::kPipeline);
    device.synchronize();
    for (const float x : data) require(std::isnan(x), "NaN");
  });
}

TEST_CASE("texts of any length are exchanged in rank order") {
  ThreadWorld world(2, 2);
  run_ranks(world, [&](int rank) {
    CpuDevice device;
    const auto transport = world.connect(rank, device);
    for (int round = 0; round < 3; ++round) {
      const auto texts = transport->exchange(std::string(static_cast<std::size_t>(rank), 'x'), Group::kWorld);
      require(texts == std::vector<std::string>{"", "x", "xx", "xxx"}, "texts");
    }
    const auto mine = std::to_string(rank);
    require(transport->exchange(mine, Group::kData).at(1) == std::to_string(2 + rank % 2), "replica");
  });
}

TEST_CASE("a message of another size names itself and both sizes") {
  ThreadWorld world(2, 1);
  REQUIRE_THROWS_WITH(run_ranks(world,
                                [&](int rank) {
                                  CpuDevice device;
                                  const auto transport = world.connect(rank, device);
                                  const auto stream = device.make_stream("s");
                                  char memory[16] = {};
                                  if (rank == 0) {
                                    transport->send(*stream, memory, 8, 1, label(ActionKind::kSendF, 0, 3));
                                  } else {
                                    transport->recv(*stream, memory, 16, 0, label(ActionKind::kRecvF, 1, 3));
                                  }
                                  device.synchronize();
                                  transport->barrier(Group::kWorld);
                                }),
                      ContainsSubstring("1RECV_F3") && ContainsSubstring("carries 8 bytes where 16"));
}

TEST_CASE("past the deadline a rank names the message, the peer, the seconds and what its streams wait for") {
  const auto policy = GENERATE(DrainPolicy::kImmediate, DrainPolicy::kAdversarial);
  ThreadWorld world(2, 1, 0.05);
  CpuDevice device(policy);
  const auto transport = world.connect(0, device);
  const auto in = device.make_stream("from 1");
  const auto compute = device.make_stream("compute");
  const auto arrived = device.make_event();
  int value = 0;
  transport->recv(*in, &value, sizeof value, 1, label(ActionKind::kRecvB, 2, 7));
  device.record(*arrived, *in);
  device.wait(*compute, *arrived);
  device.enqueue(*compute, [&] { ++value; });
  REQUIRE_THROWS_WITH(device.synchronize(*compute),
                      ContainsSubstring("rank 0 waits for 2RECV_B7") && ContainsSubstring("from rank 1 since 0.") &&
                          ContainsSubstring("stream 'compute' (2 queued) waits for stream 'from 1'"));
  REQUIRE_THROWS_AS(transport->barrier(Group::kWorld), qe::DeviceError);
  CHECK(value == 0);
}

TEST_CASE("an unfinished reduction names the ranks that it lacks") {
  ThreadWorld world(3, 1, 0.05);
  CpuDevice device;
  const auto transport = world.connect(1, device);
  const auto stream = device.make_stream("s");
  float x = 1;
  transport->all_reduce_sum(*stream, &x, 1, Group::kPipeline);
  REQUIRE_THROWS_WITH(device.synchronize(),
                      ContainsSubstring("all_reduce_sum 0 over the pipeline group, of rank 0, 2"));
}

TEST_CASE("a rank that fails wakes the others, and its own error is the one reported") {
  const bool told = GENERATE(true, false);  // by run_ranks, or by the transport that unwinds
  ThreadWorld world(3, 1, 60);
  std::atomic<int> woken = 0;
  const auto body = [&](int rank) {
    CpuDevice device(DrainPolicy::kAdversarial);
    const auto transport = world.connect(rank, device);
    const auto stream = device.make_stream("s");
    if (rank == 2) throw qe::DataError("shard 5 is short");
    int value = 0;
    try {
      transport->recv(*stream, &value, sizeof value, 2, label(ActionKind::kRecvF, 0, 0));
      device.synchronize();
    } catch (const qe::WorldAborted&) {
      ++woken;
      throw;
    }
  };
  const double waited = seconds_of([&] {
    REQUIRE_THROWS_WITH(told ? run_ranks(world, body) : run_ranks(3, body), ContainsSubstring("shard 5 is short"));
  });
  CHECK(woken == 2);
  CHECK(waited < 10);
}

TEST_CASE("a rank connects once and to a peer of its own pipeline") {
  ThreadWorld world(2, 1);
  CpuDevice device;
  const auto transport = world.connect(0, device);
  const auto stream = device.make_stream("s");
  int value = 0;
  CHECK_THROWS_AS(world.connect(0, device), std::logic_error);
  CHECK_THROWS_AS(world.connect(2, device), std::logic_error);
  CHECK_THROWS_AS(transport->send(*stream, &value, 4, 0, label(ActionKind::kSendF, 0, 0)), std::logic_error);
  CHECK_THROWS_AS(transport->recv(*stream, &value, 4, 2, label(ActionKind::kRecvF, 0, 0)), std::logic_error);
  CHECK_THROWS_AS(
      device.capture(*stream, [&] { transport->send(*stream, &value, 4, 1, label(ActionKind::kSendF, 0, 0)); }),
      std::logic_error);
}
