// Transport on host buffers, written once over a wire: sequence numbers, reductions in rank order, control plane. Owns
// no connection: a Wire moves bytes (threads of one process, or MPI).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/transport.h"
#include "kernels/cpu/device.h"
#include "kernels/wire/wire.h"

namespace qe {

// What every member of a group sends to every other.
struct GatherArgs {
  std::shared_ptr<Wire> wire;
  std::vector<int> members;  // world ranks, in rank order
  int self;                  // index of this rank in members
  Channel channel;
  std::uint64_t sequence;
  std::string what;  // "all_reduce_sum 3 over the data group"
};

class MessageTransport final : public Transport {
 public:
  MessageTransport(CpuDevice&, std::shared_ptr<Wire>, RankLayout, const WaitRule&);

  [[nodiscard]] int rank(Group group) const override { return layout_.rank(group); }
  [[nodiscard]] int size(Group group) const override { return layout_.size(group); }
  void send(Stream&, const void* data, std::size_t bytes, int peer, const Action& label) override;
  void recv(Stream&, void* data, std::size_t bytes, int peer, const Action& label) override;
  void all_reduce_sum(Stream&, float* data, std::int64_t count, Group) override;
  void all_reduce_max(Stream&, float* data, std::int64_t count, Group) override;
  void all_gather(Stream&, const void* in, void* out, std::size_t bytes, Group) override;
  void barrier(Group) override;
  std::vector<std::string> exchange(const std::string& mine, Group) override;

 private:
  GatherArgs gather_args(Channel, Group, const char* name);  // takes the next sequence number of the channel
  // Blocks. all[i] has the size of rank i's text when called and holds the text on return.
  void gather_now(std::string_view mine, std::vector<std::string>& all, Group, const char* name);

  CpuDevice& device_;
  std::shared_ptr<Wire> wire_;
  RankLayout layout_;
  std::array<std::uint64_t, kChannels> next_{};
  std::vector<std::uint64_t> next_send_;  // [P]
  std::vector<std::uint64_t> next_recv_;  // [P]
};

}  // namespace qe
