// What moves bytes between the hosts of two ranks, and how ranks are numbered. Owned by the transports of both
// backends; knows no device.
//
// A message is addressed by (from, to, channel, sequence). Sequence numbers are taken when a call is made, not when a
// stream gets there, so what matches does not depend on streams or on a drain policy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/error.h"
#include "core/transport.h"

namespace qe {

enum class Channel : std::uint8_t {
  kPoint,
  kWorldStream,  // reductions on streams, one channel a group
  kPipelineStream,
  kDataStream,
  kWorldControl,  // the host control plane
  kPipelineControl,
  kDataControl,
  kCredit,  // a receiver gives memory back to its sender (staged_transport.h)
};
inline constexpr int kChannels = 8;
[[nodiscard]] Channel stream_channel(Group) noexcept;
[[nodiscard]] Channel control_channel(Group) noexcept;

const char* name_of(Group) noexcept;

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

// What is thrown when a message does not fit; `found` is a number or "more than" one.
DeviceError size_mismatch(int rank, const std::string& what, const std::string& found, std::size_t expected);

// World rank = data rank · pipeline + pipeline rank.
struct RankLayout {
  int world;     // this rank
  int pipeline;  // P
  int data;      // replicas

  [[nodiscard]] int rank(Group) const noexcept;
  [[nodiscard]] int size(Group) const noexcept;
  [[nodiscard]] int world_rank_of(int member, Group) const noexcept;
};

}  // namespace qe
