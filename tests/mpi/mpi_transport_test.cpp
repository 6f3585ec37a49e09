// The MPI wire under mpirun with 2 and with 4 ranks. A case must end on all ranks in the same way, or the job hangs.
#include <mpi.h>

#include <cstring>
#include <memory>
#include <vector>

#include "core/error.h"
#include "kernels/cpu/mpi_transport.h"
#include "tests/catch.h"

using qe::Action;
using qe::ActionKind;
using qe::CpuDevice;
using qe::DrainPolicy;
using qe::Group;

namespace {

int world_size() {
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  return ranks;
}

Action label(ActionKind kind, int stage, int microbatch) {
  return {kind, qe::StageIndex{stage}, qe::MicrobatchIndex{microbatch}};
}

struct Rank {
  Rank(int pipeline, int data, DrainPolicy policy = DrainPolicy::kImmediate, std::uint64_t seed = 0,
       double timeout_s = 60)
      : device(policy, seed), transport(qe::make_mpi_transport(device, pipeline, data, timeout_s)) {}
  CpuDevice device;
  std::unique_ptr<qe::Transport> transport;
  std::unique_ptr<qe::Stream> out = device.make_stream("out");
  std::unique_ptr<qe::Stream> in = device.make_stream("in");
};

}  // namespace

TEST_CASE("a job of another size is refused with both numbers") {
  CpuDevice device;
  REQUIRE_THROWS_WITH(qe::make_mpi_transport(device, world_size() + 1, 1, 60),
                      ContainsSubstring("need " + std::to_string(world_size() + 1) + " ranks") &&
                          ContainsSubstring("got " + std::to_string(world_size())));
}

TEST_CASE("messages of one directed edge arrive in list order under every policy") {
  const int ranks = world_size();
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    Rank r(ranks, 1, seed == 7 ? DrainPolicy::kImmediate : DrainPolicy::kAdversarial, seed);
    const int rank = r.transport->rank(Group::kPipeline);
    const int next = (rank + 1) % ranks;
    const int previous = (rank + ranks - 1) % ranks;
    constexpr int kMessages = 50;
    std::vector<int> out(kMessages), in(kMessages, -1);
    for (int i = 0; i < kMessages; ++i) {
      auto& mine = out[static_cast<std::size_t>(i)];
      r.device.enqueue(*r.out, [&mine, i, rank] { mine = 1000 * rank + i; });
      r.transport->send(*r.out, &mine, sizeof(int), next, label(ActionKind::kSendF, rank, i));
      r.transport->recv(*r.in, &in[static_cast<std::size_t>(i)], sizeof(int), previous,
                        label(ActionKind::kRecvF, rank, i));
    }
    r.device.synchronize(*r.in);
    bool ordered = true;
    for (int i = 0; i < kMessages; ++i) ordered = ordered && in[static_cast<std::size_t>(i)] == 1000 * previous + i;
    CHECK(ordered);
    r.transport->barrier(Group::kWorld);
  }
}

TEST_CASE("large messages cross in both directions at once, although every rank receives first") {
  const int ranks = world_size();
  Rank r(ranks, 1, DrainPolicy::kAdversarial);
  const int rank = r.transport->rank(Group::kPipeline);
  const int peer = rank ^ 1;
  constexpr std::size_t kBytes = std::size_t{8} << 20;  // far above the eager limit of any MPI
  std::vector<unsigned char> out(kBytes, static_cast<unsigned char>(rank + 1)), in(kBytes);
  r.transport->recv(*r.in, in.data(), kBytes, peer, label(ActionKind::kRecvF, 0, 0));
  r.transport->send(*r.out, out.data(), kBytes, peer, label(ActionKind::kSendF, 0, 0));
  r.device.synchronize(*r.in);
  CHECK(in == std::vector<unsigned char>(kBytes, static_cast<unsigned char>(peer + 1)));
  r.transport->barrier(Group::kWorld);
}

TEST_CASE("reductions have rank order and stay within their group") {
  const int pipeline = 2, data = world_size() / 2;
  Rank r(pipeline, data, DrainPolicy::kAdversarial, 5);
  const int rank = r.transport->rank(Group::kWorld);
  CHECK(r.transport->rank(Group::kData) * pipeline + r.transport->rank(Group::kPipeline) == rank);

  // From the left 1 is lost beside 2^24; what follows is exact.
  std::vector<float> ordered(3, rank == 0 ? 0x1p24f : 1.0F);
  float replicas = static_cast<float>(rank + 1);
  float peak = static_cast<float>(rank);
  std::vector<int> all(static_cast<std::size_t>(world_size()), -1);
  r.transport->all_reduce_sum(*r.out, ordered.data(), 3, Group::kWorld);
  r.transport->all_reduce_sum(*r.in, &replicas, 1, Group::kData);
  r.transport->all_reduce_max(*r.in, &peak, 1, Group::kPipeline);
  r.transport->all_gather(*r.out, &rank, all.data(), sizeof rank, Group::kWorld);
  r.device.synchronize();
  CHECK(ordered == std::vector<float>(3, 0x1p24f));
  float expected = 0;
  for (int d = 0; d < data; ++d) expected += static_cast<float>(d * pipeline + rank % pipeline + 1);
  CHECK(replicas == expected);
  CHECK(peak == static_cast<float>(rank / pipeline * pipeline + 1));
  for (int i = 0; i < world_size(); ++i) CHECK(all[static_cast<std::size_t>(i)] == i);
}

TEST_CASE("texts of any length are exchanged in rank order") {
  Rank r(world_size(), 1);
  const int rank = r.transport->rank(Group::kWorld);
  const auto texts = r.transport->exchange(std::string(static_cast<std::size_t>(rank * 5000), 'x'), Group::kWorld);
  REQUIRE(texts.size() == static_cast<std::size_t>(world_size()));
  for (std::size_t i = 0; i < texts.size(); ++i) CHECK(texts[i] == std::string(i * 5000, 'x'));
}

TEST_CASE("a message of another size names itself and both sizes") {
  const std::size_t sent = GENERATE(std::size_t{8}, std::size_t{24});
  Rank r(world_size(), 1);
  const int rank = r.transport->rank(Group::kPipeline);
  char memory[24] = {};
  if (rank % 2 == 0) {
    r.transport->send(*r.out, memory, sent, rank + 1, label(ActionKind::kSendF, rank, 3));
  } else {
    const auto receive = [&] {
      r.transport->recv(*r.in, memory, 16, rank - 1, label(ActionKind::kRecvF, rank, 3));
      r.device.synchronize();
    };
    REQUIRE_THROWS_WITH(receive(), ContainsSubstring("RECV_F3") &&
                                       ContainsSubstring(sent < 16 ? "carries 8 bytes where 16"
                                                                   : "carries more than 16 bytes where 16"));
    r.in.reset();
  }
  r.transport->barrier(Group::kWorld);
}

TEST_CASE("past the deadline a rank names the message and the peer, and the next world works") {
  {
    Rank r(world_size(), 1, DrainPolicy::kAdversarial, 0, 0.2);
    const int rank = r.transport->rank(Group::kPipeline);
    const int peer = rank ^ 1;
    int value = 0;
    r.transport->recv(*r.in, &value, sizeof value, peer, label(ActionKind::kRecvB, 1, 2));
    REQUIRE_THROWS_WITH(r.device.synchronize(),
                        ContainsSubstring("rank " + std::to_string(rank) + " waits for 1RECV_B2") &&
                            ContainsSubstring("from rank " + std::to_string(peer)));
  }
  Rank r(world_size(), 1);
  r.transport->barrier(Group::kWorld);
}
