// The message seam: point to point between pipeline ranks, reductions over a group, and a small host control plane.
// World rank = data rank · P + pipeline rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/action.h"
#include "core/device.h"

namespace qe {

enum class Group : std::uint8_t { kWorld, kPipeline, kData };

class Transport {
 public:
  virtual ~Transport() = default;

  [[nodiscard]] virtual int rank(Group) const = 0;
  [[nodiscard]] virtual int size(Group) const = 0;

  // Stream-ordered; `peer` is a pipeline rank of this replica. Messages of one directed edge match in the order of
  // their calls on both sides. `label` names the message in reports of a deadline: on expiry of the deadline
  // DeviceError says what this rank waits for, from whom and since when.
  virtual void send(Stream&, const void* data, std::size_t bytes, int peer, const Action& label) = 0;
  virtual void recv(Stream&, void* data, std::size_t bytes, int peer, const Action& label) = 0;

  // Stream-ordered, in place, FP32, combined in rank order on every rank: equal bits everywhere.
  virtual void all_reduce_sum(Stream&, float* data, std::int64_t count, Group) = 0;
  virtual void all_reduce_max(Stream&, float* data, std::int64_t count, Group) = 0;
  // Stream-ordered; `out` holds size(group) · bytes, in rank order.
  virtual void all_gather(Stream&, const void* in, void* out, std::size_t bytes, Group) = 0;

  // Host control plane; blocks, under the same deadline. Call with no work in flight.
  virtual void barrier(Group) = 0;
  virtual std::vector<std::string> exchange(const std::string& mine, Group) = 0;  // every rank's text, in rank order
};

}  // namespace qe
