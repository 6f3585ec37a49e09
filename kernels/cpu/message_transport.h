// Transport on host buffers, written once over a wire: addressing, sequence numbers, reductions in rank order, control
// plane. Owns no connection: a Wire moves bytes (threads of one process, or MPI).
//
// A message is addressed by (from, to, channel, sequence). Sequence numbers are taken when a call is made, not when the
// stream gets there, so what matches does not depend on streams or on the drain policy.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/transport.h"
#include "kernels/cpu/device.h"

namespace qe {

enum class Channel : std::uint8_t {
  kPoint,
  kWorldStream,  // reductions on streams, one channel a group
  kPipelineStream,
  kDataStream,
  kWorldControl,  // the host control plane
  kPipelineControl,
  kDataControl,
};
inline constexpr int kChannels = 7;

struct Address {
  int peer;  // world rank
  Channel channel;
  std::uint64_t sequence;  // from 0, per (from, to, channel)
};

// A message that is expected. Destroyed before it is done, it no longer touches its memory.
class Receive {
 public:
  virtual ~Receive() = default;
  [[nodiscard]] virtual bool done() = 0;  // DeviceError: other size than expected, or the wire is broken
};

// Neither member blocks.
class Wire {
 public:
  virtual ~Wire() = default;
  virtual void post(const Address& to, const void* data, std::size_t bytes) = 0;  // the bytes are copied
  // `what` names the message in errors.
  virtual std::unique_ptr<Receive> expect(const Address& from, void* data, std::size_t bytes, std::string what) = 0;
};

// What a wire throws when a message does not fit; `found` is a number or "more than" one.
DeviceError size_mismatch(int rank, const std::string& what, const std::string& found, std::size_t expected);

// What every member of a group sends to every other.
struct GatherArgs {
  std::shared_ptr<Wire> wire;
  std::vector<int> members;  // world ranks, in rank order
  int self;                  // index of this rank in members
  Channel channel;
  std::uint64_t sequence;
  std::string what;  // "all_reduce_sum 3 over the data group"
};

struct RankLayout {
  int rank;      // world rank: data rank · pipeline + pipeline rank
  int pipeline;  // P
  int data;      // replicas
};

class MessageTransport final : public Transport {
 public:
  MessageTransport(CpuDevice&, std::shared_ptr<Wire>, RankLayout, double timeout_s);

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
  [[nodiscard]] int world_rank_of(int member, Group) const;
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
