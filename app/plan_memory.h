// What one rank holds, without holding it: the rank is put together as for training, on a device that hands out
// addresses and counts. So bytes and graphs cannot drift from the program that they are about.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "core/runtime/pipeline_rank.h"

namespace qe {

struct RankFootprint {
  std::array<std::size_t, kMemoryKinds> bytes{};  // by MemoryKind, as Device::memory_by_kind() of the run
  int graphs = 0;
  int first_write_graphs = 0;  // of these
  int refresh_graphs = 0;      // of these
  [[nodiscard]] std::size_t total() const noexcept;
};

// Pipeline rank `rank` of a replica. Allocates no tensor memory.
RankFootprint lay_out(const RankConfig&, const RankPlan&, int rank, int replicas);

// Every matrix product that some rank of a replica computes, in no order and with doubles; only shapes, types, pitches
// and additions mean something, the addresses do not.
std::vector<GemmArgs> matrix_products(const RankConfig&, const RankPlan&, int replicas);

// The place of a rank in a job, for a rank that is not run with others: reductions over one rank are done as they are;
// messages and reductions over more are a bug.
class PlaceInJob final : public Transport {
 public:
  PlaceInJob(int rank, int ranks, int replicas) : rank_(rank), ranks_(ranks), replicas_(replicas) {}

  [[nodiscard]] int rank(Group) const override;
  [[nodiscard]] int size(Group) const override;
  void send(Stream&, const void* data, std::size_t bytes, int peer, const Action& label) override;
  void recv(Stream&, void* data, std::size_t bytes, int peer, const Action& label) override;
  void all_reduce_sum(Stream&, float* data, std::int64_t count, Group) override;
  void all_reduce_max(Stream&, float* data, std::int64_t count, Group) override;
  void all_gather(Stream&, const void* in, void* out, std::size_t bytes, Group) override;
  void barrier(Group) override;
  std::vector<std::string> exchange(const std::string& mine, Group) override;

 private:
  int rank_, ranks_, replicas_;
};

}  // namespace qe
